"""Each layer's share of the squared gradient norm (``clip: running``), and runs that resume with the stored shares."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.training.step.in_backward.gradient_shares import GradientShares
from maxtext_like.training.step.in_backward.step import StepInBackward
from maxtext_like.training.step.program import make_program

WORDS = ["gemma4-tiny", "max_target_length=16", "per_device_batch_size=2", "num_decoder_layers=2", "emb_dim=32", "mlp_dim=48"]
WORDS += ["inhomogeneous_layer_cycle_interval=1"]
WORDS += ["lr_schedule_type=constant", "warmup_steps_fraction=0", "dataset_documents_max=40", "remat_policy=full"]
WORDS += ["optimizer_in_backward=true", "gradient_clipping_threshold=0.3", "checkpoint_period=2"]


def train(place: Path, name: str, *words: str) -> list[float]:
  """Train, and return all losses of the run so far."""
  assert main(["train", *WORDS, f"output_dir={place}", f"run_name={name}", f"compilation_cache_dir={place}/cache", *words]) == 0
  return [json.loads(line)["loss"] for line in (place / name / "metrics.jsonl").read_text().splitlines()]


def shares_of(*words: str) -> GradientShares:
  program = make_program(
    load_config("gemma4-tiny", ["optimizer_in_backward=true", "clip=running", "remat_policy=full", *words]).config
  )
  assert isinstance(program.step, StepInBackward)
  assert program.step.shares is not None
  return program.step.shares


def test_layers_of_all_stacks_have_a_place_and_what_is_trained_a_share():
  shares = shares_of("trainable_parameters_mask=['layers.1', 'final_norm']")
  layers = len(shares.first) - 1
  assert sorted(i for place in shares.places.values() for i in place) == [*range(layers + 1)]
  np.testing.assert_array_equal(shares.places[()], [layers])
  first = np.zeros(layers + 1)
  first[[1, layers]] = 0.5
  np.testing.assert_array_equal(shares.first, first)


@pytest.mark.parametrize(
  ("large", "applied", "after"),
  [(0.0, True, [0.25, 0.5, 0.25]), (0.0, False, [0.4, 0.4, 0.2]), (1.0, True, [0.4, 0.4, 0.2])],
)
def test_what_is_remembered_next(large, applied, after):
  shares = GradientShares({("stack_0", "layer_0"): np.array([1, 0]), (): np.array([2])}, np.full(3, 1 / 3, np.float32))
  small = {"stack_0": {"layer_0": {"a": jnp.array([5.0, 0.5]), "b": jnp.array([1.0, 0.5])}}, "norm": jnp.float32(3)}
  beyond = {"stack_0": {"layer_0": {"a": jnp.zeros(2), "b": jnp.array([0.0, large])}}, "norm": jnp.zeros(())}
  found = shares.updated(jnp.array([0.4, 0.4, 0.2]), (small, beyond), jnp.asarray(applied))
  np.testing.assert_allclose(found, after, rtol=1e-6)


@pytest.mark.parametrize("empty", [np.nan, np.inf, 0.0])
def test_gradients_that_tell_nothing_change_nothing(empty):
  shares = GradientShares({(): np.array([0])}, np.ones(1, np.float32))
  np.testing.assert_array_equal(
    shares.updated(jnp.ones(1), ({"a": jnp.float32(empty)}, {"a": jnp.zeros(())}), jnp.asarray(True)), [1]
  )


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_from_steps_without_them(tmp_path):
  """A resumed run has the losses of a run without a stop. A run can also resume after steps with another ``clip``, whose
  checkpoint has no shares."""
  unbroken = train(tmp_path, "run", "clip=running", "steps=4")
  shutil.rmtree(tmp_path / "run/checkpoints/4")
  assert train(tmp_path, "run", "clip=running", "steps=4")[-2:] == unbroken[-2:]
  for steps, clip in ((6, "exact"), (8, "running")):
    assert len(train(tmp_path, "run", f"clip={clip}", f"steps={steps}")) == steps
