"""Tables that are updated piece by piece, against the same update in one piece."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.training.optimizers import moments
from maxtext_like.training.optimizers.by_layer import ByLayer, take
from maxtext_like.training.step.in_backward.part_update import PartUpdate, Updated
from maxtext_like.training.step.program import make_program
from tests.tiers import slow

WORDS = (
  "num_decoder_layers=1", "weight_dtype=bfloat16", "optimizer_in_backward=true", "remat_policy=full",
  "mu_dtype=dynamic8", "nu_dtype=dynamic8", "adam_weight_decay=0.1", "stochastic_rounding=true", "update_survival_every=1",
)  # fmt: skip
PIECE = 3000
"""Numbers in a piece. Each of the two tables has several pieces, and the norm has fewer numbers than a piece."""


@pytest.fixture(scope="module", params=[304, slow(307)], ids=["alike", "the last shorter"])
def program(request):
  words = [*WORDS, "logits_via_embedding=false", f"vocab_size={request.param}"]
  return make_program(load_config("qwen3-tiny", words).config)


def arguments(program, broken=None) -> tuple[Any, Any, Any]:
  """Return gradients, the optimizer state after two steps, and parameters, for the parameters outside the stacks. The first
  moment of the table ``broken`` is infinite in its last piece."""
  rng = np.random.default_rng(0)
  shapes = jax.tree.leaves(take(program.abstract_state["params"], ()))
  structure = jax.tree.structure(take(program.abstract_state["params"], ()))
  draw = lambda dtype: structure.unflatten([jnp.asarray(rng.normal(size=x.shape), dtype) for x in shapes])
  assert isinstance(program.step.optimizer, ByLayer)
  optimizer = program.step.optimizer.parts[()]
  params = draw(jnp.bfloat16)
  state = optimizer.init(params)
  for _ in range(2):
    _, state = optimizer.update(draw(jnp.float32), state, params)
  if broken:
    blocks = state[0].mu[broken]["table"]
    state[0].mu[broken]["table"] = blocks._replace(scale=blocks.scale.at[-1, -1].set(jnp.inf))
  return draw(jnp.bfloat16), state, params


def updated(program, arrays, *, checked: bool, allowed: bool = True) -> Updated:
  grads, state, params = arrays
  step = dataclasses.replace(program.step, checked=checked)

  def run(grads, state, params, allowed, number, rate):
    whole = PartUpdate(
      step, step.optimizer.parts[()], number, rate, None,
      clipped=lambda grads: jax.tree.map(lambda g: g.astype(jnp.float32) * 0.5, grads), masked=lambda direction: direction,
    )  # fmt: skip
    return whole(grads, state, params, allowed)

  return jax.device_get(jax.jit(run)(grads, state, params, jnp.asarray(allowed), jnp.int32(3), jnp.float32(1e-2)))


def in_pieces(monkeypatch, *given, **how) -> Updated:
  with monkeypatch.context() as patched:
    patched.setattr(moments, "PIECE", PIECE)
    return updated(*given, **how)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.slow
def test_pieces_give_the_bits_of_the_whole(program, monkeypatch, checked):
  """All bits are equal, except for sums over an array, and for codes or last bits of a few numbers. These depend on how XLA
  fuses multiplications and additions."""
  arrays = arguments(program)
  whole, pieces = updated(program, arrays, checked=checked), in_pieces(monkeypatch, program, arrays, checked=checked)
  assert jax.tree.structure(pieces) == jax.tree.structure(whole)
  assert pieces.allowed
  assert pieces.state[0].count == whole.state[0].count == 3
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(pieces), jax.tree.leaves(whole), strict=True):
    name = jax.tree_util.keystr(path)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), name
    if np.ndim(a) and a.size > 64:
      assert np.mean(a == b) > 0.999, name
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-2, atol=1, err_msg=name)
  for name, leaf in (("embedding", "table"), ("head", "kernel")):
    moved = np.asarray(pieces.params[name][leaf]) != np.asarray(arrays[2][name][leaf])
    assert moved.mean() > 0.5
  assert (pieces.finite is not None) == (pieces.peaks is not None) == checked
  sums = [float(x) for x in jax.tree.leaves(whole.survival)]
  np.testing.assert_allclose([float(x) for x in jax.tree.leaves(pieces.survival)], sums, rtol=1e-4)


@pytest.mark.parametrize("checked", [False, True])
def test_nothing_is_written_that_may_not_be(program, monkeypatch, checked):
  arrays = arguments(program)
  found = in_pieces(monkeypatch, program, arrays, checked=checked, allowed=False)
  assert not found.allowed
  jax.tree.map(np.testing.assert_array_equal, (found.params, found.state), (arrays[2], arrays[1]))


def test_what_is_not_finite_is_seen_before_anything_is_written(program, monkeypatch):
  """The infinite moment is in the last piece of one table, and all other pieces are finite. Still no piece is written."""
  arrays = arguments(program, broken="embedding")
  found = in_pieces(monkeypatch, program, arrays, checked=True)
  assert not found.allowed
  jax.tree.map(np.testing.assert_array_equal, (found.params, found.state), (arrays[2], arrays[1]))
  assert np.isinf(found.peaks[0].mu["embedding"]["table"].scale)
  assert np.isfinite(found.peaks[0].nu["embedding"]["table"].scale)
  assert not found.finite["embedding"]["table"]
  assert found.finite["head"]["kernel"]


def test_each_table_is_a_loop_that_writes_where_it_lies(program, monkeypatch):
  grads, state, params = arguments(program)
  step = dataclasses.replace(program.step, checked=False)
  whole = PartUpdate(step, step.optimizer.parts[()], jnp.int32(0), jnp.float32(1), None, lambda x: x, lambda x: x)
  monkeypatch.setattr(moments, "PIECE", PIECE)
  text = str(jax.make_jaxpr(whole.__call__)(grads, state, params, jnp.ones((), bool)))
  assert text.count(" dynamic_update_slice ") >= 10  # each of two tables, and codes and scales of its two moments
  rows, columns = params["embedding"]["table"].shape
  assert f"f32[{rows},{columns}]" not in text
