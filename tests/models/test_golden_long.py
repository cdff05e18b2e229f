"""Tests golden rows that are longer than one tile of attention: windows that end near borders of blocks and tiles, padding on
both sides, and packed documents.

The cases are in tests/golden/long. tests/parity/long_goldens.py makes them.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxtext_like.api.forward import evaluator, open_weights
from maxtext_like.checkpoint.huggingface.inputs import make_batch
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.layers.kernels.attention.blockwise import TILE
from maxtext_like.targets import IGNORED
from tests.models.test_golden import GRADIENT_TOLERANCE, QUICK, TOLERANCE

GOLDEN = Path(__file__).parents[1] / "golden" / "long"
CASES = {path.parent.name: json.loads(path.read_text())["runs"] for path in sorted(GOLDEN.glob("*/meta.json"))}
QUICK_RUNS = {
  "gemma4_shared": ("packed",),
}  # the other runs are slow


def runs() -> list:
  """Return every run of every case."""
  return [
    pytest.param(case, run, marks=[] if run in QUICK_RUNS.get(case, ()) else [pytest.mark.slow], id=f"{case}, {run}")
    for case, about in CASES.items()
    for run in about
  ]


def arrays_of(inputs: dict[str, np.ndarray], rows: str) -> dict[str, np.ndarray]:
  """Return the inputs of a run. Labels without a meaningful prediction are masked."""
  labels = inputs["labels"].copy()
  arrays = {"input_ids": inputs["input_ids"], "labels": labels}
  if rows in ("left", "right"):
    mask = arrays["attention_mask"] = inputs[f"{rows}_attention_mask"]
    labels[mask == 0] = IGNORED
    labels[:, 1:][mask[:, :-1] == 0] = IGNORED
  if rows == "packed":
    positions = arrays["position_ids"] = inputs["packed_position_ids"]
    labels[:, 1:][np.diff(positions, axis=1) != 1] = IGNORED
  return arrays


@functools.cache
def compiled(case: str, window: int | None, length: int) -> tuple[Callable, dict, int]:
  """Compile the model with a window.

  The program computes gradients if any run with this window has them, so that all runs share it.

  Returns:
    A function of parameters and a batch, the parameters, and the size of the vocabulary.
  """
  directory = GOLDEN / case / "checkpoint"
  words = [] if window is None else [f"sliding_window_size={window}"]
  config, loaded = load_checkpoint_config(directory, ["dtype=float32", *words], length=length)
  weights = open_weights(directory, config, loaded)
  gradients = any(about["gradients"] for about in CASES[case].values() if about["window"] == window)
  evaluate = evaluator(weights, loaded.config, gradients=gradients, compiler_options=QUICK)
  return evaluate, weights.load(), loaded.config.model.vocab_size


@pytest.mark.parametrize(("case", "run"), runs())
def test_rows_of_several_blocks(case: str, run: str):
  about = CASES[case][run]
  with np.load(GOLDEN / case / "inputs.npz") as file:
    inputs = dict(file)
  with np.load(GOLDEN / case / "outputs.npz") as file:
    expected = {key.removeprefix(f"fp32.{run}."): file[key] for key in file if key.startswith(f"fp32.{run}.")}
  length = inputs["input_ids"].shape[1]
  assert length > 2 * TILE
  evaluate, params, vocab_size = compiled(case, about["window"], length)
  arrays = arrays_of(inputs, about["rows"])
  got = evaluate(params, make_batch(arrays, run, vocab_size=vocab_size).batch)
  seen = arrays.get("attention_mask", np.ones((1, length)))[0] == 1
  kept, places = seen[inputs["positions"]], inputs["positions"]
  assert kept.sum() >= 10
  np.testing.assert_allclose(got["logits"][0, places][kept], expected["logits"][kept], rtol=0, atol=TOLERANCE)
  probe = got["hidden.final_norm"][0] @ inputs["probe"]
  np.testing.assert_allclose(probe[seen], expected["probe"][seen], rtol=0, atol=TOLERANCE)
  np.testing.assert_allclose(got["loss"], expected["loss"], rtol=0, atol=1e-5)
  gradients = [name for name in expected if name.startswith("grad.")]
  assert bool(gradients) == about["gradients"]
  for name in gradients:
    want = expected[name]
    np.testing.assert_allclose(got[name], want, rtol=0, atol=GRADIENT_TOLERANCE * np.abs(want).max(), err_msg=name)


def test_every_kind_of_row_is_there():
  for case, about in CASES.items():
    assert {"left", "right", "packed"} <= set(about), case
    assert any(run["gradients"] for run in about.values()), case
  assert {run["window"] for run in CASES["gemma3"].values()} >= {TILE - 1, TILE, TILE + 1, 127, 128, 129}
