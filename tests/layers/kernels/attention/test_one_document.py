"""Rows known to be one document: no mask of documents in the program, and the numbers of one that has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.kernels.attention.registry import Name, attend
from maxtext_like.layers.masks import Tokens
from maxtext_like.layers.precision import Precision

B, T, N, K, H = 3, 520, 4, 2, 6
LENGTHS = (T, 301, 0)  # a full row, one with padding behind, one of padding alone


@pytest.mark.parametrize(("name", "window"), [("dot_product", None), ("blockwise", 130)])
def test_values_and_gradients_are_those_of_the_mask(name: Name, window):
  rng = np.random.default_rng(0)
  q, k, v, g = (jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32) for heads in (N, K, K, N))
  segments = jnp.asarray(np.arange(T) < np.array(LENGTHS)[:, None], jnp.int32)

  @jax.jit
  def both(tokens):
    def forward(q, k, v):
      exact = Precision(dtype="float32", matmul_precision="highest")
      out = attend(name, q, k, v, tokens, window=window, bidirectional_images=False, scale=0.3, precision=exact)
      return tokens.padding_zeroed(out)

    out, backward = jax.vjp(forward, q, k, v)
    return out, *backward(g)

  want, got = both(Tokens(segments)), both(Tokens(segments, one_document=True))
  for x, y in zip(want, got, strict=True):
    np.testing.assert_allclose(y, x, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(y)[np.asarray(segments) == 0], 0)


def test_the_mask_of_documents_is_not_made():
  def run(segments, one_document):
    x = jnp.ones((B, T, K, H))
    tokens = Tokens(segments, one_document=one_document)
    return attend(
      "dot_product", x, x, x, tokens, window=None, bidirectional_images=False, scale=1.0, precision=Precision(dtype="float32")
    )

  whole = f"bool[{B},{T},{T}]"  # which tokens belong to one document
  texts = [str(jax.make_jaxpr(run, static_argnums=1)(jnp.ones((B, T), jnp.int32), known)) for known in (False, True)]
  assert [whole in text.replace(" ", "") for text in texts] == [True, False]
