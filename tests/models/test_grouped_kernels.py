"""Tests the choice of the kernel for experts. A kernel must pass its self-test. If it fails, the next kernel is used, or the
run ends if the configuration names the kernel."""

import contextlib
import dataclasses
import types
from typing import Any

import pytest

from maxtext_like.errors import UserError
from maxtext_like.models.grouped_kernels import settle
from maxtext_like.models.kernel_verdicts import Target
from maxtext_like.numerics.attention_selfcheck import CaseResult

TPU = types.SimpleNamespace(device_kind="TPU v6 lite", platform="tpu", client=types.SimpleNamespace(platform_version="test"))


@pytest.fixture(scope="module")
def decoder():
  from maxtext_like.config.load import load_config
  from maxtext_like.models.build import build_decoder, precision_of

  config = load_config("gemma4-moe-tiny", ["dtype=bfloat16"]).config
  return build_decoder(config.model, precision_of(config.precision), platform="tpu")


def decide(decoder, problem, monkeypatch, asked: Any = "auto", device: Any = TPU):
  tried = []

  def test(shape):
    tried.append(shape)
    return [CaseResult(name="one takes all", problem=problem)]

  monkeypatch.setattr("jax.default_device", lambda device: contextlib.nullcontext())
  settled, words = settle(decoder, Target(platform="tpu", device=device), asked=asked, tokens=512, ways=2, test=test)
  return settled.cfg.grouped, words, tried


def test_a_kernel_that_passes_is_taken(decoder, monkeypatch):
  name, words, tried = decide(decoder, "", monkeypatch)
  assert name == "pallas_tpu"
  assert words == "self-test passed on TPU v6 lite in 0 s"
  moe = next(layer.cfg.ffn.experts for layer in decoder.layers if layer.cfg.ffn.experts)
  assert {(s.summed, s.columns) for s in tried} == {(moe.emb_dim, moe.mlp_dim), (moe.mlp_dim, moe.emb_dim)}
  assert {(s.dtype, s.groups) for s in tried} == {("bfloat16", min(6, moe.num_experts // 2))}


def test_a_kernel_that_fails_is_passed_by_or_an_error_where_it_was_asked_for(decoder, monkeypatch):
  name, words, _ = decide(decoder, "dw: relative error 0.5", monkeypatch)
  assert name == "ragged_dot"
  assert words.startswith("instead of pallas_tpu, which failed its self-test on TPU v6 lite: ")
  assert "one takes all: dw: relative error 0.5" in words
  with pytest.raises(
    UserError, match=r"grouped_product=pallas_tpu failed its self-test on TPU v6 lite: .*\n  fix: grouped_pro"
  ):
    decide(decoder, "dw: relative error 0.5", monkeypatch, asked="pallas_tpu")


def test_without_a_device_nothing_is_tested(decoder, monkeypatch):
  assert decide(decoder, "bad", monkeypatch, device=None) == ("pallas_tpu", "not self-tested: there is no device", [])


@pytest.mark.parametrize(("bad", "taken"), [((), "pallas_triton"), (("pallas_triton",), "rounds")])
def test_what_comes_next_is_tested_too(decoder, bad, taken, monkeypatch):
  """If the first kernel fails on a GPU, the next kernel is tested before it is used. If it fails too, ``rounds`` is used."""
  cfg = dataclasses.replace(decoder.cfg, grouped="pallas_gpu")
  gpu = types.SimpleNamespace(device_kind="NVIDIA H200", platform="gpu", client=types.SimpleNamespace(platform_version="test"))
  target = Target(platform="gpu", capability="9.0", device=gpu)
  tried = []

  def test(shape):
    tried.append(shape.kernel)
    return [CaseResult(name="one takes all", problem="dx: bad" if shape.kernel in ("pallas_gpu", *bad) else "")]

  monkeypatch.setattr("jax.default_device", lambda device: contextlib.nullcontext())
  model = dataclasses.replace(decoder, cfg=cfg)
  settled, words = settle(model, target, asked="auto", tokens=512, ways=2, test=test)
  assert settled.cfg.grouped == taken
  assert list(dict.fromkeys(tried)) == ["pallas_gpu", "pallas_triton"]
  failed = "pallas_gpu and pallas_triton, which failed their self-tests" if bad else "pallas_gpu, which failed its self-test"
  assert words.startswith(f"instead of {failed} on NVIDIA H200: pallas_gpu, bfloat16")
