"""Tests the loop over tiles of queries, without the layer. test_mla.py tests attention with this loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention import sparse_attention_tiles
from maxtext_like.layers.attention.masks import Keys, Tokens

B, S, H = 2, 11, 3
SEGMENTS = np.array([[1] * 6 + [2] * 5, [1] * 9 + [0] * 2])
rng = np.random.default_rng(0)
Q, K = (rng.normal(size=(B, S, H)).astype(np.float32) for _ in range(2))


def attend(keys, queries, visible):
  scores = jnp.where(visible, jnp.exp(jnp.einsum("bth,bsh->bts", queries["q"], keys["k"])), 0)
  return {"out": jnp.einsum("bts,bsh->bth", scores, keys["k"])}


def written(q, k, first, count):
  """Return the result for ``count`` queries, starting at ``first``, computed one pair of query and key at a time."""
  out = np.zeros((B, count, H))
  for b, t, s in np.ndindex(B, count, S):
    if s <= first + t and SEGMENTS[b, s] == SEGMENTS[b, first + t] > 0:
      out[b, t] += np.exp(q[b, first + t] @ k[b, s]) * k[b, s]
  return out


@pytest.mark.parametrize(("first", "count", "tile"), [(0, 11, 4), (4, 7, 3), (5, 4, 4), (7, 4, 9), (10, 1, 4)])
@pytest.mark.parametrize("known", [True, False])
def test_parts_of_a_row_against_every_pair_and_no_scores_are_kept(first, count, tile, known, monkeypatch):
  """A part of a row may have fewer queries than a tile, and it has more keys than queries. No scores are kept for the backward
  pass."""
  monkeypatch.setattr(sparse_attention_tiles, "TILE", tile)
  tokens, own = (Tokens(jnp.asarray(x, jnp.int32)) for x in (SEGMENTS, SEGMENTS[:, first : first + count]))

  def run(q, k, at):
    where = Keys(tokens, first if known else at)
    return sparse_attention_tiles.over_queries(attend, {}, {"k": k}, {"q": q}, own, where)["out"]

  q, at = Q[:, first : first + count], jnp.asarray(first)
  np.testing.assert_allclose(jax.jit(run)(q, K, at), written(Q, K, first, count), rtol=2e-5, atol=1e-5)
  kept = jax.eval_shape(lambda *given: jax.vjp(lambda q, k: run(q, k, given[2]), *given[:2])[1], q, K, at)
  scores = [x.shape for x in jax.tree.leaves(kept) if x.ndim > 2 and x.shape[-1] != H and x.dtype == jnp.float32]
  assert not scores
