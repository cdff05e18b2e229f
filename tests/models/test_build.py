"""Tests the layers that are built from the released configurations. The expected values are from the papers and files of the
models."""

import dataclasses
import math
from typing import Any

import jax
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.layers.attention.mla import MLAConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder

# model -> [(layers in the block, repeats)], and the numbers of the layers that are global (Gemma) or have experts (DeepSeek)
RELEASED = {
  "gemma3-4b": ([(6, 5), (1, 4)], range(5, 34, 6)),
  "gemma3-12b": ([(6, 8)], range(5, 48, 6)),
  "gemma3-27b": ([(6, 10), (1, 2)], range(5, 62, 6)),
  "gemma4-26b": ([(6, 5)], range(5, 30, 6)),
  "gemma4-31b": ([(6, 10)], range(5, 60, 6)),
  "gemma4-e2b": ([(5, 3), (5, 4)], range(4, 35, 5)),
  "gemma4-e4b": ([(6, 4), (6, 3)], range(5, 42, 6)),
  "deepseek3-671b": ([(1, 3), (1, 58)], range(3, 61)),
  "deepseek3.2-671b": ([(1, 3), (1, 58)], range(3, 61)),
  "qwen3-0.6b": ([(1, 28)], range(28)),
  "qwen3-8b": ([(1, 36)], range(36)),
  "qwen3-30b-a3b": ([(1, 48)], range(48)),
}
TIED = {name: name.startswith("gemma") or name == "qwen3-0.6b" for name in RELEASED}


def decoder_of(name, **build) -> Any:
  return build_decoder(load_config(name).config.model, Precision(), **build)


def built(model) -> Any:
  return build_decoder(model, Precision())


@pytest.mark.parametrize("name", RELEASED)
def test_pattern_and_stacks(name):
  decoder = decoder_of(name)
  stacks, special = RELEASED[name]
  assert [(len(s.layers), s.repeats) for s in decoder.stacks] == stacks
  for i, layer in enumerate(decoder.layers):
    if isinstance(layer.cfg.mixer, MLAConfig):
      assert (layer.cfg.ffn.experts is not None) == (i in special)
    else:
      assert (layer.cfg.mixer.window is None) == (i in special)


def attention(name, layer):
  c = decoder_of(name).layers[layer].cfg.mixer
  return {"N": c.num_query_heads, "K": c.num_kv_heads, "H": c.head_dim, "window": c.window, "scale": c.scale}


def test_gemma3_attention():
  assert attention("gemma3-4b", 0) == {"N": 8, "K": 4, "H": 256, "window": 1024, "scale": 1 / 16}
  assert attention("gemma3-12b", 5) == {"N": 16, "K": 8, "H": 256, "window": None, "scale": 1 / 16}
  assert attention("gemma3-27b", 0) == {"N": 32, "K": 16, "H": 128, "window": 1024, "scale": 168**-0.5}
  local, wide = (decoder_of("gemma3-27b").layers[i].cfg for i in (0, 5))
  assert (local.mixer.rope.kind, local.mixer.rope.theta) == ("default", 1e4)
  assert (wide.mixer.rope.kind, wide.mixer.rope.theta, wide.mixer.rope.factor) == ("linear", 1e6, 8)
  for c in (local, wide):
    assert c.norm.scale_plus_one
    assert c.mixer.norm.scale_plus_one
    assert c.mixer.bidirectional_images
    assert not (c.mixer.value_norm)
    assert not (c.layer_scalar)
    assert not c.ffn.experts
    assert not c.per_layer


def test_gemma4_attention():
  assert attention("gemma4-31b", 0) == {"N": 32, "K": 16, "H": 256, "window": 1024, "scale": 1.0}
  assert attention("gemma4-31b", 59) == {"N": 32, "K": 4, "H": 512, "window": None, "scale": 1.0}
  assert attention("gemma4-26b", 29) == {"N": 16, "K": 2, "H": 512, "window": None, "scale": 1.0}
  assert attention("gemma4-e2b", 0) == {"N": 8, "K": 1, "H": 256, "window": 512, "scale": 1.0}
  assert attention("gemma4-e4b", 41) == {"N": 8, "K": 2, "H": 512, "window": None, "scale": 1.0}
  local, wide = (decoder_of("gemma4-31b").layers[i].cfg for i in (0, 5))
  assert (wide.mixer.value_is_key, local.mixer.value_is_key) == (True, False)
  rope = wide.mixer.rope
  assert (rope.kind, rope.theta, rope.proportion, rope.dim) == ("proportional", 1e6, 0.25, 512)
  assert (local.mixer.rope.kind, local.mixer.rope.theta) == ("default", 1e4)
  # Tokens of an image see each other in both directions in the sliding layers of large models. In small models they do not.
  assert (local.mixer.bidirectional_images, wide.mixer.bidirectional_images) == (True, False)
  assert not any(layer.cfg.mixer.bidirectional_images for layer in decoder_of("gemma4-e2b").layers)
  for c in (local, wide):
    assert c.mixer.value_norm
    assert c.layer_scalar
    assert not c.norm.scale_plus_one
    assert not c.mixer.norm.scale_plus_one
    assert (c.mixer.shares_kv_as, c.mixer.reuses_kv_of) == (None, None)


@pytest.mark.parametrize(("name", "first", "width"), [("gemma4-e2b", 15, 12288), ("gemma4-e4b", 24, 10240)])
def test_gemma4_shares_keys_and_values(name, first, width):
  decoder = decoder_of(name)
  for i, layer in enumerate(decoder.layers):
    c = layer.cfg
    assert (c.mixer.reuses_kv_of is not None) == (i >= first)
    assert ("k" in layer.params()["attention"]) == (i < first)
    assert (c.mixer.reuses_kv_of or c.mixer.shares_kv_as) == ("sliding" if c.mixer.window else "global")
    assert c.per_layer.width == 256
    assert c.ffn.mlp_dim == (width if i >= first else {"gemma4-e2b": 6144, "gemma4-e4b": 10240}[name])
  kv_heads = decoder.layers[0].cfg.mixer.num_kv_heads
  assert decoder.shared_kv == {"sliding": (kv_heads, 256), "global": (kv_heads, 512)}
  table = decoder.params()["ple"]["table"]
  assert table.shape == (262144, len(decoder.layers) * 256)


def test_gemma4_experts():
  c = decoder_of("gemma4-26b").layers[3].cfg.ffn
  assert (c.mlp.mlp_dim, c.moe.mlp_dim, c.moe.num_experts, c.moe.num_experts_per_tok) == (2112, 704, 128, 8)
  assert (c.moe.router, c.moe.shared_experts, c.moe.activation, c.moe.norm_topk_prob) == ("softmax", 0, "gelu", True)


def test_deepseek():
  decoder = decoder_of("deepseek3-671b")
  dense, sparse = decoder.layers[2].cfg, decoder.layers[3].cfg
  a = dense.mixer
  assert (a.num_heads, a.q_lora_rank, a.kv_lora_rank, a.nope_dim, a.rope_dim, a.value_dim) == (128, 1536, 512, 128, 64, 128)
  assert a.scale == pytest.approx(0.135234, abs=1e-6)
  assert a.rope.interleave
  assert a.rope.attention_factor == 1
  assert (dense.ffn.mlp_dim, dense.ffn.activation) == (18432, "silu")
  m = sparse.ffn
  assert (m.num_experts, m.num_experts_per_tok, m.mlp_dim, m.shared_experts, m.n_groups, m.topk_groups) == (
    256,
    8,
    2048,
    1,
    8,
    4,
  )
  assert (m.router, m.routed_scaling_factor, m.norm_topk_prob) == ("sigmoid", 2.5, True)
  assert a.indexer is None
  index = decoder_of("deepseek3.2-671b").layers[0].cfg.mixer.indexer
  assert (index.num_heads, index.head_dim, index.topk) == (64, 128, 2048)


def test_qwen3_attention_and_experts():
  assert attention("qwen3-0.6b", 0) == {"N": 16, "K": 8, "H": 128, "window": None, "scale": 128**-0.5}
  assert attention("qwen3-8b", 35) == {"N": 32, "K": 8, "H": 128, "window": None, "scale": 128**-0.5}
  assert attention("qwen3-30b-a3b", 47) == {"N": 32, "K": 4, "H": 128, "window": None, "scale": 128**-0.5}
  dense, sparse = decoder_of("qwen3-8b").layers[0].cfg, decoder_of("qwen3-30b-a3b").layers[0].cfg
  assert (dense.ffn.mlp_dim, dense.ffn.activation, dense.ffn.experts) == (12288, "silu", None)
  m = sparse.ffn
  assert (m.num_experts, m.num_experts_per_tok, m.mlp_dim, m.shared_experts) == (128, 8, 768, 0)
  assert (m.router, m.norm_topk_prob) == ("softmax", True)
  for c in (dense, sparse):
    assert (c.mixer.rope.kind, c.mixer.rope.theta) == ("default", 1e6)
    assert c.mixer.norm is not None  # queries and keys are normalized
    assert not c.mixer.value_norm
    assert not c.sandwich


@pytest.mark.parametrize("name", RELEASED)
def test_embedding_head_and_final_norm(name):
  decoder = decoder_of(name)
  c, gemma = decoder.cfg, decoder.layers[0].cfg.sandwich
  assert gemma == name.startswith("gemma")
  assert c.embedding.scale_by_sqrt_dim == gemma
  assert c.tied == TIED[name]
  assert c.final_soft_cap == (30.0 if name.startswith("gemma4") else None)
  assert c.norm.scale_plus_one == name.startswith("gemma3")
  assert c.norm.round_before_scale != gemma
  assert c.embedding.vocab_size == {"gemma3": 262208, "gemma4": 262144, "qwen3-": 151936}.get(name[:6], 129280)
  assert ("head" in decoder.params()) != TIED[name]


@pytest.mark.parametrize("name", RELEASED)
def test_what_no_gradient_changes(name):
  spec = decoder_of(name).params()
  frozen = {jax.tree_util.keystr(path[2:]) for path, p in jax.tree_util.tree_leaves_with_path(spec) if not p.trainable}
  expected = {"gemma3": set(), "gemma4": {"['layer_scalar']"}, "qwen3-": set()}
  assert frozen == expected.get(name[:6], {"['moe']['router']['bias']"})


def test_scan_and_remat_are_passed_on_and_change_no_parameter():
  one = decoder_of("gemma3-tiny")
  other = decoder_of("gemma3-tiny", scan_layers=False, remat_policy="full")
  assert (one.cfg.scan_layers, one.cfg.remat_policy) == (True, "none")
  assert (other.cfg.scan_layers, other.cfg.remat_policy) == (False, "full")
  assert one.params() == other.params()


def test_the_kernel_reaches_every_layer():
  decoder = decoder_of("gemma4-31b", attention="dot_product", platform="gpu")
  assert {(x.cfg.mixer.kernel, x.cfg.mixer.platform) for x in decoder.layers} == {("dot_product", "gpu")}
  decoder = decoder_of("deepseek3-tiny", attention="dot_product", platform="tpu")
  assert {(x.cfg.mixer.kernel, x.cfg.mixer.platform) for x in decoder.layers} == {("dot_product", "tpu")}


def test_the_last_layer_of_gemma4_is_global_whatever_the_cycle():
  model = dataclasses.replace(load_config("gemma4-tiny").config.model, num_decoder_layers=5)
  windows = [layer.cfg.mixer.window for layer in built(model).layers]
  assert windows == [32, 32, None, 32, None]
  gemma3 = dataclasses.replace(load_config("gemma3-tiny").config.model, num_decoder_layers=5)
  assert [layer.cfg.mixer.window for layer in built(gemma3).layers] == [32, 32, None, 32, 32]


def test_layer_types_may_be_spelled_out():
  types = ("global", "sliding", "global", "sliding", "global", "global")
  model = dataclasses.replace(load_config("gemma4-tiny").config.model, layer_types=types)
  kinds = tuple("sliding" if x.cfg.mixer.window else "global" for x in built(model).layers)
  assert kinds == types


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma4-31b", "gemma4-e2b", "deepseek3.2-671b"])
def test_storage_dtype_and_the_one_exception(name, weight_dtype):
  spec = build_decoder(load_config(name).config.model, Precision(weight_dtype=weight_dtype)).params()
  for path, p in jax.tree_util.tree_leaves_with_path(spec):
    exception = jax.tree_util.keystr(path).endswith("['router']['bias']")
    assert p.dtype == ("float32" if exception else weight_dtype)
    assert math.prod(p.shape) > 0
