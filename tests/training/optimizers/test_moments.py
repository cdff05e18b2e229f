"""Update rules with moments in fewer bits, against updates computed in NumPy."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.layers.param import Param, path_keys
from maxtext_like.training.optimizers import moments
from maxtext_like.training.optimizers.dynamic8 import Blocks, decode, encode, in_blocks, layout
from maxtext_like.training.optimizers.optimizer import make_optimizer
from tests.tiers import slow
from tests.training.optimizers.test_dynamic8 import table, written
from tests.training.toy import toy_config

SPEC = {
  "stack_0": {"matrix": Param((3, 48, 96), ("layers", "embed", "mlp")), "norm": Param((3, 48), ("layers", "embed"))},
  "table": Param((160, 32), ("vocab", "embed")),
  "frozen": None,
}
STEPS = 3


def draw(seed: int) -> Any:
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), SPEC)


def advanced(*words: str) -> tuple[list[Any], Any]:
  """Return the directions of ``STEPS`` updates, and the last state."""
  optimizer = make_optimizer(toy_config(*words).training, SPEC, "float32")
  params, found = draw(0), []
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for step in range(STEPS):
    direction, state = update(draw(step + 1), state, params)
    found.append(direction)
  return found, state


def at(keys: tuple[str, ...], tree: Any) -> Any:
  return functools.reduce(operator.getitem, keys, tree)


def stored_and_back(x: np.ndarray, p: Param, signed: bool) -> np.ndarray:
  """Return a moment after encoding and decoding, by a search of the table."""
  where = layout(p)
  if where is None:
    return x
  blocks = np.moveaxis(x, where.axis, -1)
  shape, blocks = blocks.shape, blocks.reshape(-1, where.size)
  back = table(signed)[written(blocks, signed)] * np.abs(blocks).max(-1, keepdims=True)
  return np.moveaxis(back.reshape(shape), -1, where.axis)


def test_adamw_is_what_it_is_with_moments_that_come_back_from_a_table():
  words = ("opt_type=adamw", "adam_b1=0.8", "adam_b2=0.9", "mu_dtype=dynamic8", "nu_dtype=dynamic8")
  found, state = advanced(*words)
  assert state[0].count == STEPS
  for path, p in jax.tree_util.tree_leaves_with_path(SPEC):
    get = functools.partial(at, path_keys(path))
    m = v = np.zeros(p.shape)
    for step in range(STEPS):
      g = get(draw(step + 1)).astype(np.float64)
      m, v, t = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2, step + 1
      direction = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
      # The update uses the moments before they are encoded. A number halfway between two codes may get either code.
      close = np.isclose(get(found[step]), direction, rtol=2e-4, atol=1e-5)
      assert np.mean(close) > (0.9995 if layout(p) else 0.99999), (path, step)
      m, v = stored_and_back(m, p, True), stored_and_back(v, p, False)
    kept = get(state[0].mu)
    assert isinstance(kept, Blocks) == (layout(p) is not None)
    assert kept.shape == p.shape if layout(p) is None else kept.codes.shape == p.shape and kept.codes.dtype == jnp.uint8


@pytest.mark.parametrize("words", [("opt_type=lion",), ("opt_type=sgd", "sgd_momentum=0.9")])
def test_other_rules_have_a_first_moment_of_8_bits(words):
  (*_, plain), _ = advanced(*words, "mu_dtype=float32")
  (*_, found), state = advanced(*words, "mu_dtype=dynamic8")
  kept = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Blocks)) if isinstance(x, Blocks)]
  assert len(kept) == 2
  a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (found, plain))
  assert np.linalg.norm(a - b) < (0.25 if words[0] == "opt_type=lion" else 0.02) * np.linalg.norm(b)  # a sign may flip


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
def test_moments_begin_as_zeros_are_stored(rule):
  words = (f"opt_type={rule}", "sgd_momentum=0.9", "mu_dtype=dynamic8", *(["nu_dtype=dynamic8"] if rule == "adamw" else []))
  config = toy_config(*words)
  optimizer = make_optimizer(config.training, SPEC, "float32")
  in_float32 = make_optimizer(toy_config(*words[:2], "mu_dtype=float32").training, SPEC, "float32")
  params = draw(0)
  begun, plain = optimizer.init(params), in_float32.init(params)
  kept, zeros = (jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Blocks)) for tree in (begun, plain))
  of = {x.shape: p for x, p in zip(jax.tree.leaves(params), jax.tree.leaves(SPEC), strict=True)}
  encoded = 0
  for now, zero in zip(kept, zeros, strict=True):
    assert not np.any(zero)
    if isinstance(now, Blocks):
      where = layout(of[zero.shape])
      assert where is not None
      signed = bool(now.codes.ravel()[0] == 127)
      expected = encode(in_blocks(zero, where), where, signed=signed)
      jax.tree.map(np.testing.assert_array_equal, now, expected)
      assert not np.any(decode(now, where, signed=signed))
      encoded += 1
  assert encoded == (4 if rule == "adamw" else 2)


def test_a_second_moment_in_bfloat16():
  (*_, plain), _ = advanced("opt_type=adamw")
  (*_, found), state = advanced("opt_type=adamw", "nu_dtype=bfloat16", "mu_dtype=bfloat16")
  assert {x.dtype.name for x in jax.tree.leaves((state[0].mu, state[0].nu))} == {"bfloat16"}
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2), found, plain)


@pytest.mark.parametrize("piece", [slow(1000), 700])
def test_pieces_are_updated_as_the_whole_is(monkeypatch, piece):
  words = ("opt_type=adamw", "mu_dtype=dynamic8", "nu_dtype=dynamic8", "adam_weight_decay=0.1")
  whole = advanced(*words)
  monkeypatch.setattr(moments, "PIECE", piece)
  optimizer = make_optimizer(toy_config(*words).training, SPEC, "float32")
  params = draw(0)
  text = str(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))
  assert text.count("scan[") == 3  # over layers, over pieces of a layer, and over pieces of the table
  pieces = advanced(*words)
  assert jax.tree.structure(pieces) == jax.tree.structure(whole)
  for a, b in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
    if a.dtype == jnp.uint8:
      assert np.mean(a == b) > 0.999
    else:
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@given(st.integers(1, 5000), st.integers(1, 700), st.booleans(), st.integers(1, 5000))
def test_pieces_are_few_and_have_whole_blocks(lead, columns, vocabulary, piece):
  """For any vocabulary size, also a prime one, there are at most four times as many pieces as necessary, and no piece splits a
  block."""
  p = Param((lead, columns), ("vocab" if vocabulary else None, None))
  x: Any = jax.ShapeDtypeStruct(p.shape, jnp.float32)
  where = layout(p)
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(moments, "PIECE", piece)
    rows = moments.piece_rows(p, x)
  block = where.size if where and where.axis == -2 else 1
  assert 1 <= rows <= lead
  assert rows % block == 0
  assert lead % block == 0
  assert rows == lead if lead * columns <= piece else rows * columns <= piece + block * columns
  assert -(-lead // rows) <= max(4 * -(-lead * columns // piece), 1)


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("opt_type=lion", "nu_dtype=dynamic8"), ("nu_dtype = dynamic8", "opt_type=lion")),
    (("opt_type=adafactor", "mu_dtype=dynamic8"), ("mu_dtype = dynamic8", "opt_type=adafactor")),
    (("opt_type=adafactor", "mu_dtype=bfloat16"), ("mu_dtype = bfloat16", "opt_type=adafactor")),
    (("opt_type=sgd", "sgd_momentum=0", "mu_dtype=dynamic8"), ("mu_dtype = dynamic8", "fix: remove mu_dtype")),
  ],
)
def test_a_moment_that_a_rule_has_not_got_is_refused(words, said):
  with pytest.raises(UserError) as error:
    make_optimizer(toy_config(*words).training, SPEC, "float32")
  assert all(part in str(error.value) for part in said)


def test_a_second_moment_that_could_not_fall_is_refused():
  with pytest.raises(UserError, match=r"nu_dtype = bfloat16 .*adam_b2 = 0\.999"):
    load_config("gemma4-tiny", ["nu_dtype=bfloat16", "adam_b2=0.999"])
  load_config("gemma4-tiny", ["nu_dtype=bfloat16", "adam_b2=0.99"])
  load_config("gemma4-tiny", ["nu_dtype=dynamic8", "adam_b2=0.999"])
