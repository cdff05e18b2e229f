"""Tests the arguments that are passed to cuDNN and the use of its results. JAX's own attention replaces cuDNN here; the
self-test checks cuDNN itself on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention.registry import Name, attend
from maxtext_like.layers.precision import Precision
from tests.tiers import slow

B, T, N, K, H = 2, 24, 4, 2, 12


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("V", [slow(12), 8])
def test_values_and_gradients_are_those_of_attention_written_out(V, documents, window, monkeypatch):
  """Rows have documents and padding. Values may be narrower than keys, as in latent attention."""
  whole = jax.nn.dot_product_attention

  def in_its_place(q, k, v, *, implementation, **how):
    assert implementation == "cudnn"
    assert v.shape == k.shape  # JAX passes only equal shapes to cuDNN
    return whole(q, k, v, implementation="xla", **how)

  monkeypatch.setattr(jax.nn, "dot_product_attention", in_its_place)
  rng = np.random.default_rng(0)
  q, k, v, g = (
    jnp.asarray(rng.normal(size=(B, T, *heads)), jnp.float32) for heads in ((N, H), (K, H), (K, V), (N, V))
  )  # fmt: skip
  rows = np.array([[1] * 9 + [2] * 15, [1] * 20 + [0] * 4])
  tokens = Tokens(jnp.asarray(rows, jnp.int32)) if documents else Tokens()

  def both(name: Name):
    def forward(q, k, v):
      exact = Precision(dtype="float32", matmul_precision="highest")
      return attend(name, q, k, v, tokens, window=window, bidirectional_images=False, scale=0.3, precision=exact)

    out, backward = jax.vjp(forward, q, k, v)
    return out, *backward(g)

  for want, got in zip(both("dot_product"), both("cudnn_flash"), strict=True):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
