"""Compiles and runs the programs of self-tests of kernels.

Self-tests of many shapes run at the same time, at the start of a run. Nearly all of their time is compilation, and tracing and
lowering, which is Python.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

Programs = Mapping[Any, tuple[Any, tuple[Any, ...]]]
"""(jitted function, shapes of its arguments) by any key."""
EVENT = "/maxtext_like/self_test/"
"""Prefix of the events of ``jax.monitoring`` with the seconds of each ``STAGES``."""
STAGES = ("lowering", "compilation", "run")
# XLA compiles and times dozens of kernels for each matrix product that it implements. For a float32 product, each kernel takes
# about one second of a core. A test of correctness does not need the fastest kernel. The tested kernel runs as in training: the
# tiles of Pallas kernels are chosen in Python by the shapes, and JAX names cuDNN's algorithm. The products around it and in
# references are cuBLAS's, which has nothing to compile. CUDA graphs are for programs that run often, see ``run_alone``.
_WITHOUT_TUNING = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False, "xla_gpu_graph_min_graph_size": 1 << 30}

_compiling: weakref.WeakValueDictionary[Any, Future[Any]] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_lowering = threading.Lock()
_running = threading.Lock()


def compile_together(programs: Programs) -> dict[Any, Future[Any]]:
  """Compile jitted functions at the same time, for JAX's default device. Tests that run at the same time share equal programs.

  Args:
    programs: the functions and the shapes of their arguments.

  Returns:
    The compiled functions by the same keys. The result of a future raises what its compilation raised.
  """
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  (it belongs to a thread)
  platform = jax.default_backend() if device is None else getattr(device, "platform", device)
  options = _WITHOUT_TUNING if platform in ("gpu", "cuda") else None

  def compiled(run: Any, arguments: tuple[Any, ...]) -> Any:
    # Taking turns, the first program is compiled while the next one is lowered. Without turns all would be lowered at about the
    # same time, after the sum of their times.
    with jax.default_device(device):
      with _lowering, _timed("lowering"):
        program = run.lower(*arguments)
      with _timed("compilation"):
        return program.compile(compiler_options=options)

  pool = ThreadPoolExecutor(max(1, len(programs)), "compile")
  futures = {}
  for key, (run, arguments) in programs.items():
    leaves, tree = jax.tree.flatten(arguments)
    program = run, device, tree, tuple((x.shape, str(x.dtype)) for x in leaves)
    with _lock:
      known = _compiling.get(program)
      if known is None or (known.done() and known.exception() is not None):
        known = _compiling[program] = pool.submit(compiled, run, arguments)
    futures[key] = known
  pool.shutdown(wait=False)
  return futures


def run_alone(program: Future[Any], *arguments: Any) -> Any:
  """Run a program of ``compile_together`` and wait for its results. Tests that run at the same time take turns.

  While XLA records a CUDA graph for one program, another thread must not launch a graph: on an H200, tests without turns failed
  with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
  """
  compiled = program.result()
  with _running, _timed("run"):
    return jax.block_until_ready(compiled(*arguments))


@contextlib.contextmanager
def _timed(stage: str) -> Iterator[None]:
  begin = time.monotonic()
  try:
    yield
  finally:
    jax.monitoring.record_event_duration_secs(EVENT + stage, time.monotonic() - begin)
