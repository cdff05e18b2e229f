"""Compiles and runs the programs of self-tests of kernels.

Self-tests of many shapes run at the same time, at the start of a run. Nearly all of their time is compilation, and tracing and
lowering, which is Python. In a process, one thread runs Python at a time. Kernels that take seconds and that can be lowered
without a GPU are therefore lowered in other processes.
"""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

_log = logging.getLogger(__name__)
Programs = Mapping[Any, tuple[Any, tuple[Any, ...]]]
"""(jitted function, shapes of its arguments) by any key."""
Elsewhere = tuple[Callable[[Any], Programs], Any]
"""A function of a module, and its argument, which can be pickled."""
EVENT = "/maxtext_like/self_test/"
"""Prefix of the events of ``jax.monitoring`` with the seconds of each ``STAGES``."""
STAGES = ("lowering", "compilation", "run")
# XLA compiles and times dozens of kernels for each matrix product that it implements. For a float32 product, each kernel takes
# about one second of a core. A test of correctness does not need the fastest kernel. The tested kernel runs as in training: the
# tiles of Pallas kernels are chosen in Python by the shapes, and JAX names cuDNN's algorithm. The products around it and in
# references are cuBLAS's, which has nothing to compile. CUDA graphs are for programs that run often, see ``run_alone``.
_WITHOUT_TUNING = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False, "xla_gpu_graph_min_graph_size": 1 << 30}
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_ENOUGH_CORES = 6
"""With fewer cores, starting Python and importing JAX in other processes takes longer than it saves."""
_SECONDS = 120
"""Time limit of a process that lowers a program. It takes 5 to 10."""
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
"""Settings of JAX that change how a program is lowered."""

_compiling: weakref.WeakValueDictionary[Any, Future[Any]] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_lowering = threading.Lock()
_running = threading.Lock()
_processes = threading.BoundedSemaphore(_CORES)


def compile_together(
  programs: Programs, elsewhere: tuple[Callable[[Any], Programs], Any] | None = None
) -> dict[Any, Future[Any]]:
  """Compile jitted functions at the same time, for JAX's default device. Tests that run at the same time share equal programs.

  Args:
    programs: the functions and the shapes of their arguments.
    elsewhere: returns equal programs by the same keys in another process. On a GPU, if there are enough cores, each program
      is lowered in such a process. None: the programs are lowered here.

  Returns:
    The compiled functions by the same keys. The result of a future raises what its compilation raised.
  """
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  (it belongs to a thread)
  platform = jax.default_backend() if device is None else getattr(device, "platform", device)
  options = _WITHOUT_TUNING if platform in ("gpu", "cuda") else None
  if platform not in ("gpu", "cuda") or _CORES < _ENOUGH_CORES:
    elsewhere = None

  def lowered(key: Any, run: Any, arguments: tuple[Any, ...]) -> Any:
    if elsewhere is not None:
      try:
        with _processes, _timed("lowering"):
          exported = lower_in_process(*elsewhere, key, "cuda")
        return jax.jit(exported.call).lower(*arguments)
      except Exception as error:
        # If the kernel is the reason, lowering it here raises the error again, which then is the result of the test.
        _log.warning("a self-test is lowered in this process, which takes longer: %s", error)
    # Taking turns, the first program is compiled while the next one is lowered. Without turns all would be lowered at about the
    # same time, after the sum of their times.
    with _lowering, _timed("lowering"):
      return run.lower(*arguments)

  def compiled(key: Any, run: Any, arguments: tuple[Any, ...]) -> Any:
    with jax.default_device(device):
      program = lowered(key, run, arguments)
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
        known = _compiling[program] = pool.submit(compiled, key, run, arguments)
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


def lower_in_process(make: Callable[[Any], Programs], argument: Any, key: Any, platform: str) -> Any:
  """Lower the program ``make(argument)[key]`` in a new process that uses no accelerator.

  Args:
    make: a function of a module.
    argument: its argument, which can be pickled.
    key: key of the program.
    platform: "cuda" or another of JAX's names: where the program will run.

  Returns:
    The lowered program, a ``jax.export.Exported``.

  Raises:
    RuntimeError: the process failed. The message has the last line of its error output.
    subprocess.TimeoutExpired: it did not finish.
  """
  settings = {name: getattr(jax.config, name) for name in _SETTINGS}
  # The process must find the same packages, also if this one changed its path.
  env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
  done = subprocess.run(
    [sys.executable, "-m", "maxtext_like.numerics.lowering_process"],
    input=pickle.dumps((make, argument, key, platform, settings)),
    capture_output=True,
    env=env,
    timeout=_SECONDS,
    check=False,
  )
  if done.returncode:
    said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
    raise RuntimeError(f"its process ended with exit code {done.returncode}: {said[-1]}")
  return pickle.loads(done.stdout)


@contextlib.contextmanager
def _timed(stage: str) -> Iterator[None]:
  begin = time.monotonic()
  try:
    yield
  finally:
    jax.monitoring.record_event_duration_secs(EVENT + stage, time.monotonic() - begin)
