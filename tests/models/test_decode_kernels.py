"""Tests the choice of the kernel for a single new token. It is used if it passes its self-test, otherwise XLA runs."""

import contextlib
import functools
import types
from typing import Any

import jax.numpy as jnp
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.layers.kernels.attention.decode import decode_attention
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.models.decode_kernels import settle
from maxtext_like.models.kernel_verdicts import Target
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.decode_selfcheck import DecodeShape, self_test
from tests.tiers import slow

H100 = types.SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", client=types.SimpleNamespace(platform_version="test"))


def decoder_of(*words: str, name: str = "gemma3-tiny"):
  config = load_config(name, ["num_decoder_layers=2", *words]).config
  return build_decoder(config.model, precision_of(config.precision), platform="gpu", capability="9.0")


def decide(decoder, problem="", monkeypatch=None, device: Any = H100, devices=1, platform="gpu", capability="9.0"):
  if monkeypatch is not None:
    monkeypatch.setattr("jax.default_device", lambda device: contextlib.nullcontext())
  test = lambda shape: [CaseResult(name="plain", problem=problem)]
  target = Target(platform=platform, devices=devices, capability=capability, device=device)
  settled, note = settle(decoder, target, test=test)
  return {getattr(layer.cfg.mixer, "decode", "") for layer in settled.layers}, note


def test_a_kernel_that_passes_is_used_and_one_that_fails_is_not(monkeypatch, caplog):
  decoder = decoder_of("dtype=bfloat16")
  assert decide(decoder, "", monkeypatch) == ({"pallas_triton"}, "decode_attention, self-test passed on NVIDIA H100")
  names, note = decide(decoder, "relative error 0.5", monkeypatch)
  assert names == {"xla"}
  assert "plain: relative error 0.5" in note
  assert note in caplog.text
  assert decide(decoder, device=None)[0] == {"pallas_triton"}


def test_models_and_machines_without_the_kernel():
  assert decide(decoder_of("dtype=float32")) == ({"xla"}, "")
  assert decide(decoder_of("dtype=bfloat16", "float32_logits=false")) == ({"xla"}, "")
  assert decide(decoder_of("dtype=bfloat16"), devices=2) == ({"xla"}, "")
  assert decide(decoder_of("dtype=bfloat16"), platform="tpu") == ({"xla"}, "")
  for capability in ("7.5", "gfx942"):  # AMD GPUs report a name instead of a number
    assert decide(decoder_of("dtype=bfloat16"), capability=capability) == ({"xla"}, "")


@pytest.mark.parametrize("broken", [False, slow("scale"), slow("newest token")])
def test_the_self_test(broken):
  """The interpreted kernel passes. A kernel with another scale fails, and so does one that does not read the newest of several
  tokens."""

  def attention(q, k, v, lengths, **how):
    how = how | ({"scale": how["scale"] * 1.05} if broken == "scale" else {})
    lengths = jnp.where(lengths > 1, lengths - 1, lengths) if broken == "newest token" else lengths
    return functools.partial(decode_attention, interpret=True)(q, k, v, lengths, **how)

  shape = DecodeShape(dtype="bfloat16", query_heads=4, kv_heads=2, head_dim=16)
  problems = [result.problem for result in self_test(shape, attention)]
  assert len(problems) == 2
  assert all("relative error" in problem for problem in problems) if broken else problems == ["", ""]
