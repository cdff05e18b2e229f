"""Tests the choice of the kernel for quantized weights. It is used if it passes its self-test, otherwise XLA runs."""

import contextlib
import functools
import types
from typing import Any, cast

import pytest

from maxtext_like.layers.kernels.quantized_matmul import quantized_matmul
from maxtext_like.layers.param import Param, normal
from maxtext_like.layers.quantization.quantized import FORMS
from maxtext_like.layers.sharding_rules import RULES
from maxtext_like.models.quantized_base import QuantizedBase
from maxtext_like.models.quantized_kernels import settle
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.quantized_selfcheck import QuantizedShape, self_test
from tests.tiers import slow

WEIGHTS = {("stack_0", "layer_0", "mlp", "up"): Param((96, 40), ("embed", "mlp"), "float32", normal(1.0), contracts=(0,))}


def base(form: Any = "nf4") -> QuantizedBase:
  return QuantizedBase(FORMS[form], WEIGHTS, RULES)


def device(capability="9.0"):
  client = types.SimpleNamespace(platform_version="test")
  return types.SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", client=client, compute_capability=capability)


def decide(monkeypatch, of=None, problem="", gpu=None, **how: Any) -> QuantizedBase:
  gpu = gpu or device()
  monkeypatch.setattr("jax.default_device", lambda device: contextlib.nullcontext())
  monkeypatch.setattr("jax.local_devices", lambda: [gpu])
  mesh = types.SimpleNamespace(size=how.pop("devices", 1), devices=types.SimpleNamespace(flat=[gpu]))
  test = lambda shape: [CaseResult(name="3 rows", problem=problem)]
  given = {"dtype": "bfloat16", "platform": "gpu", "cache": None, "test": test} | how
  return settle(of or base(), mesh=cast(Any, mesh), **given)


def test_a_kernel_that_passes_is_used_and_one_that_fails_is_not(monkeypatch, caplog):
  good = decide(monkeypatch)
  assert (good.kernel, good.note) == ("pallas_triton", "quantized_matmul, self-test passed on NVIDIA H100")
  bad = decide(monkeypatch, problem="relative error 0.5")
  assert bad.kernel == "xla"
  assert "3 rows: relative error 0.5" in bad.note
  assert bad.note in caplog.text


def test_models_and_machines_without_the_kernel(monkeypatch):
  others: list[dict[str, Any]]
  others = [{"dtype": "float32"}, {"platform": "tpu"}, {"devices": 2}, {"of": base("bfloat16")}]
  others += [{"gpu": device("7.5")}, {"gpu": device("gfx942")}]  # AMD GPUs report a name instead of a number
  for how in others:
    assert decide(monkeypatch, **how).kernel == "xla"
  assert decide(monkeypatch, base("fp8_block"), gpu=device("8.0")).kernel == "xla"
  assert decide(monkeypatch, base("fp8_block")).kernel == "pallas_triton"


@pytest.mark.parametrize("form", [slow("int8"), "nf4", slow("fp8_block")])
def test_the_self_test(form):
  """The interpreted kernel passes. A kernel that multiplies its inputs by 1.01 fails."""
  interpreted = functools.partial(quantized_matmul, interpret=True)
  shape = QuantizedShape(form=form, dtype="bfloat16")
  assert [result.problem for result in self_test(shape, interpreted)] == ["", ""]
  broken = self_test(shape, lambda form, x, *rest, **how: interpreted(form, x * 1.01, *rest, **how))
  assert all("relative error" in result.problem for result in broken)
