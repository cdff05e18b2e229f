"""Tests rows that are known to be one document. The program has no mask of documents, and the results equal those with a mask,
for kernels and for layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.attention.indexer import IndexerConfig
from maxtext_like.layers.attention.masks import Tokens, zeroed
from maxtext_like.layers.attention.mla import MLAConfig
from maxtext_like.layers.attention.rope import RopeConfig
from maxtext_like.layers.block import Block, BlockConfig
from maxtext_like.layers.context import Context
from maxtext_like.layers.kernels.attention.registry import Name, attend
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision

B, N, K, H = 3, 4, 2, 6


@pytest.mark.parametrize(("name", "window", "length"), [("dot_product", None, 40), ("blockwise", 130, 520)])  # more than a tile
@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_mask(name: Name, window, length):
  rng = np.random.default_rng(0)
  q, k, v, g = (jnp.asarray(rng.normal(size=(B, length, heads, H)), jnp.float32) for heads in (N, K, K, N))
  # A full row, a row with padding at its end, and a row of padding.
  segments = jnp.asarray(np.arange(length) < np.array([length, length * 3 // 5, 0])[:, None], jnp.int32)

  @jax.jit
  def both(tokens):
    def forward(q, k, v):
      exact = Precision(dtype="float32", matmul_precision="highest")
      out = attend(name, q, k, v, tokens, window=window, bidirectional_images=False, scale=0.3, precision=exact)
      return zeroed(out, tokens.real)

    out, backward = jax.vjp(forward, q, k, v)
    return out, *backward(g)

  want, got = both(Tokens(segments)), both(Tokens(segments, one_document=True))
  for x, y in zip(want, got, strict=True):
    np.testing.assert_allclose(y, x, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(y)[np.asarray(segments) == 0], 0)


def test_the_mask_of_documents_is_not_made():
  T = 520

  def run(segments, one_document):
    x = jnp.ones((B, T, K, H))
    tokens = Tokens(segments, one_document=one_document)
    return attend(
      "dot_product", x, x, x, tokens, window=None, bidirectional_images=False, scale=1.0, precision=Precision(dtype="float32")
    )

  whole = f"bool[{B},{T},{T}]"  # the mask of token pairs that belong to the same document
  texts = [str(jax.make_jaxpr(run, static_argnums=1)(jnp.ones((B, T), jnp.int32), known)) for known in (False, True)]
  assert [whole in text.replace(" ", "") for text in texts] == [True, False]


ROPE = RopeConfig(dim=4, theta=100.0)
LATENT = {"emb_dim": 5, "num_heads": 2, "kv_lora_rank": 3, "nope_dim": 3, "rope_dim": 4, "value_dim": 3, "rope": ROPE}
LAYERS = {
  "attention": AttentionConfig(
    emb_dim=5, num_query_heads=2, num_kv_heads=1, head_dim=4, scale=0.4, rope=ROPE, window=5, o_bias=True
  ),
  "latent": MLAConfig(**LATENT, q_lora_rank=0, bias=True),
  "latent, sparse": MLAConfig(
    **LATENT, q_lora_rank=3, indexer_loss_weight=0.5,
    indexer=IndexerConfig(emb_dim=5, q_lora_rank=3, num_heads=2, head_dim=4, topk=3, rope=ROPE),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_zeroes_padding(name, random_params):
  """Values and gradients equal those with a mask of documents, and outputs of padding are zero."""
  layer = LAYERS[name].layer(Precision(dtype="float32", matmul_precision="highest"))
  rng = np.random.default_rng(2)
  lengths = np.array([[9], [6], [0]])
  segments = jnp.asarray(np.arange(9) < lengths, jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(9), (3, 9))
  x, g = (jnp.asarray(rng.normal(size=(3, 9, 5)), jnp.float32) for _ in range(2))
  g = zeroed(g, segments > 0)  # nothing reads the outputs of padding
  p = random_params(layer.params())

  @jax.jit
  def both(tokens):
    out, backward = jax.vjp(lambda p, x: layer.standalone(p, x, positions, tokens)[0], p, x)
    return zeroed(out, segments > 0), *backward(g), out

  want, got = both(Tokens(segments))[:-1], both(Tokens(segments, one_document=True))
  for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got[:-1]), strict=True):
    np.testing.assert_allclose(b, a, rtol=0, atol=2e-6)
  np.testing.assert_array_equal(np.asarray(got[-1])[np.asarray(segments) == 0], 0)


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.slow
def test_padding_gets_nothing_of_its_attention(sandwich, random_params):
  """Attention adds nothing to the residual stream of padding, and padding contributes nothing to gradients: the stream and all
  gradients of a block equal those with a mask of documents."""
  norm = NormConfig(dim=5)
  mixer = AttentionConfig(emb_dim=5, num_query_heads=2, num_kv_heads=1, head_dim=4, scale=0.4, rope=ROPE)
  cfg = BlockConfig(mixer=mixer, ffn=MLPConfig(emb_dim=5, mlp_dim=6), norm=norm, sandwich=sandwich)
  block = Block(cfg, Precision(dtype="float32", matmul_precision="highest"))
  rng = np.random.default_rng(3)
  segments = jnp.asarray(np.arange(9) < np.array([[9], [6], [0]]), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(9), (3, 9))
  x, g = (jnp.asarray(rng.normal(size=(3, 9, 5)), jnp.float32) for _ in range(2))
  p = random_params(block.params())

  @jax.jit
  def both(tokens):
    run = lambda p, x: block(p, {"x": x}, Context(positions, tokens).collecting())[0]["x"]
    out, backward = jax.vjp(run, p, x)
    return out, *backward(g)

  want, got = both(Tokens(segments)), both(Tokens(segments, one_document=True))
  for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
    np.testing.assert_allclose(b, a, rtol=0, atol=5e-6)
