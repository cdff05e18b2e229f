"""Large pages for the arrays of a CPU: a step's temporary memory is asked of the system anew each time, page by page.

XLA takes what a step works in from malloc and gives it back, 100 MiB and more, and every first touch of a page is a fault, a
fifth of the processor's time in a small model's step. glibc asks for pages of 2 MiB where its tunable says so, which it reads
when a process begins (glibc manual, "Memory Allocation Tunables"; kernel documentation, "Transparent Hugepage Support").
"""

import os
import sys
from pathlib import Path

_TUNABLE = "glibc.malloc.hugetlb"
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def begin_again() -> None:
  """Starts this process once more with large pages, where they are to be had for the asking; else does nothing.

  Call it first of all: the interpreter's start, hundredths of a second, is all that is lost. A process that has imported JAX
  has begun long ago, perhaps as another program that runs this one inside it: it is left alone. A ``GLIBC_TUNABLES`` that
  names the tunable is obeyed as it is: ``GLIBC_TUNABLES=glibc.malloc.hugetlb=0`` turns this off.
  """
  tunables = os.environ.get("GLIBC_TUNABLES", "")
  if "jax" in sys.modules or _TUNABLE in tunables or not _for_the_asking():
    return
  os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _for_the_asking() -> bool:
  """Linux gives large pages to those who ask, and this is a glibc that can ask (2.35)."""
  if sys.platform != "linux" or not sys.executable:
    return False
  try:
    name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    setting = _SETTING.read_text()
  except (ValueError, OSError):  # another C library, a kernel without them
    return False
  return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35) and "[madvise]" in setting
