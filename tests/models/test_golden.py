"""Tests every golden text case: results equal those of transformers with and without scan, with both module wrappers, in three
dtypes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_like.api.forward import evaluator, open_weights
from maxtext_like.checkpoint.huggingface.inputs import make_batch
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.layers.attention.rope import inverse_frequencies
from tests.tiers import slow, tiers

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/outputs.npz") if "vision" not in path.parent.name)
VARIANTS = {"scan, linen": ("scan_layers=true", "module_api=linen"), "loop, nnx": ("scan_layers=false", "module_api=nnx")}
QUICK = {"xla_backend_optimization_level": 0}  # most of the time of these tests is compilation
TOLERANCE = 1e-4  # absolute, for logits and hidden states in float32 (see the README of tests/golden)
GRADIENT_TOLERANCE = 1e-3  # relative to the largest entry


@dataclasses.dataclass
class Case:
  """A golden case: its inputs, the results of transformers, and a method that computes the same results with our layers."""

  name: str

  def __post_init__(self):
    with np.load(GOLDEN / self.name / "inputs.npz") as file:
      self.inputs = dict(file)
    with np.load(GOLDEN / self.name / "outputs.npz") as file:
      self.expected = dict(file)

  @property
  def runs(self) -> list[str]:
    return sorted({key.split(".")[1] for key in self.expected if key.startswith("fp32.")})

  def arrays(self, run: str) -> dict[str, np.ndarray]:
    """Return the inputs of a run. Labels are masked as the README of tests/golden says."""
    ids, labels = self.inputs["input_ids"], self.inputs["labels"].copy()
    arrays = {"input_ids": ids, "labels": labels}
    if run == "rpad":
      arrays["attention_mask"] = self.inputs["rpad_attention_mask"]
      labels[arrays["attention_mask"] == 0] = -100
    if run == "packed":
      arrays["position_ids"] = self.inputs["packed_position_ids"]
      labels[:, 1:][np.diff(self.inputs["packed_segment_ids"], axis=1) != 0] = -100
    if run == "longpos":
      arrays["position_ids"] = self.inputs["longpos_position_ids"]
    return arrays

  def compute(self, runs: list[str], *overrides: str, gradients: bool = False) -> dict[str, dict[str, np.ndarray]]:
    directory = GOLDEN / self.name / "checkpoint"
    config, loaded = load_checkpoint_config(directory, overrides, length=self.inputs["input_ids"].shape[1])
    weights = open_weights(directory, config, loaded)
    evaluate = evaluator(weights, loaded.config, gradients=gradients, compiler_options=QUICK)
    params, vocab = weights.load(), loaded.config.model.vocab_size
    return {run: evaluate(params, make_batch(self.arrays(run), run, vocab_size=vocab).batch) for run in runs}


QUICK_CASES = {  # the other cases are slow
  "scan, linen": ("gemma3_text", "deepseek32"),  # every kind of attention, and experts
  "loop, nnx": ("stress_fp16_mlp",),
}


LOOPED = ("stress_fp16_mlp", "gemma4_e2b", "deepseek32")
"""Cases that also run without scan: plain layers, shared keys and values, experts with MLA. tests/layers/test_decoder.py
compares scan and loop for every family."""


def variants() -> list[Any]:
  """Return every case with scan, and the cases in ``LOOPED`` without, as parameters of a fixture."""
  found = []
  for name in CASES:
    for variant in VARIANTS:
      if variant == "loop, nnx" and name not in LOOPED:
        continue
      marks = [] if name in QUICK_CASES[variant] else [pytest.mark.slow]
      found.append(pytest.param((name, variant), marks=marks, id=f"{name}, {variant}"))
  return found


@pytest.fixture(scope="module", params=variants())
def computed(request: pytest.FixtureRequest) -> tuple[Case, dict[str, dict[str, np.ndarray]]]:
  name, variant = request.param
  case = Case(name)
  return case, case.compute(case.runs, "dtype=float32", *VARIANTS[variant], gradients=True)


def test_logits_and_loss_of_every_run(computed: tuple[Case, dict[str, dict[str, np.ndarray]]]):
  case, outputs = computed
  assert "base" in case.runs
  for run in case.runs:
    seen = case.arrays(run).get("attention_mask", np.ones(case.inputs["input_ids"].shape)) == 1
    got, want = outputs[run], {key: case.expected[f"fp32.{run}.{key}"] for key in ("logits", "loss")}
    np.testing.assert_allclose(got["logits"][seen], want["logits"][seen], rtol=0, atol=TOLERANCE, err_msg=run)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=0, atol=1e-5, err_msg=run)


def test_hidden_states(computed: tuple[Case, dict[str, dict[str, np.ndarray]]]):
  case, outputs = computed
  names = [key for key in case.expected if key.startswith(("fp32.base.hidden.", "fp32.base.ple."))]
  assert len(names) >= 4
  for key in names:
    got = outputs["base"][key.removeprefix("fp32.base.")]
    want = case.expected[key]
    # Rounding errors grow with the residual stream. In gemma4_e2b the norms of the per-layer inputs are over few numbers. Its
    # layer 9 in float32 differs from float64 by up to 6.6e-6 of the largest number (17.9), and by 1.7e-6 in transformers.
    atol = TOLERANCE * max(1.0, float(np.abs(want).max()) / 10)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=key)


def by_expert(outputs: dict[str, np.ndarray], layer: str) -> tuple[np.ndarray, np.ndarray]:
  """Return the chosen experts in ascending order, and their weights in the same order."""
  order = np.argsort(outputs[f"{layer}.topk_idx"], axis=-1)
  experts, weights = outputs[f"{layer}.topk_idx"], outputs[f"{layer}.topk_weights"]
  return np.take_along_axis(experts, order, axis=-1), np.take_along_axis(weights, order, axis=-1)


def test_routing_exactly(computed: tuple[Case, dict[str, dict[str, np.ndarray]]]):
  case, outputs = computed
  base = {key.removeprefix("fp32.base."): value for key, value in case.expected.items() if "router" in key}
  layers = sorted({name.rpartition(".")[0] for name in base if name.startswith("router.")})
  assert bool(layers) == ("moe" in case.name or "deepseek" in case.name)
  for layer in layers:
    experts, weights = by_expert(outputs["base"], layer)
    want_experts, want_weights = by_expert(base, layer)
    np.testing.assert_array_equal(experts, want_experts, err_msg=layer)
    np.testing.assert_allclose(weights, want_weights, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(outputs["base"][f"{layer}.scores"], base[f"{layer}.scores"], rtol=0, atol=TOLERANCE)


def test_indexer_picks_exactly(computed: tuple[Case, dict[str, dict[str, np.ndarray]]]):
  case, outputs = computed
  names = [key for key in case.expected if key.startswith("fp32.base.indexer")]
  assert bool(names) == (case.name == "deepseek32")
  for key in names:
    got, want = outputs["base"][key.removeprefix("fp32.base.")], case.expected[key]
    for picked, expected, query in zip(got.reshape(-1, 6), want.reshape(-1, 6), np.tile(np.arange(28), 2), strict=True):
      # Queries that see fewer than 6 keys also select masked keys, which have no effect.
      assert {key for key in picked if key <= query} == {key for key in expected if key <= query}


def test_gradients(computed: tuple[Case, dict[str, dict[str, np.ndarray]]]):
  case, outputs = computed
  names = [key for key in case.expected if key.startswith("fp32.base.grad.")]
  assert len(names) >= 9
  for key in names:
    got, want = outputs["base"][key.removeprefix("fp32.base.")], case.expected[key]
    np.testing.assert_allclose(got, want, rtol=0, atol=GRADIENT_TOLERANCE * np.abs(want).max(), err_msg=key)
  norm = case.expected["fp32.base.grad_global_norm"]
  np.testing.assert_allclose(outputs["base"]["grad_global_norm"], norm, rtol=GRADIENT_TOLERANCE)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_moe", "deepseek32"])
@pytest.mark.slow
def test_both_faces_give_bitwise_the_same(name: str):
  case = Case(name)
  linen, nnx = (case.compute(["base"], f"module_api={api}")["base"] for api in ("linen", "nnx"))
  assert linen.keys() == nnx.keys()
  for key in linen:
    np.testing.assert_array_equal(linen[key], nnx[key], err_msg=key)


def rms(x: np.ndarray) -> float:
  return float(np.sqrt(np.mean(np.square(x.astype(np.float64)))))


def same_routing(case: Case, outputs: dict[str, np.ndarray]) -> np.ndarray:
  """Return bool [B, T]: tokens with the same experts as in float32, in this and in all earlier positions of the row."""
  same = np.ones(case.inputs["input_ids"].shape, bool)
  for key in outputs:
    if key.startswith("router") and key.endswith("topk_idx"):
      expected = np.sort(case.expected[f"fp32.base.{key}"], axis=-1)
      same &= (np.sort(outputs[key], axis=-1) == expected).all(axis=-1).reshape(same.shape)
  return np.logical_and.accumulate(same, axis=1)


@pytest.mark.parametrize(
  ("name", "dtype"),
  [
    *tiers(((name, "bf16") for name in CASES), quick=[("gemma4_dense", "bf16")], rest="slow"),
    ("stress_fp16_mlp", "fp16"),
    slow("deepseek3_plain", "fp16"),
    slow("gemma4_e2b", "fp16"),
  ],
)
def test_low_precision_is_no_worse_than_transformers(name: str, dtype: str):
  """Check rms(ours - float32) <= 1.5 * rms(transformers' - float32). If transformers overflows, our result must be finite and
  close.

  Rounding may change the selection of an expert, which changes logits by O(1), in our layers and in transformers. Such tokens
  are excluded.
  """
  case = Case(name)
  long = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
  outputs = case.compute(["base"], f"dtype={long}", f"weight_dtype={long}")["base"]
  theirs = {key.removeprefix(f"{dtype}.base."): value for key, value in case.expected.items() if key.startswith(dtype)}
  exact = case.expected["fp32.base.logits"]
  assert all(np.isfinite(value).all() for value in outputs.values())
  if np.isnan(theirs["logits"]).any():
    assert (name, dtype) == ("stress_fp16_mlp", "fp16")
    np.testing.assert_allclose(outputs["logits"], exact, rtol=0, atol=3e-2)
    return
  kept = same_routing(case, outputs) & same_routing(case, theirs)
  assert kept.sum() >= 10
  assert rms((outputs["logits"] - exact)[kept]) <= 1.5 * rms((theirs["logits"] - exact)[kept])


@pytest.mark.parametrize("name", CASES)
def test_rotary_tables(name: str):
  """Compare the frequencies to one unit in the last place, because late positions multiply their error by 10^5."""
  case = Case(name)
  decoder = open_weights(GOLDEN / name / "checkpoint", *load_checkpoint_config(GOLDEN / name / "checkpoint")).decoder
  of_all: Any = case.expected.get("fp32.base.rope.inv_freq")
  for layer in decoder.layers:
    mixer: Any = layer.cfg.mixer
    kind = "sliding" if getattr(mixer, "window", None) else "full"
    want = case.expected[f"fp32.base.rope.{kind}_attention_inv_freq"] if of_all is None else of_all
    np.testing.assert_array_max_ulp(inverse_frequencies(mixer.rope), want, maxulp=1)
