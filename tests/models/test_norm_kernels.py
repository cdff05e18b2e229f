"""Tests the choice of the kernel for gradients of norms. It must pass its self-test. If it fails, XLA is used, or the run ends
if the configuration names the kernel."""

import contextlib
import types
from typing import Any

import jax
import pytest

from maxtext_like.errors import UserError
from maxtext_like.models.kernel_verdicts import Target
from maxtext_like.models.norm_kernels import settle
from maxtext_like.numerics.attention_selfcheck import CaseResult

H200 = types.SimpleNamespace(device_kind="NVIDIA H200", platform="gpu", client=types.SimpleNamespace(platform_version="test"))
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel is refused before JAX 0.11")


@pytest.fixture(scope="module")
def decoder():
  from maxtext_like.config.load import load_config
  from maxtext_like.models.build import build_decoder, precision_of

  config = load_config("gemma3-tiny", ["dtype=float16", "base_emb_dim=1024", "base_num_decoder_layers=2"]).config
  return build_decoder(config.model, precision_of(config.precision), platform="gpu", capability="9.0")


def decide(decoder, problem, monkeypatch, asked: Any = "auto", device: Any = H200, devices=1):
  tried = []

  def test(shape):
    tried.append((shape.dtype, shape.gradient, shape.dim))
    return [CaseResult(name="alone", problem=problem)]

  monkeypatch.setattr("jax.default_device", lambda device: contextlib.nullcontext())
  target = Target(platform="gpu", capability="9.0", devices=devices, device=device)
  settled, words = settle(decoder, target, asked=asked, test=test)
  (name,) = {layer.cfg.norm.kernel for layer in settled.layers}
  return name, words, tried


def test_a_kernel_that_passes_is_taken(decoder, monkeypatch):
  """The kernel is tested in the dtypes of both kinds of norms in a layer, those before and those after attention and MLP.
  Activations are float16 here, and the residual stream is float32."""
  name, words, tried = decide(decoder, "", monkeypatch)
  assert (name, words) == ("pallas_gpu", "pallas_gpu for gradients of norms, self-test passed on NVIDIA H200 in 0 s")
  assert sorted(tried) == [("float32", "float16", 1024), ("float32", "float32", 1024)]  # they are tested at the same time


def test_a_kernel_that_fails_is_passed_by_or_an_error_where_it_was_asked_for(decoder, monkeypatch):
  name, words, _ = decide(decoder, "dx: relative error 0.5", monkeypatch)
  assert name == "xla"
  assert words.startswith("xla for gradients of norms, instead of pallas_gpu, which failed its self-test on NVIDIA H200: ")
  assert "alone: dx: relative error 0.5" in words
  with pytest.raises(
    UserError, match=r"norm_kernel=pallas_gpu failed its self-test on NVIDIA H200: .*\n  fix: norm_kernel=auto"
  ):
    decide(decoder, "dx: relative error 0.5", monkeypatch, asked="pallas_gpu")


def test_without_a_device_nothing_is_tested_and_several_have_xla(decoder, monkeypatch):
  words = "pallas_gpu for gradients of norms, not self-tested: there is no device"
  assert decide(decoder, "bad", monkeypatch, device=None) == ("pallas_gpu", words, [])
  assert decide(decoder, "bad", monkeypatch, devices=8) == ("xla", "", [])
  with pytest.raises(UserError, match=r"norm_kernel=pallas_gpu .*one GPU, but the mesh has 8"):
    decide(decoder, "", monkeypatch, asked="pallas_gpu", devices=8)
