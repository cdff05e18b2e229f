"""Tests latent attention against the equations in float64: queries with and without a latent, biases, the temperature of YaRN,
and sparse attention."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from written_out import attention, causal, layer_norm, rms, rope, tree64

from maxtext_like.layers.attention import sparse_attention_tiles
from maxtext_like.layers.attention.indexer import IndexerConfig
from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.attention.mla import MLA, MLAConfig
from maxtext_like.layers.attention.rope import RopeConfig, inverse_frequencies
from maxtext_like.layers.kernels.attention.registry import choose
from maxtext_like.layers.precision import Precision
from tests.tiers import slow

B, T, D, N, R, C, Q, P, V = 2, 7, 11, 3, 6, 5, 5, 4, 2
X_HEADS, X_DIM, TOPK = 3, 7, 3
FLOAT32 = Precision(dtype="float32")
X = np.random.default_rng(0).normal(size=(B, T, D))
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 1, 1, 0]])
POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 4, 5, 0]])
YARN = RopeConfig(
  dim=P,
  theta=100.0,
  kind="yarn",
  factor=40.0,
  original_max_position_embeddings=64,
  mscale=1.0,
  mscale_all_dim=0.7,
  interleave=True,
)
BASE = MLAConfig(emb_dim=D, num_heads=N, q_lora_rank=R, kv_lora_rank=C, nope_dim=Q, rope_dim=P, value_dim=V, rope=YARN)
INDEXER = IndexerConfig(emb_dim=D, q_lora_rank=R, num_heads=X_HEADS, head_dim=X_DIM, topk=TOPK, rope=YARN)
SPARSE = dataclasses.replace(BASE, indexer=INDEXER, indexer_loss_weight=0.5)

VARIANTS = {
  "yarn": BASE,
  "plain": dataclasses.replace(BASE, q_lora_rank=0, bias=True, rope=RopeConfig(dim=P, theta=100.0)),
  "query latent and bias": dataclasses.replace(BASE, bias=True),
}


def rotated(cfg: RopeConfig, x, interleave):
  return rope(x, POSITIONS, inverse_frequencies(cfg).astype(np.float64), interleave=interleave, factor=cfg.attention_factor)


def written_heads(c: MLAConfig, p, x):
  """Return q, k and v of each head, and the latent of the queries after its norm."""
  if c.q_lora_rank:
    latent = rms(x @ p["q_a"] + p.get("q_a_bias", 0), p["q_a_norm"]["scale"])
    q = np.einsum("btr,rnh->btnh", latent, p["q_b"])
  else:
    latent, q = None, np.einsum("btd,dnh->btnh", x, p["q"])
  kv_a = x @ p["kv_a"] + p.get("kv_a_bias", 0)
  kv = np.einsum("btc,cnh->btnh", rms(kv_a[..., :C], p["kv_a_norm"]["scale"]), p["kv_b"])
  k_rope = rotated(c.rope, kv_a[..., None, C:], c.rope.interleave)
  q = np.concatenate([q[..., :Q], rotated(c.rope, q[..., Q:], c.rope.interleave)], -1)
  k = np.concatenate([kv[..., :Q], np.broadcast_to(k_rope, (B, T, N, P))], -1)
  return q, k, kv[..., Q:], latent


def written_scores(c: IndexerConfig, p, x, latent):
  """Return the score I[b, t, s] of each pair. The leading dimensions are rotated, in half-split order."""

  def turn(a):
    return np.concatenate([rotated(c.rope, a[..., :P], False), a[..., P:]], -1)

  q = turn(np.einsum("btr,rxh->btxh", latent, p["q"]))
  k = turn(layer_norm(x @ p["k"], p["k_norm"]["scale"], p["k_norm"]["bias"])[:, :, None])[:, :, 0]
  w = x @ p["weights"] * X_HEADS**-0.5
  scores = np.zeros((B, T, T))
  for b, t, s in np.ndindex(scores.shape):
    scores[b, t, s] = sum(w[b, t, h] * max(q[b, t, h] @ k[b, s] * X_DIM**-0.5, 0) for h in range(X_HEADS))
  return scores


def written_selection(scores, mask, topk):
  chosen = np.zeros(mask.shape, bool)
  for b, t in np.ndindex(mask.shape[:2]):
    visible = [s for s in range(mask.shape[2]) if mask[b, t, s]]
    chosen[b, t, sorted(visible, key=lambda s, row=scores[b, t]: (-row[s], s))[:topk]] = True
  return chosen


def written_divergence(scores, probs, mask, real):
  """Return the mean over real tokens of KL(mean of the heads || softmax of the index scores). Both are normalized over the
  mask."""
  total = 0.0
  for b, t in np.ndindex(real.shape):
    seen = mask[b, t]
    if real[b, t] and seen.any():
      p = probs[b, :, t][:, seen].sum(0)
      p = p / p.sum()
      e = np.exp(scores[b, t, seen] - scores[b, t, seen].max())
      total += np.sum(p * (np.log(p) - np.log(e / e.sum())))
  return total / real.sum()


def written(c: MLAConfig, p, x):
  q, k, v, latent = written_heads(c, p, x)
  visible = mask = causal(T, SEGMENTS)
  aux = {}
  if c.indexer:
    scores = written_scores(c.indexer, p["indexer"], x, latent)
    selected = written_selection(scores, visible, c.indexer.topk)
    mask = selected if c.indexer_sparse else visible
    aux["selected"] = selected
  m = 0.1 * c.rope.mscale_all_dim * math.log(c.rope.factor) + 1 if c.rope.kind == "yarn" else 1.0
  out, probs = attention(q, k, v, mask, (Q + P) ** -0.5 * m**2)
  if c.indexer:
    aux["loss"] = c.indexer_loss_weight * written_divergence(scores, probs, mask, SEGMENTS > 0)
  return np.einsum("btnv,nvd->btd", out, p["o"]) + p.get("o_bias", 0), aux


def run(cfg, p, precision=FLOAT32):
  layer = MLA(cfg, precision)
  return jax.jit(lambda p, x: layer.standalone(p, x, jnp.asarray(POSITIONS), Tokens(jnp.asarray(SEGMENTS))))(
    p, jnp.asarray(X, jnp.float32)
  )


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_float64(variant, random_params):
  cfg = VARIANTS[variant]
  p = random_params(MLA(cfg, FLOAT32).params())
  assert {name for name in p if name.endswith("bias")} == (
    {"kv_a_bias", "o_bias"} | ({"q_a_bias"} if cfg.q_lora_rank else set()) if cfg.bias else set()
  )
  out, aux = run(cfg, p)
  np.testing.assert_allclose(out, written(cfg, tree64(p), X)[0], atol=5e-6)
  assert aux == {}


# The complete row at once, or tiles of 2 and 3 queries. Queries gather the selected keys, except in tiles that see few keys and
# on a TPU.
TILED = [(True, 128, "cpu"), (True, 2, "cpu"), slow(True, 3, "cpu"), slow(True, 2, "tpu"), (False, 128, "cpu")]


@pytest.mark.parametrize(("sparse", "tile", "platform"), [*TILED, slow(False, 2, "cpu")])
def test_sparse_attention_and_its_dense_warm_up(sparse, tile, platform, random_params, monkeypatch):
  monkeypatch.setattr(sparse_attention_tiles, "TILE", tile)
  cfg = dataclasses.replace(SPARSE, indexer_sparse=sparse, platform=platform)
  p = random_params(MLA(cfg, FLOAT32).params(), seed=1)
  out, aux = run(cfg, p)
  expected, expected_aux = written(cfg, tree64(p), X)
  np.testing.assert_allclose(out, expected, atol=5e-6)
  np.testing.assert_allclose(aux["indexer_loss"], expected_aux["loss"], rtol=2e-5)
  assert expected_aux["loss"] > 0.01
  assert aux["indexer.topk_idx"].shape == (B, T, TOPK)
  visible = np.broadcast_to(causal(T, SEGMENTS), (B, T, T))
  for b, t in np.ndindex(B, T):
    chosen = {s for s in aux["indexer.topk_idx"][b, t].tolist() if visible[b, t, s]}
    assert chosen == set(np.flatnonzero(expected_aux["selected"][b, t]))
  dense = written(dataclasses.replace(cfg, indexer=None), tree64(p), X)[0]
  # The selection changes the result, except in the warm-up, where it has no effect.
  assert np.allclose(expected, dense) != sparse


@pytest.mark.parametrize(
  ("sparse", "dtype", "tolerance"),
  [
    (True, "float32", 2e-6),
    (True, "bfloat16", 2e-2),
    (False, "float32", 2e-6),
  ],
)
@pytest.mark.slow
def test_tiles_and_gathered_keys_have_the_gradients_of_the_whole(sparse, dtype, tolerance, random_params, monkeypatch):
  """Compare tiles of queries, with gathered and with masked keys, with the complete row. In bfloat16 the scores of the indexer
  are float32, so that all of them select the same keys."""
  cfg = dataclasses.replace(SPARSE, indexer_sparse=sparse, platform="tpu")
  p = random_params(MLA(cfg, FLOAT32).params(), seed=1)
  precision = Precision(dtype=dtype)

  def gradients(platform, tile):
    monkeypatch.setattr(sparse_attention_tiles, "TILE", tile)
    layer = MLA(dataclasses.replace(cfg, platform=platform), precision)

    def loss(p, x):
      out, aux = layer.standalone(p, x, jnp.asarray(POSITIONS), Tokens(jnp.asarray(SEGMENTS)))
      return jnp.sum(jnp.sin(out.astype(jnp.float32))) + aux["indexer_loss"]

    return jax.jit(jax.grad(loss, (0, 1)))(p, jnp.asarray(X, jnp.float32))

  whole = gradients("tpu", 128)
  for found in (gradients("cpu", 2), gradients("tpu", 3)):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
      np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0)


@pytest.mark.slow
def test_scores_of_all_heads_are_those_of_a_tile(monkeypatch):
  """With tiles, no array of the forward or backward pass has the scores of all heads for all pairs of positions. The test
  searches for the largest array with two axes of 40 positions."""
  length, layer = 40, MLA(SPARSE, FLOAT32)
  p = jax.tree.map(lambda s: jnp.ones(s.shape), layer.params())

  def largest(tile):
    monkeypatch.setattr(sparse_attention_tiles, "TILE", tile)

    def loss(p, x):
      out, aux = layer.standalone(p, x, jnp.arange(length)[None], Tokens())
      return jnp.sum(out) + aux["indexer_loss"]

    text = jax.jit(jax.grad(loss)).lower(p, jnp.ones((1, length, D))).as_text()
    shapes = [[int(n) for n in found.split("x")[:-1]] for found in re.findall(r"tensor<((?:\d+x)+)(?=[a-z])", text)]
    return max((math.prod(shape) for shape in shapes if shape.count(length) >= 2), default=0)

  assert largest(length) >= N * length * length
  assert largest(4) <= length * length


def test_as_many_keys_as_there_are_is_dense(random_params):
  p = random_params(MLA(SPARSE, FLOAT32).params(), seed=1)
  everything = dataclasses.replace(SPARSE, indexer=dataclasses.replace(INDEXER, topk=T))
  out, aux = run(everything, p)
  np.testing.assert_allclose(out, run(BASE, p)[0], atol=1e-6)
  assert aux["indexer.topk_idx"].shape == (B, T, T)


@pytest.mark.slow
def test_the_two_losses_train_disjoint_parameters(random_params):
  p = random_params(MLA(SPARSE, FLOAT32).params(), seed=1)
  layer = MLA(SPARSE, FLOAT32)

  def losses(p, x, which):
    out, aux = layer.standalone(p, x, jnp.asarray(POSITIONS), Tokens(jnp.asarray(SEGMENTS)))
    return jnp.sum(out**2) if which == "language" else aux["indexer_loss"]

  @jax.jit
  def run(p, x):
    return {which: jax.grad(losses, (0, 1))(p, x, which) for which in ("language", "indexer")}

  got = run(p, jnp.asarray(X, jnp.float32))
  for which, (gradient, x_gradient) in got.items():
    inside = gradient.pop("indexer")
    own, others = (inside, (gradient, x_gradient)) if which == "indexer" else ((gradient, x_gradient), inside)
    assert all(jnp.isfinite(g).all() and (g != 0).any() for g in jax.tree.leaves(own)), which
    assert all((g == 0).all() for g in jax.tree.leaves(others)), which


def test_a_loss_of_weight_zero_is_zero(random_params):
  cfg = dataclasses.replace(SPARSE, indexer_loss_weight=0.0)
  assert run(cfg, random_params(MLA(cfg, FLOAT32).params()))[1]["indexer_loss"] == 0


def test_scale():
  assert MLA(BASE, FLOAT32).cfg.scale == pytest.approx((Q + P) ** -0.5 * (0.07 * math.log(40) + 1) ** 2)
  released = dataclasses.replace(BASE, nope_dim=128, rope_dim=64, rope=dataclasses.replace(YARN, dim=64, mscale_all_dim=1.0))
  assert released.scale == pytest.approx(0.135234, abs=1e-6)
  assert VARIANTS["plain"].scale == (Q + P) ** -0.5
  assert dataclasses.replace(BASE, rope=dataclasses.replace(YARN, mscale_all_dim=0.0)).scale == (Q + P) ** -0.5
  assert dataclasses.replace(BASE, rope=dataclasses.replace(YARN, factor=1.0)).scale == (Q + P) ** -0.5


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 4e-2), ("float16", 6e-3)])
def test_low_precision_is_near(dtype, tolerance, random_params):
  p = random_params(MLA(BASE, FLOAT32).params())
  out, _ = run(BASE, p, Precision(dtype=dtype))
  assert out.dtype == ("float32" if dtype == "float16" else dtype)  # a float16 sum could overflow
  exact = written(BASE, tree64(p), X)[0]
  np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=tolerance * np.abs(exact).max())


def test_a_fused_kernel_is_taken_where_values_are_no_wider_than_keys_and_nothing_selects_keys():
  fits = dataclasses.replace(BASE, platform="gpu", nope_dim=12, value_dim=16, indexer=None)
  bfloat16 = Precision(dtype="bfloat16")
  for width in (16, 8):
    cfg = dataclasses.replace(fits, value_dim=width)
    assert choose("auto", MLA(cfg, bfloat16).case(256, images=False)).name == "cudnn_flash"
  for cfg in (dataclasses.replace(fits, value_dim=24), dataclasses.replace(fits, indexer=INDEXER)):
    case = MLA(cfg, bfloat16).case(256, images=False)
    assert choose("auto", case).name == "dot_product"
    with pytest.raises(ValueError, match="attention=cudnn_flash cannot be used here"):
      choose("cudnn_flash", case)


def test_a_rotary_table_of_another_size_is_refused():
  with pytest.raises(ValueError, match=r"rotary table has 4 .*rope_dim=6"):
    dataclasses.replace(BASE, rope_dim=6)
