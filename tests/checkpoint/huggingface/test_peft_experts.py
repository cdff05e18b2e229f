"""Adapters of experts in peft's form. tests/parity/test_peft.py compares them with peft itself."""

import numpy as np
import pytest

from maxtext_like.checkpoint.huggingface.peft_experts import Half, apart, fused, matched, scale, wrapper
from maxtext_like.checkpoint.huggingface.tensors import Tensor
from maxtext_like.errors import UserError

E, D = 3, 5
UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


def half(rng, rank: int, out: int, own: float) -> Half:
  a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((E, D, rank), (E, rank, out)))
  return Half(rank, own, out, lambda: (a, b))


def test_halves_of_other_ranks_and_scales_are_one_addition():
  rng = np.random.default_rng(0)
  halves = [half(rng, 2, 4, 1.5), half(rng, 3, 4, 0.5)]
  a, b = fused(halves)
  assert (a.shape, b.shape) == ((E * 5, D), (8, 5 * E))
  # The computation of peft's ParamWrapper.get_delta_weight.
  each_a, each_b = a.reshape(E, -1, D), b.reshape(8, -1, E)
  added = scale(halves) * np.stack([sum(np.outer(each_b[:, r, e], each_a[e, r]) for r in range(5)) for e in range(E)])
  want = [own.scale * np.einsum("eir,ero->eoi", *own.factors()) for own in halves]
  np.testing.assert_allclose(added, np.concatenate(want, axis=1), rtol=1e-5, atol=1e-6)
  read_a, read_b = apart(a, b, E)
  np.testing.assert_allclose(scale(halves) * (read_b @ read_a), added, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_a_half_without_an_addition_stays_as_it_is(first):
  rng = np.random.default_rng(1)
  halves = [half(rng, 2, 4, 2.0), half(rng, 0, 4, 1.0)]
  a, b = fused(halves if first else halves[::-1])
  assert (scale(halves), a.shape, b.shape) == (2.0, (E * 2, D), (8, 2 * E))
  assert not b[4:].any() if first else not b[:4].any()
  assert b[:4].any() if first else b[4:].any()


def test_the_array_that_is_wrapped_first_is_inside():
  assert wrapper(UP, [UP, DOWN]) == "model.layers.1.mlp.experts.base_layer"
  assert wrapper(DOWN, [UP, DOWN]) == wrapper(UP, [UP]) == wrapper(DOWN, [DOWN]) == "model.layers.1.mlp.experts"


def test_wrappers_and_target_parameters_have_to_agree():
  rule: object = None
  tensors = {name.removeprefix("model."): Tensor(name, (), rule, False) for name in (UP, DOWN)}  # pyright: ignore[reportArgumentType]
  bare = lambda name: name.removeprefix("model.")
  outer = "model.layers.1.mlp.experts"
  both = [outer, f"{outer}.base_layer", "model.layers.0.self_attn.q_proj"]
  found = matched(both, tensors, ["experts.down_proj", UP], bare, "FILE")
  assert {module: name for module, (name, _) in found.items()} == {outer: DOWN, f"{outer}.base_layer": UP}
  assert matched(both[2:], tensors, [], bare, "FILE") == {}
  for modules, targets, told in (
    (both, ["down_proj"], "names model.layers.1.mlp.experts.down_proj"),
    (both, [], "names none of its arrays"),
    ([outer], ["gate_up_proj", "down_proj"], "contains the updates model.layers.1.mlp.experts, but"),
    ([f"{outer}.base_layer"], ["gate_up_proj"], "contains the updates model.layers.1.mlp.experts.base_layer, but"),
  ):
    with pytest.raises(UserError, match=told):
      matched(modules, tensors, targets, bare, "FILE")
