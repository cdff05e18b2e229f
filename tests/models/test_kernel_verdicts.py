"""Tests the repetition of self-tests. Self-tests that run at the same time share memory, so one that raises an error is
repeated alone."""

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from maxtext_like.errors import is_out_of_memory
from maxtext_like.models.kernel_verdicts import FOLDER, verdict_each
from maxtext_like.numerics.attention_selfcheck import CaseResult

GPU = SimpleNamespace(device_kind="NVIDIA H000", platform="gpu", client=SimpleNamespace(platform_version="cuda 13"))
FULL = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nmore")
BUSY = RuntimeError("INTERNAL: Failed to launch ptxas")


@dataclass(frozen=True)
class Shape:
  number: int


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(jax, "default_device", lambda device: contextlib.nullcontext())


@pytest.mark.parametrize("error", [FULL, BUSY])
@pytest.mark.parametrize("where", ["case", "reference"])
def test_a_test_that_raised_an_error_is_repeated_alone(where: str, error: RuntimeError, tmp_path: Path):
  """Three tests start together. The second one raises an error, and passes when it is repeated alone."""
  begun, running, ran = threading.Barrier(3), set[Shape](), list[object]()

  def test(shape: Shape) -> list[CaseResult]:
    running.add(shape)
    if shape not in ran:
      ran.append(shape)
      begun.wait(timeout=60)
      if shape.number == 1:
        if where == "reference":
          raise error
        return [CaseResult(name="a", error=0.0), CaseResult.of_error("b", error)]
    else:
      assert running == {Shape(0), Shape(1), Shape(2)}, "the others have ended"
      ran.append("again")
    return [CaseResult(name="a", error=0.0)]

  tests = [(Shape(i), test) for i in range(3)]
  assert {shape.number: problem for shape, (problem, _) in verdict_each(tests, GPU, str(tmp_path)).items()} == {
    0: "",
    1: "",
    2: "",
  }
  assert ran.count("again") == 1
  assert all(seconds is None for _, seconds in verdict_each(tests, GPU, str(tmp_path)).values()), "all are stored"


@pytest.mark.parametrize("where", ["case", "reference"])
def test_a_test_that_never_fits_fails_and_is_not_stored(where: str, tmp_path: Path):
  ran = []

  def test(shape: Shape) -> list[CaseResult]:
    ran.append(shape)
    if where == "reference":
      raise FULL
    return [CaseResult.of_error("b", FULL), CaseResult(name="c", problem="values: relative error 1")]

  for runs in (2, 4):
    ((problem, _),) = verdict_each([(Shape(0), test)], GPU, str(tmp_path)).values()
    assert "RuntimeError: RESOURCE_EXHAUSTED: Out of memory" in problem
    assert len(ran) == runs
  assert not (tmp_path / FOLDER).exists()


def test_another_error_of_the_reference_is_raised_if_it_comes_again():
  ran = []

  def test(shape: Shape) -> list[CaseResult]:
    ran.append(shape)
    raise ValueError("wrong")

  with pytest.raises(ValueError, match="wrong"):
    verdict_each([(Shape(0), test)], GPU, None)
  assert len(ran) == 2
  assert not is_out_of_memory(ValueError("wrong"))
  assert is_out_of_memory(MemoryError())
  assert is_out_of_memory(RuntimeError("INTERNAL: CUDNN_STATUS_ALLOC_FAILED"))
