"""Tests single layers: the place of their parameters, the carry, statistics and captures, and the dtype of the stream. Also
tests how layers are grouped into stacks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.block import find_stacks
from maxtext_like.layers.context import Context


def test_every_layer_is_found_where_its_parameters_are(family, tiny_decoder):
  decoder = tiny_decoder(family)
  spec = decoder.params()
  places = [decoder.locate(i) for i in range(len(decoder.layers))]
  assert len(set(places)) == len(decoder.layers)
  for i, (name, row, layer_name) in enumerate(places):
    own = decoder.layers[i].params()
    stacked = spec[name][layer_name]
    assert jax.tree.structure(own) == jax.tree.structure(stacked)
    for mine, theirs in zip(jax.tree.leaves(own), jax.tree.leaves(stacked), strict=True):
      assert theirs.shape[1:] == mine.shape
      assert 0 <= row < theirs.shape[0]
      assert theirs.trainable == mine.trainable
  for outside in (-1, len(decoder.layers)):
    with pytest.raises(ValueError, match=f"layer {outside} .*0 to {len(decoder.layers) - 1}"):
      decoder.locate(outside)


def context(capture=(), **own):
  tokens = Tokens(jnp.ones((1, 4), jnp.int32))
  return Context(jnp.broadcast_to(jnp.arange(4), (1, 4)), tokens, capture=frozenset(capture), **own)


def test_an_owner_lends_its_keys_and_a_borrower_reads_them(tiny_decoder, random_params):
  layers = tiny_decoder("gemma4-e2b").layers
  owner, borrower = layers[2], layers[4]
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 20)), jnp.float32)
  ctx = context(per_layer_input=jnp.ones((1, 4, 7)))
  other = jnp.full((1, 4, 1, 8), 7.0)
  carry = {"x": x, "kv": {"sliding": (jnp.zeros((1, 4, 1, 6)),) * 2, "global": (other, other)}}
  after, _ = jax.jit(owner)(random_params(owner.params()), carry, ctx)
  assert (after["kv"]["sliding"][0] != 0).all()
  assert (after["kv"]["global"][0] == other).all()
  p = random_params(borrower.params())
  run = jax.jit(borrower)
  handed, _ = run(p, after, ctx)
  assert (handed["kv"]["sliding"][0] == after["kv"]["sliding"][0]).all()
  different, _ = run(p, after | {"kv": after["kv"] | {"sliding": (other[..., :6], other[..., :6])}}, ctx)
  assert not jnp.allclose(handed["x"], different["x"])


def test_the_layer_scalar_multiplies_the_whole_stream(tiny_decoder, random_params):
  layer = tiny_decoder("gemma4-moe").layers[0]
  p = random_params(layer.params())
  assert not layer.params()["layer_scalar"].trainable
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 20)), jnp.float32)
  run = jax.jit(layer)
  one, three = (run(p | {"layer_scalar": jnp.asarray(s)}, {"x": x}, context())[0]["x"] for s in (1.0, 3.0))
  np.testing.assert_allclose(three, 3 * one, rtol=1e-6)


def test_a_layer_s_statistics_and_captures(tiny_decoder):
  def names(family, capture):
    layer = tiny_decoder(family).layers[-1]
    carry = {"x": jnp.zeros((1, 4, 20))}
    _, aux = jax.eval_shape(layer, jax.tree.map(lambda p: jnp.zeros(p.shape), layer.params()), carry, context(capture))
    return set(aux)

  moe = {"clamped", "moe_load", "balance_load", "balance_probs"}
  router = {"router.scores", "router.topk_weights", "router.topk_idx"}
  assert names("gemma3", ()) == {"clamped"}
  assert names("gemma4-moe", ()) == moe
  assert names("deepseek3.2", ()) == moe | {"indexer_loss"}
  everything = ("hidden", "router", "indexer", "ple")
  assert names("deepseek3.2", everything) == moe | router | {"indexer_loss", "indexer.topk_idx", "hidden"}
  assert names("deepseek3", everything) == moe | router | {"hidden"}


def test_a_context_that_collects_stays_in_its_trace(tiny_decoder, random_params):
  """A context that collects values must not be passed into a jitted function, because it would store tracers that are invalid
  outside of that function."""
  layer = tiny_decoder("gemma3").layers[0]
  ctx = context().collecting()
  with pytest.raises(TypeError, match="Taps"):
    jax.jit(layer)(random_params(layer.params()), {"x": jnp.zeros((1, 4, 20))}, ctx)


@pytest.mark.parametrize(
  ("precision", "expected"),
  [
    ({"dtype": "float16"}, "float32"),
    ({"dtype": "float16", "residual_dtype": "float16"}, "float16"),
    ({"dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": "bfloat16", "residual_dtype": "float32"}, "float32"),
  ],
)
def test_dtype_of_the_residual_stream(family, precision, expected, tiny_decoder):
  """The residual stream has the expected dtype after the embedding and after every layer, with and without scan. The result of
  the final norm has the dtype of activations."""
  decoder = tiny_decoder(family, precision=precision)
  p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), decoder.params())
  batch = {"tokens": jax.ShapeDtypeStruct((2, 5), "int32")}
  x, aux = jax.eval_shape(lambda p, b: decoder.hidden(p, b, frozenset({"hidden"})), p, batch)
  assert x.dtype == precision["dtype"]
  stream = {name: a.dtype.name for name, a in aux.items() if name.startswith("hidden.") and name != "hidden.final_norm"}
  assert len(stream) == 1 + len(decoder.layers)
  assert set(stream.values()) == {expected}


def shape(pattern):
  """Return [(layers in the block, repeats)] of a pattern with one letter for each kind of layer."""
  letters: Any = tuple(pattern)
  stacks: Any = find_stacks(letters)
  assert [s.name for s in stacks] == [f"stack_{i}" for i in range(len(stacks))]
  # If the stacks are unrolled, they give the pattern again.
  assert "".join("".join(s.layers) * s.repeats for s in stacks) == pattern
  assert [s.first for s in stacks] == np.cumsum([0] + [len(s.layers) * s.repeats for s in stacks])[:-1].tolist()
  return [(len(s.layers), s.repeats) for s in stacks]


@pytest.mark.parametrize(
  ("pattern", "expected"),
  [
    (("lllllg" * 6)[:34], [(6, 5), (1, 4)]),  # Gemma 3 4B
    ("lllllg" * 8, [(6, 8)]),  # Gemma 3 12B
    (("lllllg" * 11)[:62], [(6, 10), (1, 2)]),  # Gemma 3 27B
    ("lllllg" * 10, [(6, 10)]),  # Gemma 4 31B
    ("llllg" * 3 + "LLLLG" * 4, [(5, 3), (5, 4)]),  # E2B: the last 20 layers share keys and are twice as wide
    ("lllllg" * 4 + "LLLLLG" * 3, [(6, 4), (6, 3)]),  # E4B
    ("d" * 3 + "m" * 58, [(1, 3), (1, 58)]),  # DeepSeek
    ("d", [(1, 1)]),
    ("ab", [(1, 1), (1, 1)]),
    ("aab", [(1, 2), (1, 1)]),
    ("abab", [(2, 2)]),
    ("aabaab", [(3, 2)]),  # not aa, b, aa, b, because the block that covers more layers is preferred
    ("aaaa", [(1, 4)]),  # the shortest of the blocks that cover the same layers
    ("abcabcab", [(3, 2), (1, 1), (1, 1)]),
  ],
)
def test_stacks(pattern, expected):
  assert shape(pattern) == expected
