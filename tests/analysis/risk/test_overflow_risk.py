"""Compares bounds with the magnitudes of forward passes on every golden model. Hazards planted in the goldens rank first."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from maxtext_like.analysis.risk import overflow_risk, parameters
from maxtext_like.analysis.risk.model_risk import measure
from maxtext_like.analysis.risk.walk import Site
from maxtext_like.api.forward import open_weights
from maxtext_like.api.risk import open_checkpoint
from maxtext_like.checkpoint.huggingface.config import read_config
from maxtext_like.checkpoint.huggingface.inputs import make_batch
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.cli.risk import run as risk_command
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.layers.precision import Precision
from maxtext_like.models.registry import FAMILIES, Family
from tests.analysis.observed import observe
from tests.models.test_golden import GOLDEN, QUICK, Case
from tests.models.test_golden_vision import VisionCase
from tests.tiers import tiers

CASES = sorted(path.parent.name for path in GOLDEN.glob("*/outputs.npz"))


def limits(sites: list[Site]) -> dict[tuple[str, str], float]:
  """Returns the bounds by place and quantity. For experts it is the largest bound of all experts of a layer."""
  found: dict[tuple[str, str], float] = {}
  for site in sites:
    place = site.place.partition(".experts.")[0] + ".experts" if ".experts." in site.place else site.place
    found[place, site.quantity] = max(found.get((place, site.quantity), 0.0), site.bound)
  return found


def checked(name: str, dtype: str) -> None:
  directory = GOLDEN / name / "checkpoint"
  vision = "patch_size_for_vit" in read_config(directory).vision  # the others have only placeholder ids
  words = [f"dtype={dtype}", "scan_layers=false", *(["use_multimodal=true"] if vision else [])]
  case = VisionCase(name) if vision else Case(name)
  config, loaded = load_checkpoint_config(directory, words, length=case.inputs["input_ids"].shape[1])
  weights = open_weights(directory, config, loaded)
  bounds = limits(measure(loaded.config.model, weights.decoder, weights.part, 1000))
  if isinstance(case, VisionCase):
    runs = [case.batch("base")]
  else:
    runs = [make_batch(case.arrays(run), run, vocab_size=loaded.config.model.vocab_size).batch for run in case.runs]
  runs = [{key: value for key, value in batch.items() if key != "targets"} for batch in runs]
  observed = observe(weights.decoder, weights.load(), runs, QUICK)
  # ``observe`` does not note the row of the per-layer table, only the input that is computed from it.
  assert set(bounds) - set(observed) <= {("model", "per-layer row")}
  assert set(observed) <= set(bounds)
  beyond = {key: (value, bounds[key]) for key, value in observed.items() if not value <= bounds[key]}
  assert not beyond
  assert all(value > 0 for value in observed.values())


@pytest.mark.parametrize(
  "name", tiers(CASES, quick=("stress_fp16_mlp",), slow=("gemma3_vision", "gemma4_e4b", "deepseek3", "stress_fp16_vision"))
)  # the next test covers the other kinds of layers
def test_nothing_exceeds_its_bound(name: str):
  checked(name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4_e2b", "gemma4_moe", "deepseek32", "gemma4_vision_small"])  # every kind of layer
def test_nothing_exceeds_its_bound_in_bfloat16(name: str):
  checked(name, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stress_fp16_mlp", "stress_fp16_vision", "deepseek3_plain"])
def test_nothing_exceeds_its_bound_in_float16(name: str):
  checked(name, "float16")


def assessed(name: str, *words: str) -> list[overflow_risk.Risk]:
  model, decoder, read, _ = open_checkpoint(GOLDEN / name / "checkpoint", list(words))
  return overflow_risk.assess(measure(model, decoder, read, 4096), decoder.precision)


@pytest.mark.parametrize(
  ("name", "key", "place", "quantity"),
  [
    ("stress_fp16_mlp", "float32_gate_product", "layers.0.mlp", "product"),
    ("stress_fp16_vision", "float32_vision_pool", "vision", "pooled * sqrt(D)"),
  ],
)
def test_a_planted_hazard_comes_first_and_names_its_key(name: str, key: str, place: str, quantity: str):
  first = assessed(name, "dtype=float16")[0]
  assert (first.site.place, first.site.quantity) == (place, quantity)
  assert (first.unprotected, first.verdict, first.held, first.key) == ("overflow", "safe", "float32", key)
  assert not overflow_risk.unprotected_overflows(assessed(name, "dtype=float16"))


def test_without_its_key_the_product_is_expected_to_overflow_and_the_key_is_what_to_set():
  risks = assessed("stress_fp16_mlp", "dtype=float16", "float32_gate_product=false")
  first, second = risks[:2]
  assert (first.site.place, first.verdict, first.held) == ("layers.0.mlp", "overflow", "float16")
  assert first.key == second.key == "float32_gate_product=true"
  assert [r.site.quantity for r in overflow_risk.unprotected_overflows(risks)] == ["product", "product"]


def test_a_dense_model_is_safe_in_bfloat16_but_for_the_rounding_of_scores():
  kept = assessed("gemma4_dense", "dtype=bfloat16")
  assert {r.verdict for r in kept} == {"safe"}
  rounded = assessed("gemma4_moe", "dtype=bfloat16", "float32_gate_logits=false", "float32_logits=false")
  coarse = [r for r in rounded if r.verdict == "coarse"]
  assert {r.site.quantity for r in coarse} >= {"router logits"}
  assert all(r.key in ("float32_gate_logits=true", "float32_logits=true") for r in coarse)


def test_scores_are_bounded_by_their_soft_cap():
  def scores(*words: str) -> list[Site]:
    model, decoder, read, _ = open_checkpoint(GOLDEN / "gemma4_dense" / "checkpoint", ["dtype=bfloat16", *words])
    return [site for site in measure(model, decoder, read, 4096) if site.quantity in ("q.k", "scores")]

  cap = 3.0
  for free, capped in zip(scores(), scores(f"attn_logits_soft_cap={cap}"), strict=True):
    assert (free.place, free.quantity) == (capped.place, capped.quantity)
    if free.quantity == "q.k":
      assert free == capped
    else:
      assert cap < capped.bound < 1.02 * cap < free.bound
      assert cap * np.tanh(free.expected / cap) <= capped.expected < cap


def test_what_no_key_removes_is_told_to_change_the_dtype():
  site = Site("layers.0", "q", bound=2e5, expected=1e5)
  (found,) = overflow_risk.assess([site], precision_of("float16"))
  assert (found.verdict, found.key) == ("overflow", "dtype=bfloat16")
  (wide,) = overflow_risk.assess([site], precision_of("bfloat16"))
  assert (wide.verdict, wide.key) == ("safe", "")


def precision_of(dtype: str, **flags) -> Precision:
  return Precision(dtype=dtype, **flags)  # pyright: ignore[reportArgumentType]


def test_every_noted_quantity_is_judged_and_held_as_the_layers_hold_it():
  """If a flag is off, its quantities are in ``dtype``; if it is on, they are in float32."""
  for name, quantity in overflow_risk.QUANTITIES.items():
    for key in (key.name for key in quantity.keys):
      off, on = ("float16", "float32") if key == "residual_dtype" else (False, True)
      assert quantity.held(precision_of("float16", **{key: on})) == "float32", name
      if key != "float32_weight_sum":  # with float16 operands that sum is float32 in any case
        assert quantity.held(precision_of("float16", **{key: off})) == "float16", name


def test_of_two_keys_the_one_that_is_missing_is_named():
  site = Site("layers.0", "scores", bound=200.0, expected=100.0)
  for off in ("float32_qk_product", "float32_logits"):
    (found,) = overflow_risk.assess([site], precision_of("bfloat16", **{off: False}))
    assert (found.verdict, found.held, found.key) == ("coarse", "bfloat16", f"{off}=true")
  (found,) = overflow_risk.assess([site], precision_of("bfloat16"))
  assert (found.verdict, found.unprotected, found.key) == ("safe", "coarse", "float32_qk_product, float32_logits")


def assert_equal_sites(found: list[Site], expected: list[Site]) -> None:
  """Asserts that sites are equal up to rounding. The order of float32 sums depends on the layout of an array."""
  for a, b in zip(found, expected, strict=True):
    assert (a.place, a.quantity) == (b.place, b.quantity)
    np.testing.assert_allclose([a.bound, a.expected], [b.bound, b.expected], rtol=1e-5)


def test_a_run_of_ours_is_read_as_the_arrays_that_were_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  config, loaded = load_checkpoint_config(GOLDEN / "stress_fp16_mlp" / "checkpoint", ["weight_dtype=bfloat16"])
  weights = open_weights(GOLDEN / "stress_fp16_mlp" / "checkpoint", config, loaded)
  run = tmp_path / "run"
  run.mkdir()
  (run / "config.yml").write_text(loaded.to_yaml())
  with CheckpointManager(run / "checkpoints", config=loaded.config) as manager:
    assert manager.save(7, {"params": weights.load()})
    assert manager.wait()
  model, decoder, read, notes = open_checkpoint(run, [])
  assert notes == [f"step 7 of {run}"]
  assert_equal_sites(measure(model, decoder, read, 1000), measure(loaded.config.model, weights.decoder, weights.part, 1000))
  assert risk_command(["--checkpoint", str(run / "checkpoints" / "7"), "--rows", "1"]) == 0
  assert "and 28 more" in capsys.readouterr().out


def test_a_family_without_a_formula_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch):
  model, decoder, read, _ = open_checkpoint(GOLDEN / "stress_fp16_mlp" / "checkpoint", [])
  unknown = types.ModuleType("models_of_somebody.plain")
  unknown.__path__ = []  # an empty package
  monkeypatch.setitem(sys.modules, unknown.__name__, unknown)
  monkeypatch.setitem(FAMILIES, "plain", Family("plain", unknown.__name__))
  with pytest.raises(UserError, match="no formula for decoder_block plain\n  fix: "):
    measure(dataclasses.replace(model, decoder_block="plain"), decoder, read, 1000)


def test_weights_that_are_not_finite_are_named():
  model, decoder, read, _ = open_checkpoint(GOLDEN / "stress_fp16_mlp" / "checkpoint", [])

  def poisoned(path, index):
    values = read(path, index)
    return values * np.nan if path[-1] == "up" else values

  with pytest.raises(NonFiniteError, match=r"layers\.0\.mlp\.up contains numbers that are not finite"):
    measure(model, decoder, poisoned, 1000)


def test_the_slices_of_a_large_map_give_the_whole(monkeypatch: pytest.MonkeyPatch):
  model, decoder, read, _ = open_checkpoint(GOLDEN / "deepseek3" / "checkpoint", [])
  whole = measure(model, decoder, read, 1000)
  sizes = []

  def counted(path, index):
    values = read(path, index)
    sizes.append(values.size)
    return values

  monkeypatch.setattr(parameters, "CHUNK", 700)
  sliced = measure(model, decoder, counted, 1000)
  assert max(sizes) <= 2048  # larger than CHUNK, because a column of a head is the smallest slice
  assert_equal_sites(whole, sliced)


def test_spacing_is_the_distance_to_the_next_number():
  import ml_dtypes

  for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)):
    for size in (0.75, 1.0, 31.9, 32.0, 1000.0):
      at = np.asarray(size).astype(dtype)
      assert overflow_risk.spacing(float(at), name) == float(np.spacing(at))
  assert overflow_risk.spacing(1e5, "float16") == float("inf")


def test_the_command_prints_writes_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
  checkpoint = str(GOLDEN / "stress_fp16_mlp" / "checkpoint")
  out = tmp_path / "risk.json"
  assert risk_command(["--checkpoint", checkpoint, "dtype=float16", "--rows", "3", "--json", str(out)]) == 0
  text = capsys.readouterr().out
  assert "safe: float32_gate_product" in text
  assert "float16: no quantity can overflow" in text
  content = json.loads(out.read_text())
  assert (content["dtype"], content["tokens"]) == ("float16", 4096)
  first = content["risks"][0]
  assert first["place"] == "layers.0.mlp"
  assert first["headroom_bits"]["float16"]["expected"] < -5
  assert first["expected"] <= first["bound"]
  assert risk_command(["--checkpoint", checkpoint, "dtype=float16", "float32_gate_product=false"]) == 3
  assert "set float32_gate_product=true" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("words", "what"),
  [
    (["--rows", "3"], "--checkpoint"),
    (["--checkpoint", "no/such/place"], "no such file or directory"),
    (["--checkpoint", "tests"], "neither a run"),
    (["--checkpoint", "tests", "--tokens", "5"], "--tokens 100 or more"),
    (["--checkpoint", "tests", "bogus"], "unknown word 'bogus'"),
    (["--checkpoint", "tests", "--json", "no/such/folder/x.json"], "x.json: the folder"),
  ],
)
def test_wrong_usage(words: list[str], what: str):
  with pytest.raises(UserError, match=what):
    risk_command(words)
