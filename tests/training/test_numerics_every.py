"""numerics_every: per-layer statistics of the compiled step against captured hidden states and the step's own gradients."""

import json
import sys

import jax
import numpy as np
import pytest

from maxtext_like.analysis.failed_step import FailedStep
from maxtext_like.config.load import load_config
from maxtext_like.training.run.run import train
from maxtext_like.training.step.program import make_program
from maxtext_like.training.step.train_step import UNKNOWN
from tests.tiers import nightly
from tests.training.small import SMALL, batches, small_config

SIZES = ("per_device_batch_size=4", "vocab_size=300", "numerics_every=1")
FEW = {
  "gemma3-tiny": ("num_decoder_layers=3", "inhomogeneous_layer_cycle_interval=1"),
  "deepseek3-tiny": ("num_decoder_layers=3",),
}


def run(model: str, *words: str, spoil=lambda params: params):
  program = make_program(small_config(model, *SIZES, *FEW[model], *words))
  state = program.lower_init().compile()(np.uint32(1))
  state["params"] = spoil(state["params"])
  params = jax.tree.map(np.asarray, state["params"])
  batch = batches(program.global_batch)[0]
  _, metrics = program.lower_step(checked=True).compile({"xla_backend_optimization_level": 0})(
    state, program.place(batch), UNKNOWN
  )
  return program, params, batch, jax.device_get(metrics)


@pytest.fixture(scope="module")
def gemma():
  return run("gemma3-tiny")


@pytest.mark.parametrize("model", ["gemma3-tiny", nightly("deepseek3-tiny")])
@pytest.mark.slow
def test_values_and_gradients_are_those_of_each_layer(model, gemma):
  program, params, batch, metrics = gemma if model == "gemma3-tiny" else run(model)
  layers = len(program.model.decoder.layers)
  inputs = {k: batch[k] for k in ("tokens", "positions", "segments")}
  _, aux = jax.jit(lambda p: program.model.decoder.hidden(p, inputs, frozenset({"hidden"})))(params)
  expected = [np.abs(np.asarray(aux[f"hidden.layer{i:02d}"], np.float32)).max() for i in range(layers)]
  np.testing.assert_allclose(metrics["numerics/forward/residual/max"], expected, rtol=1e-5)
  assert {name.split("/")[1] + "/" + name.split("/")[2] for name in metrics if name.startswith("numerics/")} == {
    *(f"{side}/{name}" for side in ("forward", "backward") for name in ("attention", "mlp", "residual")),
    "gradients/parameters",
  }
  for name, value in metrics.items():
    if name.startswith("numerics/"):
      assert value.shape == (layers,), name
      assert np.all(value == 0) if name.endswith("nonfinite") else np.all(value > 0), name


@pytest.mark.slow
def test_the_numbers_of_the_step_are_those_without(gemma):
  metrics = gemma[3]
  _, _, _, plain = run("gemma3-tiny", "numerics_every=0")
  assert not [name for name in plain if name.startswith("numerics/")]
  for name in ("loss", "grad_norm", "param_norm"):
    np.testing.assert_allclose(metrics[name], plain[name], rtol=1e-5)


@pytest.mark.slow
def test_parts_of_a_batch_give_what_the_whole_gives(gemma):
  metrics = gemma[3]
  _, _, _, parts = run("gemma3-tiny", "per_device_batch_size=2", "gradient_accumulation_steps=2")
  for name, value in metrics.items():
    if name.startswith("numerics/"):
      np.testing.assert_allclose(parts[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_spoilt_layer_is_seen_from_there_on():
  def spoil(params):
    down = params["stack_0"]["layer_0"]["mlp"]["down"]
    params["stack_0"]["layer_0"]["mlp"]["down"] = down.at[1, 0, 0].set(np.inf)
    return params

  _, _, _, metrics = run("gemma3-tiny", "scan_layers=false", "module_api=linen", spoil=spoil)
  bad = metrics["numerics/forward/mlp/nonfinite"] > 0
  assert np.flatnonzero(bad)[0] == 1
  assert np.isfinite(metrics["numerics/forward/mlp/max"]).all()
  assert metrics["numerics/forward/residual/nonfinite"][0] == 0
  assert metrics["numerics/gradients/parameters/nonfinite"].sum() > 0


@pytest.mark.slow
def test_every_second_line_of_the_metrics_has_them(tmp_path):
  words = [
    *SMALL,
    *SIZES,
    *FEW["gemma3-tiny"],
    "numerics_every=2",
    "steps=3",
    "dtype=float16",
    f"output_dir={tmp_path}",
    "run_name=r",
  ]
  words += ["enable_checkpointing=false", "compilation_cache_dir=null"]
  train(load_config("gemma3-tiny", words), FailedStep, sys.stdout)
  rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
  assert [any(k.startswith("numerics/") for k in row) for row in rows] == [False, True, False]
  assert len(rows[1]["numerics/backward/residual/max"]) == len(rows[1]["numerics/gradients/parameters/max"]) > 2
  assert list((tmp_path / "r" / "tensorboard").iterdir())
