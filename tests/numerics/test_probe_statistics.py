"""Tests probes: statistics of values and cotangents for each layer, through scan, remat and grad."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxtext_like.layers import probe as probing
from maxtext_like.numerics import probe_statistics

LAYERS, WIDTH = 7, 5


def forward(ws, sinks, x, remat):
  def block(x, inputs):
    w, sink = inputs
    x = x + jnp.tanh(x @ w)
    if sink is None:
      return x, {}
    x, seen = probing.probe(x, sink["residual"])
    return x, {"residual": seen}

  return lax.scan(jax.checkpoint(block) if remat else block, x, (ws, sinks))


def loss(ws, sinks, x, remat=True, scale=1.0):
  y, seen = forward(ws, sinks, x, remat)
  return scale * (y.astype(jnp.float32) ** 2).sum(), seen


@pytest.fixture
def case():
  ws = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) * 0.1
  x = jax.random.normal(jax.random.key(1), (3, WIDTH))
  return ws, probing.sinks(["residual"], (LAYERS,)), x


@pytest.mark.parametrize("remat", [False, True])
def test_values_equal_a_loop_written_out_and_gradients_are_untouched(case, remat):
  ws, sinks, x = case
  (value, seen), (grads, back) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=3)(ws, sinks, x, remat)
  plain_value, plain_grads = jax.value_and_grad(lambda ws: loss(ws, None, x, remat)[0])(ws)
  np.testing.assert_allclose(value, plain_value, rtol=1e-6)
  np.testing.assert_allclose(grads, plain_grads, rtol=1e-5, atol=1e-6)
  streams = [x]
  for w in ws:
    streams.append(streams[-1] + jnp.tanh(streams[-1] @ w))

  def tail(y, i):
    for w in ws[i + 1 :]:
      y = y + jnp.tanh(y @ w)
    return (y**2).sum()

  cotangents = [jax.grad(tail)(streams[i + 1], i) for i in range(LAYERS)]
  np.testing.assert_allclose(seen["residual"][:, 0], [np.abs(s).max() for s in streams[1:]], rtol=1e-5)
  np.testing.assert_allclose(back["residual"][:, 0], [np.abs(c).max() for c in cotangents], rtol=1e-5)
  assert not np.any(seen["residual"][:, 1]) and not np.any(back["residual"][:, 1])  # noqa: PT018


def test_a_backward_overflow_is_counted_at_its_layer_only_in_the_backward(case):
  """Layer 3 multiplies its cotangent of 4e4 by 4. Every element then exceeds 65504, the largest float16 number, in the layers
  before it and in no other."""
  ws, sinks, x = case
  ws = jnp.zeros(ws.shape, jnp.float16).at[3].set(3 * jnp.eye(WIDTH, dtype=jnp.float16))
  x = jnp.full(x.shape, 0.05, jnp.float16)
  (_, seen), back = jax.value_and_grad(lambda s: loss(ws, s, x, scale=1e5), has_aux=True)(sinks)
  assert not np.any(seen["residual"][:, 1])
  np.testing.assert_array_equal(back["residual"][:, 1], [x.size] * 3 + [0] * 4)
  np.testing.assert_allclose(back["residual"][3:, 0], 4e4, rtol=0.05)
  assert np.isfinite(back["residual"]).all()


def test_metrics_and_trees(case):
  ws, sinks, x = case
  (_, seen), (grads, back) = jax.value_and_grad(loss, (0, 1), has_aux=True)(ws.at[2, 0, 0].set(jnp.nan), sinks, x)
  flat = probe_statistics.metrics({"forward": seen, "backward": back})
  assert set(flat) == {f"numerics/{d}/residual/{k}" for d in ("forward", "backward") for k in ("max", "nonfinite")}
  np.testing.assert_array_equal(flat["numerics/forward/residual/nonfinite"] > 0, [False, False, *[True] * 5])
  rows = probe_statistics.rows({"w": ws.at[3].set(4.0).at[4, 0, 0].set(jnp.inf), "ids": jnp.arange(LAYERS)}, LAYERS)
  assert rows.shape == (LAYERS, 2)
  assert rows[3, 0] == 4.0
  np.testing.assert_array_equal(rows[:, 1], [0, 0, 0, 0, 1, 0, 0])
  assert probe_statistics.tree({"a": jnp.asarray([1.0, -3.0]), "b": jnp.asarray([jnp.nan])}).tolist() == [3.0, 1.0]
  assert probe_statistics.tree({"ids": jnp.arange(3)}).tolist() == [0.0, 0.0]
  assert grads.shape == ws.shape


def test_wrong_slots_are_refused(case):
  _, sinks, x = case
  with pytest.raises(ValueError, match="scan over the sinks"):
    probing.probe(x, sinks["residual"])
  with pytest.raises(ValueError, match=r"floating-point array.*int32"):
    probing.probe(jnp.arange(3), sinks["residual"][0])
