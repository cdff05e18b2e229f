"""Settings of all tests. They must be made before anything imports JAX.

Programs are compiled without LLVM's optimizations, which take most of a test's time. XLA's own passes (fusion, layouts, places
of rounding) are those of every run, except that JAX 0.10 generates code for fusions with its older emitter. The first command
of the README and the benchmarks compile as a user's run does.
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
if version("jaxlib").startswith("0.10."):  # halves the compile time; later versions do not have this flag
  FLAGS.append("--xla_cpu_use_fusion_emitters=false")

if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

# Threads of XLA's CPU backend; the default is one per core. In Pallas' interpreter the three warpgroups of a kernel wait for
# each other in calls of the host, so two threads would wait forever.
os.environ.setdefault("NPROC", "3")

# NumPy's products are small here. More threads would wait for work and take a core from the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# As in cli/main.py: tracing leaves a million objects, of which nearly none is garbage, so collecting often is a waste of time.
gc.set_threshold(50_000, 20, 100)

# The time of an example depends on the machine, so it is not checked.
settings.register_profile("maxtext_like", deadline=None)
settings.load_profile("maxtext_like")

# Under nohup or setsid SIGHUP is ignored, and the programs that tests start would inherit this.
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
"""Files with minutes of slow tests. They run first: if one began last, one worker would be idle while the other runs it."""
assert all(path.exists() for path in LONGEST)


def pytest_collection_modifyitems(items):
  if importlib.util.find_spec("libtpu") is None:
    for item in items:
      if item.get_closest_marker("tpu"):
        item.add_marker(pytest.mark.skip(reason="libtpu is not installed"))
  items.sort(key=lambda item: LONGEST.index(item.path) if item.path in LONGEST else len(LONGEST))


def pytest_collection_finish():
  """Let ten programs that are lowered one after the other in a thread share an MLIR context, as JAX does since 0.11.

  JAX 0.10 makes a context for each program, which takes 3 ms and 1.4 MB for the life of the program, and each thousand of them
  slows down the next ones: a fifth of a worker's time. The text of a program is the same.
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
"""A process has at most 65530 memory mappings (vm.max_map_count). Every kernel of a compiled program takes some, and XLA
crashes when there are none left."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
  """After the last test of a file, clear the caches that the file defines, and JAX's caches if they are large.

  JAX's compilation cache is also set back, because runs in the file may have set their own. Caches of imported modules are
  kept: a process has one emulator of each kind of storage.
  """
  result = yield
  # ``main`` ends the process without a message if threads were abandoned. Those of one test must not end the worker in a later
  # one.
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
