"""How layers become stacks, and what a single layer promises: carry, aux, refusals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.blocks import Context, DeepSeekLayerConfig
from maxtext_like.layers.decoder import find_stacks
from maxtext_like.layers.masks import Tokens


def shape(pattern):
  """[(layers in the block, repeats)] of a pattern with one letter for each kind of layer."""
  letters: Any = tuple(pattern)
  stacks: Any = find_stacks(letters)
  assert [s.name for s in stacks] == [f"stack_{i}" for i in range(len(stacks))]
  # Unrolled, the stacks are the pattern again.
  assert "".join("".join(s.block) * s.repeats for s in stacks) == pattern
  assert [s.first for s in stacks] == np.cumsum([0] + [len(s.block) * s.repeats for s in stacks])[:-1].tolist()
  return [(len(s.block), s.repeats) for s in stacks]


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
    ("aabaab", [(3, 2)]),  # not aa, b, aa, b: the longer cover wins
    ("aaaa", [(1, 4)]),  # of equal covers the shortest block
    ("abcabcab", [(3, 2), (1, 1), (1, 1)]),
  ],
)
def test_stacks(pattern, expected):
  assert shape(pattern) == expected


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
    with pytest.raises(ValueError, match=f"layer {outside} of a model with layers 0 to {len(decoder.layers) - 1}"):
      decoder.locate(outside)


def context(capture=()):
  return Context(jnp.broadcast_to(jnp.arange(4), (1, 4)), Tokens(jnp.ones((1, 4), jnp.int32)), capture=frozenset(capture))


def test_an_owner_writes_its_slot_and_a_sharer_reads_it(tiny_decoder, random_params):
  layers = tiny_decoder("gemma4-e2b").layers
  owner, sharer = layers[2], layers[4]
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 20)), jnp.float32)
  inputs = jnp.ones((1, 4, 7))
  other = jnp.full((1, 4, 1, 8), 7.0)
  carry = {"x": x, "kv": {"sliding": (jnp.zeros((1, 4, 1, 6)),) * 2, "global": (other, other)}}
  after, _ = jax.jit(owner)(random_params(owner.params()), carry, context(), inputs)
  assert (after["kv"]["sliding"][0] != 0).all()
  assert (after["kv"]["global"][0] == other).all()
  p = random_params(sharer.params())
  run = jax.jit(sharer)
  handed, _ = run(p, after, context(), inputs)
  assert (handed["kv"]["sliding"][0] == after["kv"]["sliding"][0]).all()
  different, _ = run(p, after | {"kv": after["kv"] | {"sliding": (other[..., :6], other[..., :6])}}, context(), inputs)
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

  moe = {"rescued", "moe_load", "load_balance_loss"}
  router = {"router.scores", "router.topk_weights", "router.topk_idx"}
  assert names("gemma3", ()) == {"rescued"}
  assert names("gemma4-moe", ()) == moe
  assert names("deepseek3.2", ()) == moe | {"indexer_loss"}
  everything = ("hidden", "router", "indexer", "ple")
  assert names("deepseek3.2", everything) == moe | router | {"indexer_loss", "indexer.topk_idx", "hidden"}
  assert names("deepseek3", everything) == moe | router | {"hidden"}


def test_a_deepseek_layer_has_either_an_mlp_or_experts(tiny_decoder):
  dense, sparse = tiny_decoder("deepseek3").layers[0].cfg, tiny_decoder("deepseek3").layers[1].cfg
  assert (dense.moe, sparse.mlp) == (None, None)
  with pytest.raises(ValueError, match="either an MLP or experts"):
    DeepSeekLayerConfig(attention=dense.attention)
  with pytest.raises(ValueError, match="either an MLP or experts"):
    dataclasses.replace(dense, moe=sparse.moe)


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
  """Through embedding and every layer, scanned or not; the final norm goes back to the dtype of activations."""
  decoder = tiny_decoder(family, precision=precision)
  p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), decoder.params())
  batch = {"tokens": jax.ShapeDtypeStruct((2, 5), "int32")}
  x, aux = jax.eval_shape(lambda p, b: decoder.hidden(p, b, frozenset({"hidden"})), p, batch)
  assert x.dtype == precision["dtype"]
  stream = {name: a.dtype.name for name, a in aux.items() if name.startswith("hidden.") and name != "hidden.final_norm"}
  assert len(stream) == 1 + len(decoder.layers)
  assert set(stream.values()) == {expected}
