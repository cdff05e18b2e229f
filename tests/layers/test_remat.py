"""Tests which arrays a layer keeps for its backward pass under each policy, and in which memory. test_decoder.py compares the
results."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.precision import PRODUCT
from maxtext_like.layers.remat import NAMES, remat

X, W = jnp.ones((3, 5)), jnp.ones((5, 5))


def layer(p, carry, ctx):
  """A layer with one product for each name that real layers use, and an input that all layers share."""
  x, shared = carry["x"], carry["shared"]
  for name in (PRODUCT, "attention", "output", "mlp"):
    x = jnp.sin(checkpoint_name(jnp.einsum("td,de->te", jnp.cos(x), p), name)) * ctx
  return {"x": x * jnp.tanh(shared), "shared": shared}


def kept(policy, offload):
  """Return the number of arrays of tokens that are kept on the device, and the number in host memory."""
  found = []

  def step(p, x, shared, ctx):
    call = remat(layer, policy, isolated=True, offload=offload)
    _, pull = jax.vjp(lambda p, x, shared: call(p, {"x": x * 2, "shared": shared * 3}, ctx)["x"], p, x, shared)
    found.extend(jax.typeof(a) for a in jax.tree.leaves(pull) if a.shape == X.shape)
    return pull

  jax.eval_shape(step, W, X, X, jnp.float32(2))
  on_host = [a for a in found if a.memory_space == jax.memory.Space.Host]
  return len(found) - len(on_host), len(on_host)


# Each policy keeps the arrays with its names. minimal also keeps all other products, but each product here has a name.
COUNTS = {"full": 0, "save_attention": 1, "save_outputs": 1, "save_mlp": 2, "minimal": 4}


@pytest.mark.parametrize("policy", COUNTS)
def test_what_a_policy_keeps_lies_where_offload_says(policy):
  names, inputs = COUNTS[policy], 2  # the stream and the shared input
  assert kept(policy, "none") == (inputs + names, 0)
  assert kept(policy, "layer_inputs") == (names, inputs)
  assert kept(policy, "kept") == (inputs, names)
  assert kept(policy, "all") == (0, inputs + names)
  assert set(COUNTS) == set(NAMES)


def test_nothing_is_offloaded_of_what_no_policy_names():
  """Offloading without a remat policy is an error, because it moves the arrays that a policy names."""
  with pytest.raises(ValueError, match=r"remat_offload=all .*remat_policy=none"):
    remat(layer, "none", isolated=True, offload="all")
