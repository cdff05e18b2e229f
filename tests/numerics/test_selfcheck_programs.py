"""Programs of self-tests run in turns, and compute the same if another process lowers them."""

import functools
import logging
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from maxtext_like.numerics import attention_selfcheck, grouped_selfcheck, selfcheck_programs
from maxtext_like.numerics.selfcheck_programs import EVENT, Programs, compile_together, lower_in_process, run_alone

GIVEN = (np.arange(3, dtype=np.float32),)
HEADS = functools.partial(
  attention_selfcheck.shape_class,
  dtype="bfloat16", query_heads=2, kv_heads=1, head_dim=128, length=128, window=True, segments=True,
)  # fmt: skip
EXPERTS = functools.partial(
  grouped_selfcheck.grouped_shape,
  dtype="bfloat16", sums=False, precision="default", summed=64, columns=64, groups=2, rows=64,
)  # fmt: skip


def programs_of(shape: str) -> Programs:
  raise NotImplementedError(shape)


def test_programs_of_tests_run_in_turns():
  running, most = [0], [0]

  def program(x):
    running[0] += 1
    most[0] = max(most[0], running[0])
    time.sleep(0.02)
    running[0] -= 1
    return x + 1

  done: Future[Any] = Future()
  done.set_result(program)
  with ThreadPoolExecutor(4) as pool:
    assert sorted(pool.map(lambda i: run_alone(done, i), range(8))) == list(range(1, 9))
  assert most == [1]


def test_a_program_of_another_process_computes_the_same():
  shape = grouped_selfcheck.grouped_shape(
    "ragged_dot", dtype="bfloat16", sums=False, precision="default", summed=24, columns=12, groups=3, rows=50
  )  # fmt: skip
  given = grouped_selfcheck._arguments(shape, grouped_selfcheck.cases(shape)["groups without rows"])
  run, shapes = grouped_selfcheck.programs(shape)["dw"]
  assert jax.tree.map(lambda x: (x.shape, x.dtype), given) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
  exported = lower_in_process(grouped_selfcheck.programs, shape, "dw", "cpu")
  (got,), (want,) = jax.jit(exported.call)(*given), run(*given)
  assert np.any(want)
  np.testing.assert_array_equal(got, want)


def test_a_process_that_fails_reports_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path):
  broken = tmp_path / "python"
  broken.write_text("#!/bin/sh\necho more >&2\necho 'MemoryError: no memory' >&2\nexit 9\n")
  broken.chmod(0o700)
  monkeypatch.setattr(sys, "executable", str(broken))
  with pytest.raises(RuntimeError, match=r"ended with exit code 9: MemoryError: no memory$"):
    lower_in_process(grouped_selfcheck.programs, None, "dw", "cpu")


@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_with_enough_cores_uses_processes_and_otherwise_programs_are_lowered_here(
  works: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
  """The program of the process adds 2 and the one that is lowered here adds 1, to see which one ran."""
  asked, stages = [], []

  def lower(*request):
    asked.append(request)
    if not works:
      raise RuntimeError("no process")
    return export.export(jax.jit(lambda x: x + 2))(*GIVEN)

  monkeypatch.setattr(selfcheck_programs, "lower_in_process", lower)
  monkeypatch.setattr(selfcheck_programs, "_CORES", 6)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax.monitoring, "record_event_duration_secs", lambda event, seconds: stages.append(event))
  local = jax.jit(lambda x: x + 1)
  with caplog.at_level(logging.WARNING):
    ran = run_alone(compile_together({"a": (local, GIVEN)}, (programs_of, "shape"))["a"], *GIVEN)
  assert asked == [(programs_of, "shape", "a", "cuda")]
  np.testing.assert_array_equal(ran, GIVEN[0] + (2 if works else 1))
  assert ("no process" in caplog.text) != works
  assert set(stages) >= {EVENT + "lowering", EVENT + "compilation", EVENT + "run"}
  # With few cores, or on another platform, no process is started.
  for name, value in ((selfcheck_programs, ("_CORES", 5)), (jax, ("default_backend", lambda: "cpu"))):
    monkeypatch.setattr(name, *value)
    other = jax.jit(lambda x: x + 3)
    run_alone(compile_together({"a": (other, GIVEN)}, (programs_of, "shape"))["a"], *GIVEN)
  assert len(asked) == 1


@pytest.mark.parametrize("name", ["mosaic_flash", "cudnn_flash", "pallas_gpu", "pallas_triton"])
def test_only_kernels_for_hopper_are_lowered_in_processes_and_no_function_of_a_caller(name, monkeypatch: pytest.MonkeyPatch):
  asked = []

  class AskedError(Exception):
    pass

  def compile_nothing(programs, elsewhere=None):
    asked.append(elsewhere)
    raise AskedError

  if name in ("mosaic_flash", "cudnn_flash"):
    module: Any = attention_selfcheck
    shape: Any = HEADS(name)
  else:
    module, shape = grouped_selfcheck, EXPERTS(name)
  monkeypatch.setattr(module, "compile_together", compile_nothing)
  monkeypatch.setattr(module, "programs", lambda shape: {})
  expected = (module.programs, shape) if name in ("mosaic_flash", "pallas_gpu") else None
  for function in (None, lambda *arguments, **how: arguments[0]):
    with pytest.raises(AskedError):
      module.self_test(shape, function)
  assert asked == [expected, None]


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 1), reason="the kernels need JAX 0.11.1")
def test_kernels_for_hopper_are_lowered_without_a_gpu():
  for module, shape, key in (
    (attention_selfcheck, HEADS("mosaic_flash"), 128),
    (grouped_selfcheck, EXPERTS("pallas_gpu"), "dw"),
  ):
    exported = lower_in_process(module.programs, shape, key, "cuda")
    assert exported.platforms == ("cuda",)
    shapes = module.programs(shape)[key][1]
    lowered = jax.jit(exported.call).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu_v2" in lowered.as_text()
    assert all(x.dtype == jnp.float32 for x in exported.out_avals)
