"""Tests initial values: scores, branches and the residual stream with random weights, for every model file."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.layers.param import Constant, init
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.models.initial_values import saturation
from tests.tiers import slow, tiers

MODELS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs/models").glob("*.yml"))
# A narrow model of 12 layers with heads as wide as those of Gemma 4 31B.
DEEP_GEMMA4 = ("num_decoder_layers=12", "emb_dim=64", "mlp_dim=96", "head_dim=256", "global_head_dim=512", "vocab_size=131")


def decoder_of(name: str, *words: str, scheme: Any = "depth_scaled"):
  config = load_config(name, words).config
  vision = config.vision if config.vision.use_multimodal else None
  return build_decoder(config.model, precision_of(config.precision), vision=vision, init_scheme=scheme)


def rms_normed(x: np.ndarray) -> np.ndarray:
  return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))


def drawn(spec: Any) -> Any:
  return jax.tree.map(lambda x: np.asarray(x, np.float64), init(spec, jax.random.key(3)))


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_every_model_file_start_with_standard_deviation_1(name: str):
  for layer in decoder_of(name).layers:
    mixer: Any = layer.cfg.mixer
    assert mixer.score_stddev == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ["gemma4-31b", "gemma3-27b", "qwen3-0.6b"])
@pytest.mark.parametrize("layer", [slow(0), 5])
def test_measured_scores_of_normed_heads(name: str, layer: int):
  """Compute normalized queries and keys of random inputs in float64. The rotation is left out, because it does not change
  lengths."""
  sizes = ("emb_dim=96", "num_query_heads=3", "num_kv_heads=1") + (("global_num_kv_heads=1",) if "gemma4" in name else ())
  mixer: Any = decoder_of(name, *sizes).layers[layer].mixer
  p = drawn(mixer.params())
  plus = 1.0 if mixer.cfg.norm.scale_plus_one else 0.0
  x = rms_normed(np.random.default_rng(0).normal(size=(70, 96)))
  q = rms_normed(np.einsum("td,dnh->tnh", x, p["q"])) * (p["q_norm"]["scale"] + plus)
  k = rms_normed(np.einsum("td,dnh->tnh", x, p["k"])) * (p["k_norm"]["scale"] + plus)
  scores = mixer.cfg.scale * np.einsum("tnh,sh->nts", q, k[:, 0])
  off_diagonal = scores[:, ~np.eye(70, dtype=bool)]
  assert 0.8 < off_diagonal.std() < 1.25


@pytest.mark.slow
def test_measured_scores_of_latent_attention():
  """Compute the scores in float64 for DeepSeek's YaRN. Its temperature alone would make the standard deviation 1.87."""
  sizes = ("emb_dim=96", "num_query_heads=2", "num_kv_heads=2", "q_lora_rank=48", "kv_lora_rank=40")
  mixer: Any = decoder_of("deepseek3-671b", *sizes).layers[0].mixer
  c, p = mixer.cfg, drawn(mixer.params())
  x = rms_normed(np.random.default_rng(0).normal(size=(70, 96)))
  q = np.einsum("tr,rnh->tnh", rms_normed(x @ p["q_a"]), p["q_b"])
  latent = x @ p["kv_a"]
  nope = np.einsum("tc,cnh->tnh", rms_normed(latent[:, : c.kv_lora_rank]), p["kv_b"])[..., : c.nope_dim]
  shared = np.broadcast_to(latent[:, None, c.kv_lora_rank :], (70, 2, c.rope_dim))
  scores = c.scale * np.einsum("tnh,snh->nts", q, np.concatenate([nope, shared], axis=-1))
  assert 0.8 < scores[:, ~np.eye(70, dtype=bool)].std() < 1.25


@pytest.mark.parametrize(
  ("name", "branches"),
  [("gemma4-31b", 120), ("gemma4-26b", 60), ("gemma4-e2b", 105), ("gemma3-4b", 68), ("deepseek3-671b", 122), ("qwen3-8b", 72)],
)
def test_the_branches_of_a_model_add_as_much_as_its_embedding(name: str, branches: int):
  decoder = decoder_of(name)
  block: Any = decoder.layers[-1]
  expected, spec = branches**-0.5, block.params()
  if block.cfg.sandwich:
    plus = 1.0 if block.cfg.norm.scale_plus_one else 0.0
    names = ["post_attention_norm", "post_mlp_norm"]
    found = [spec[norm]["scale"].init.value + plus for norm in names]
    found += [spec["ple"]["norm"]["scale"].init.value] if block.cfg.per_layer else []
    assert len(found) == branches // len(decoder.layers)
  else:
    # Both matrices of a branch have the same factor.
    parts = spec["moe"] if block.cfg.ffn.experts else {"experts": spec["mlp"]}
    pairs = [(part["up"].init.gain, part["down"].init.gain) for part in parts.values() if "down" in part]
    attention = spec["attention"]
    values = attention["kv_b"].init.parts[-1][1] if "kv_b" in attention else attention["v"].init.gain
    pairs.append((values, attention["o"].init.gain))
    assert all(first == second for first, second in pairs)
    found = [first * second for first, second in pairs]
    assert decoder.cfg.embedding.initial_stddev == 1
  assert found == pytest.approx([expected] * len(found))


@pytest.mark.parametrize(("name", "parts"), [("qwen3-tiny", (0.25, 0.25)), ("gemma4-tiny", (1, 1 / 16))])
def test_a_norm_of_values_leaves_the_whole_factor_to_the_output_projection(name: str, parts: tuple[float, float]):
  """The factor of a branch is divided between values and output projection. A norm of values would remove its share, so the
  output projection then has the complete factor."""
  mixer: Any = decoder_of(name).layers[0].mixer
  spec = dataclasses.replace(mixer.cfg, branch_gain=1 / 16).layer(mixer.precision).params()
  assert (spec["v"].init.gain, spec["o"].init.gain) == parts


def test_a_tied_table_that_is_not_scaled_stays_the_output_head():
  decoder = decoder_of("qwen3-0.6b")
  block: Any = decoder.layers[0]
  assert decoder.cfg.embedding.initial_stddev is None
  assert block.params()["attention"]["o"].init.gain == 1


def gradient_norm(decoder: Any, length: int = 48) -> float:
  tokens = jax.random.randint(jax.random.key(1), (2, length + 1), 3, 131)
  batch = {
    "tokens": tokens[:, :-1],
    "positions": jnp.broadcast_to(jnp.arange(length), (2, length)),
    "segments": jnp.ones((2, length), jnp.int32),
  }

  def loss(params):
    logits, _ = decoder(params, batch)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

  gradients = jax.jit(jax.grad(loss))(init(decoder.params(), jax.random.key(0)))
  return math.sqrt(sum(float(jnp.sum(jnp.square(x))) for x in jax.tree.leaves(gradients)))


@pytest.mark.slow
def test_gradients_of_a_deep_gemma4_start_small_and_with_maxtexts_values_large():
  new, old = (gradient_norm(decoder_of("gemma4-tiny", *DEEP_GEMMA4, scheme=scheme)) for scheme in ("depth_scaled", "maxtext"))
  assert new < 20
  assert old > 200


EVERY = ("gemma3-tiny", "gemma4-e2b-tiny", "deepseek3.2-tiny", "qwen3-moe-tiny")


@pytest.mark.parametrize("name", tiers(EVERY, slow=("deepseek3.2-tiny",)))
def test_gradients_of_every_family_start_small(name: str):
  assert gradient_norm(decoder_of(name, "dtype=float32")) < 50


def test_only_gemma4_with_maxtexts_values_starts_saturated():
  text = saturation(decoder_of("gemma4-31b", scheme="maxtext").layers, 4096)
  assert text is not None
  assert all(fact in text for fact in ("60 of 60 layers", "16 to 22.6", "init_scheme=depth_scaled"))
  for name in MODELS:
    assert saturation(decoder_of(name).layers, 4096) is None
    assert "gemma4" in name or saturation(decoder_of(name, scheme="maxtext").layers, 4096) is None


def test_a_key_that_makes_scores_large_is_reported():
  """query_pre_attn_scalar=1 multiplies q.k by 1, as in Gemma 4. The scheme depth_scaled takes it into account."""
  assert saturation(decoder_of("gemma3-4b", "query_pre_attn_scalar=1", scheme="maxtext").layers, 4096) is not None
  assert saturation(decoder_of("gemma3-4b", "query_pre_attn_scalar=1").layers, 4096) is None


def test_schemes_differ_in_initial_values_only():
  strip = lambda spec: jax.tree.map(lambda p: dataclasses.replace(p, init=Constant(0.0), contracts=p.contracts), spec)
  for name in ("gemma4-e2b", "deepseek3.2-671b", "qwen3-30b-a3b"):
    assert strip(decoder_of(name).params()) == strip(decoder_of(name, scheme="maxtext").params())


def test_the_vision_tower_of_gemma4_starts_alike():
  spec: Any = decoder_of("gemma4-31b", "use_multimodal=true").params()["vision"]["layers"]
  (layer,) = [spec] if "attention" in spec else list(spec.values())
  assert layer["attention"]["q_norm"]["scale"].init.value == pytest.approx(72**-0.5)
  assert layer["post_mlp_norm"]["scale"].init.value == pytest.approx((2 * 27) ** -0.5)


@pytest.mark.parametrize(
  ("words", "code", "facts"),
  [
    (["gemma4-31b"], 0, ["depth_scaled", "1024", "no layer starts saturated"]),
    (["gemma4-31b", "init_scheme=maxtext"], 3, ["16", "22.6", "nearly one-hot", "init_scheme=depth_scaled"]),
    (["configs/models/qwen3-8b.yml", "init_scheme=maxtext"], 0, ["0-35", "spread"]),
  ],
)
def test_risk_of_a_configuration_is_that_of_random_weights(words, code, facts, capsys):
  assert main(["risk", *words]) == code
  printed = capsys.readouterr().out
  assert all(fact in printed for fact in facts)


def test_risk_takes_a_configuration_or_weights(tmp_path, capsys):
  assert main(["risk", "gemma4-tiny", "--checkpoint", str(tmp_path)]) == 2
  assert "leave one of them out" in capsys.readouterr().err
