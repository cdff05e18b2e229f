"""The arrays of a pull-back that one loop keeps for another loop."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.training.step.in_backward.residuals import Residuals


def test_a_loop_keeps_nothing_of_what_the_other_is_given():
  """The second loop receives weights, layer inputs and closed-over arrays again, so the first loop keeps only what it
  computed."""
  L, D = 3, 5
  w, x, shared = (
    jnp.arange(1.0, 1 + L * D * D).reshape(L, D, D) / 99,
    jnp.linspace(-1, 1, 2 * D).reshape(2, D),
    jnp.linspace(0, 1, D),
  )
  layer = lambda shared: jax.checkpoint(
    lambda w, x: jnp.sin(x @ w + shared), policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  )
  shapes = []

  def two_loops(w, x, shared):
    def forward(x, w):
      out, pull = jax.vjp(layer(shared), w, x)
      shape, kept = Residuals.of(pull, (w, x, shared))
      shapes.append((shape, [a.shape for a in kept]))
      return out, (x, kept)

    def backward(g, row):
      w, x, kept = row
      dw, g = shapes[-1][0].pull(kept, (w, x, shared))(g)
      return g, dw

    out, (read, kept) = jax.lax.scan(forward, x, w)
    g, dw = jax.lax.scan(backward, 2 * out, (w, read, kept), reverse=True)
    return dw, g

  def loss(w, x):
    for i in range(L):
      x = layer(shared)(w[i], x)
    return jnp.sum(x * x)

  found, wanted = jax.jit(two_loops)(w, x, shared), jax.grad(loss, (0, 1))(w, x)
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
  assert shapes[-1][1] == [(2, D)], "the product alone"
