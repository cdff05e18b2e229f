"""Stored moments in whole steps: skipped updates, memory, meshes and checkpoints."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.capacity import memory
from maxtext_like.config.load import load_config
from maxtext_like.layers.param import abstract
from maxtext_like.models.row_norms import state_labels
from maxtext_like.training.optimizers import dynamic8
from maxtext_like.training.optimizers.dynamic8 import Blocks, layout
from maxtext_like.training.step.program import make_program
from maxtext_like.training.step.train_step import UNKNOWN
from tests.tiers import nightly, slow
from tests.training import test_parallelism
from tests.training.step.in_backward.test_step import assert_bits
from tests.training.step.test_train_step import step_params
from tests.training.toy import toy_batch, toy_config, toy_decoder, toy_step

EIGHT = ("opt_type=adamw", "mu_dtype=dynamic8", "nu_dtype=dynamic8")


@pytest.fixture
def toy(monkeypatch):
  """(toy step, state after one step, its magnitude bounds). Small arrays have 8-bit codes too."""
  monkeypatch.setattr(dynamic8, "SMALLEST", 20)
  step, state = toy_step(toy_config(*EIGHT, "adam_weight_decay=0.1"))
  state, metrics = step(state, toy_batch(1), UNKNOWN)
  assert isinstance(state["opt_state"][0].mu["stack_0"]["layer_0"]["kernel"], Blocks)
  return step, state, metrics["magnitude_bound"]


def test_an_update_that_is_not_finite_leaves_codes_and_scales_as_they_were(toy):
  step, state, known = toy
  table = np.array(state["params"]["embedding"]["table"])
  table[0] = np.inf
  state["params"]["embedding"]["table"] = jnp.asarray(table)
  for told in (known, UNKNOWN):
    new, metrics = step(state, toy_batch(), told)
    assert bool(metrics["skipped"])
    assert_bits(jax.device_get(new["opt_state"]), jax.device_get(state["opt_state"]))


def test_a_moment_that_is_not_finite_is_named_by_its_layer(toy):
  step, state, _ = toy
  kernel = state["opt_state"][0].nu["stack_0"]["layer_0"]["kernel"]
  state["opt_state"][0].nu["stack_0"]["layer_0"]["kernel"] = kernel._replace(scale=kernel.scale.at[2, 0, 0].set(np.inf))
  new, metrics = step(state, toy_batch(), UNKNOWN)
  assert bool(metrics["skipped"])
  assert_bits(jax.device_get(new["opt_state"]), jax.device_get(state["opt_state"]))
  labels = state_labels(toy_decoder(), state["opt_state"], step_params(state))
  bad = [x for x, good in zip(labels, metrics["finite"]["state_optimizer"], strict=True) if not good]
  assert bad == ["nu.layers.2.kernel"]


def test_what_is_known_of_moments_is_no_less_than_the_largest_of_them(toy):
  step, state, known = toy
  for seed in range(4):
    state, metrics = step(state, toy_batch(seed), known)
    known = metrics["magnitude_bound"]
    assert bool(metrics["decided"])
    scales = [x for x in jax.tree.leaves(state["opt_state"]) if x.dtype == jnp.float32]
    assert 0 < max(float(x.max()) for x in scales) <= float(known[1])


def test_memory_is_told_as_it_is():
  """The memory estimate counts one byte per number and four bytes per block."""
  words = ["vocab_size=304", "max_target_length=16", "num_decoder_layers=3", *EIGHT]
  program = make_program(load_config("qwen3-tiny", words).config)
  state = program.abstract_state["opt_state"]
  expected = 4  # Adam's step count
  for p in jax.tree.leaves(program.spec):
    where = layout(p)
    expected += 2 * math.prod(p.shape) * (4 if where is None else 1)
    expected += 0 if where is None else 2 * 4 * math.prod(p.shape) // where.size
  assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) == expected
  counted = 4 + expected  # and the step index
  assert memory.estimate(program).optimizer == counted
  plain = make_program(load_config("qwen3-tiny", [*words, "mu_dtype=float32", "nu_dtype=float32"]).config)
  assert memory.estimate(plain).optimizer == 8 + 8 * sum(x.size for x in jax.tree.leaves(abstract(plain.spec)))


@pytest.mark.parametrize(("kind", "rtol"), [slow("eight-bits", 1e-5), nightly("low-rank", 2e-4)])
def test_meshes_give_the_losses_of_one_device_and_take_its_checkpoint(tmp_path, kind, rtol):
  """Checkpoints of one device are restored on the mesh. The low-rank moment has a larger tolerance: its products are in
  bfloat16 and summed in another order. test_optimizers.py checks how factored moments are sharded."""
  found = test_parallelism.run("tests.training.moments_on_meshes", str(tmp_path), kind, "data-fsdp-tensor")
  one = found.pop("one")
  for name, mesh in found.items():
    np.testing.assert_allclose(mesh["losses"], one["losses"], rtol=rtol, err_msg=name)
    assert mesh["kept"], name
    assert mesh["alike"], name
