"""update_survival against sums computed in float64, in the ordinary step and layer by layer."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from maxtext_like.analysis.failed_step import FailedStep
from maxtext_like.config.load import load_config
from maxtext_like.models.row_norms import row_labels
from maxtext_like.training.run.run import train
from maxtext_like.training.step.train_step import UNKNOWN
from maxtext_like.training.step.update_retention import NAME, metrics, warning
from tests.tiers import slow, tiers
from tests.training.small import SMALL
from tests.training.step.in_backward.test_step import THREE, UNCLIPPED, compiled, descend
from tests.training.toy import toy_batch, toy_config, toy_decoder, toy_step

SGD = ("opt_type=sgd", "sgd_momentum=0", "adam_weight_decay=0")


def shares(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Return the metrics of a toy step, and the same metrics computed in float64 from the parameters before and after it."""
  config = toy_config(*SGD, *words)
  step, state = toy_step(config, decoder=toy_decoder())
  dtype = config.precision.weight_dtype
  state["params"] = jax.tree.map(lambda x: x.astype(dtype), state["params"])
  step = dataclasses.replace(step, survival=True)
  new, found = jax.jit(step)(state, toy_batch(), UNKNOWN)
  trained, frozen = step.selection.split(state["params"])
  grads, _ = step.gradients(trained, frozen, step.keyed(toy_batch(), state["step"]), None)
  rate, sums = np.float32(config.training.learning_rate), {"arrived": [], "intended": []}
  wide = lambda x: np.asarray(x, np.float64)
  for (path, g), before, after in zip(
    jax.tree_util.tree_leaves_with_path(grads), *(jax.tree.leaves(step.selection.split(s["params"])[0]) for s in (state, new)),
    strict=True,
  ):  # fmt: skip
    stacked = "stack_0" in jax.tree_util.keystr(path)
    over = tuple(range(1, g.ndim)) if stacked else None
    intended = -rate * wide(g)
    sums["arrived"] += list(np.atleast_1d(np.sum((wide(after) - wide(before)) * intended, axis=over)))
    sums["intended"] += list(np.atleast_1d(np.sum(intended**2, axis=over)))
  labels = row_labels(toy_decoder(), trained)
  np.testing.assert_allclose(metrics(sums, labels)[NAME], sum(sums["arrived"]) / sum(sums["intended"]), rtol=1e-12)
  return metrics(found[NAME], labels), metrics(sums, labels)


@pytest.mark.parametrize(
  "words", [slow(("learning_rate=0.01",)), ("weight_dtype=bfloat16", "learning_rate=0.01", "grad_dtype=float32")]
)
def test_shares_are_those_of_the_parameters_before_and_after(words):
  found, expected = shares(*words)
  assert found.keys() == expected.keys() == {NAME, *(f"{NAME}/{part}" for part in ("lowest", "layers", "embedding", "head"))}
  assert len(found[f"{NAME}/layers"]) == 3
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
  if len(words) == 1:
    np.testing.assert_allclose(found[NAME], 1, atol=1e-5)
  else:
    assert found[NAME] < 0.99


def test_what_is_not_meant_to_move_has_no_share():
  sums = {"arrived": [0, 1, 0], "intended": [0, 2, 0]}
  labels = ["embedding.table", "layers.1.mlp.down", "layers.2.mlp.down"]
  assert metrics(sums, labels) == {NAME: 0.5, f"{NAME}/lowest": 0.5, f"{NAME}/layers": [None, 0.5, None]}
  assert metrics({name: np.zeros(3) for name in sums}, labels) == {}


@pytest.mark.parametrize(
  ("dtype", "stochastic", "said"),
  [
    (
      "bfloat16",
      False,
      "10.0% of the update reached the stored weights (lowest 5.0%): bfloat16 rounds the rest away. stochastic_rounding=true",
    ),
    ("bfloat16", True, "although they are rounded stochastically"),
    ("float32", False, "although they are float32"),
  ],
)
def test_a_low_share_is_told_with_the_key_that_mends_it(dtype, stochastic, said):
  config = SimpleNamespace(
    precision=SimpleNamespace(weight_dtype=dtype), training=SimpleNamespace(stochastic_rounding=stochastic)
  )
  row = {NAME: 0.1, f"{NAME}/lowest": 0.05}
  assert said in str(warning(3, row, cast(Any, config)))
  assert warning(3, row | {NAME: 0.5}, cast(Any, config)) is None


@pytest.mark.parametrize("rounding", tiers(["false", "true"], slow=["true"]))
def test_layers_in_the_backward_pass_have_the_shares_of_the_ordinary_step(rounding):
  words = (*THREE, UNCLIPPED, *SGD, "weight_dtype=bfloat16", "update_survival_every=1", "learning_rate=0.01")
  words += (f"stochastic_rounding={rounding}",)
  (_, (whole,)), (_, (layered,)) = (descend(*words, *w, steps=1) for w in ((), ("optimizer_in_backward=true",)))
  labels = compiled(*words)[0].labels
  a, b = metrics(layered[NAME], labels), metrics(whole[NAME], labels)
  assert a.keys() == b.keys()
  for name, value in b.items():
    np.testing.assert_allclose(a[name], value, rtol=1e-4, err_msg=name)
  assert (a[NAME] < 0.9) == (rounding == "false")


@pytest.mark.slow
def test_every_second_line_has_them_and_a_run_whose_weights_stand_still_is_told(tmp_path):
  words = [
    *SMALL,
    "num_decoder_layers=2",
    "inhomogeneous_layer_cycle_interval=2",
    "weight_dtype=bfloat16",
    "learning_rate=1e-6",
  ]
  words += ["update_survival_every=2", "steps=4", "enable_checkpointing=false", "compilation_cache_dir=null"]
  with (tmp_path / "log").open("w") as log:
    train(load_config("gemma3-tiny", [*words, f"output_dir={tmp_path}", "run_name=r"]), FailedStep, log)
  rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
  assert [NAME in row for row in rows] == [False, True, False, True]
  assert len(rows[1][f"{NAME}/layers"]) == 2
  assert rows[1][NAME] < 0.3
  assert (tmp_path / "log").read_text().count("stochastic_rounding=true keeps it on average") == 1
  assert "Fraction of the update" in (tmp_path / "r" / "report.html").read_text()
