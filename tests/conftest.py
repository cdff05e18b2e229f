"""For all tests, before anything imports JAX: compiled without the optimization of LLVM, which takes most of a test's time.

XLA's own passes (fusion, layouts, what is rounded where) are those of every run; on JAX 0.10 fusions become code through its
older emitter. The first command of the README, the benchmarks and the device tables run as a user's do.
"""

import functools
import gc
import importlib.util
import os
import signal
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):  # a half of the compile time; newer ones have not got it
  FLAGS.append("--xla_cpu_use_fusion_emitters=false")

if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

# Threads of XLA's CPU backend, which by itself has one a core. In Pallas' interpreter the warpgroups of a kernel wait for each
# other inside calls of the host, three of them: on two cores the third would get no thread.
os.environ.setdefault("NPROC", "3")

# NumPy's products are small here: its other threads would only wait for work, which takes a core from the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# As a verb has it (cli/main.py): of what tracing leaves, next to nothing is garbage, and it is a million objects to look at.
gc.set_threshold(50_000, 20, 100)

# How long an example takes is the machine's affair, and says nothing of the code.
settings.register_profile("maxtext_like", deadline=None)
settings.load_profile("maxtext_like")

# Under nohup or setsid a hangup is ignored, and the programs that tests start would take that over.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

HERE = Path(__file__).parent
LONGEST = [
  HERE / f"{name}.py"
  for name in (
    "training/test_parallelism", "layers/kernels/attention/test_mosaic_flash", "training/step/in_backward/test_step",
    "faults/test_processes", "faults/test_remote", "docs/test_printed_commands", "analysis/test_failed_step",
    "analysis/test_step_xray", "training/optimizers/test_on_host", "training/test_vision_training",
    "training/adapters/test_adapters", "benchmarks/test_fine_tuning", "faults/test_train_command", "faults/test_output",
    "docs/test_python_page", "examples/test_notebooks",
  )
]  # fmt: skip
"""Files with minutes of slow tests. They come first: one that began last would keep one worker, and the other idle."""
assert all(path.exists() for path in LONGEST)


def pytest_collection_modifyitems(items):
  if importlib.util.find_spec("libtpu") is None:
    for item in items:
      if item.get_closest_marker("tpu"):
        item.add_marker(pytest.mark.skip(reason="libtpu is not installed"))
  items.sort(key=lambda item: LONGEST.index(item.path) if item.path in LONGEST else len(LONGEST))


def pytest_collection_finish():
  """What JAX does itself since 0.11: ten programs, one behind the other in a thread, share a context of MLIR.

  JAX 0.10 makes one for each, of 3 ms and of 1.4 MB that stay as long as the program does, and every thousand that live make
  the next ones slower: a fifth of a worker's time. The text of a program is the same.
  """
  if "jax" not in sys.modules or not version("jax").startswith("0.10."):
    return
  from jax._src.interpreters import mlir

  make, kept = mlir.make_ir_context, threading.local()

  def make_ir_context():
    context, count = getattr(kept, "last", (None, 0))
    kept.last = (make(), 1) if context is None or count == 10 else (context, count + 1)
    return kept.last[0]

  mlir.make_ir_context = make_ir_context


MAPPINGS = Path("/proc/self/maps")
"""Linux gives a process 65530 (vm.max_map_count). Every kernel of a compiled program takes some, and XLA dies without."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
  """Behind the last test of a file: what it keeps in caches that it defines goes, and what JAX keeps where it is much.

  Its runs' cache of compiled programs is no longer JAX's. What a file imports stays: the emulators of stores are one a process.
  """
  result = yield
  # Threads that a test leaves behind are no reason for ``main`` to end the worker in a later test, which it would do silently.
  if "maxtext_like.abandoned_threads" in sys.modules:
    abandoned: Any = sys.modules["maxtext_like.abandoned_threads"]
    abandoned._threads.clear()
    abandoned._calling_back = False
  if nextitem is None or nextitem.path != item.path:
    for kept in vars(item.module).values():
      if isinstance(kept, functools._lru_cache_wrapper) and kept.__module__ == item.module.__name__:
        kept.cache_clear()
    if "jax" in sys.modules:
      settings = sys.modules["jax"].config
      settings.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
      settings.update("jax_enable_compilation_cache", True)
    if "jax" in sys.modules and MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > 10_000:
      sys.modules["jax"].clear_caches()
      gc.collect()
  return result
