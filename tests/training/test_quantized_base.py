"""Runs that train an adapter on quantized weights: storage, resumes, merging, refusals, and every tool on them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import maxtext_like
from maxtext_like.checkpoint.store import manifest
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError

pytestmark = pytest.mark.slow  # the runs that all tests read take half a minute

WORDS = ["max_target_length=16", "per_device_batch_size=2", "num_decoder_layers=2", "emb_dim=32", "mlp_dim=48"]
WORDS += ["inhomogeneous_layer_cycle_interval=1", "lr_schedule_type=constant", "warmup_steps_fraction=0"]
WORDS += ["dataset=text", "eval_fraction=0", "dtype=float32"]
LORA = ["lora_rank=3", "lora_alpha=6", "learning_rate=0.02", "base_weights=nf4"]
TOKENS = [[5, 6, 7, 8]]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
  place = tmp_path_factory.mktemp("runs")
  (place / "text.txt").write_text("The fox runs. The hen sits. " * 60)
  assert train(place, "base", "steps=1") == 0
  assert train(place, "adapter", f"init_from={place}/base", *LORA, "steps=4", "checkpoint_interval=2") == 0
  return place


def train(place: Path, name: str, *words: str) -> int:
  settings = [f"output_dir={place}", f"run_name={name}", f"compilation_cache_dir={place}/cache"]
  settings.append(f"dataset_path={place}/text.txt")
  return main(["train", "gemma3-tiny", *WORDS, *settings, *words])


def losses(place: Path, name: str) -> list[float]:
  return [json.loads(line)["loss"] for line in (place / name / "metrics.jsonl").read_text().splitlines()]


def test_a_checkpoint_holds_the_adapter_alone_and_says_what_lies_below(workplace):
  stored = manifest.read(workplace / "adapter/checkpoints/4")
  names = [name for name in stored.leaves if name.startswith("params.")]
  assert len(names) == 2 * 7
  assert all(name.startswith("params.adapter.") for name in names)
  assert {stored.leaves[name]["dtype"] for name in names} == {"float32"}
  assert stored.config["adapter"]["base_weights"] == "nf4"


def test_it_learns_and_goes_on_to_the_bit(workplace):
  found = losses(workplace, "adapter")
  assert found[-1] < found[0] - 0.05
  words = (f"init_from={workplace}/base", *LORA, "lr_schedule_steps=4")
  assert train(workplace, "parts", *words, "steps=2") == 0
  assert train(workplace, "parts", *words, "steps=4") == 0
  assert losses(workplace, "parts") == found


def test_the_fingerprint_is_of_what_is_stored(workplace, capsys):
  words = (f"init_from={workplace}/base", *LORA, "steps=6")
  assert train(workplace, "adapter", *words, "base_weights=int8") == 2
  assert "the base weights of this adapter have changed" in capsys.readouterr().err
  prints = {form: maxtext_like_base(workplace, form) for form in ("nf4", "int8")}
  stored = manifest.read(workplace / "adapter/checkpoints/4")
  assert stored.extra["base"]["fingerprint"] == prints["nf4"] != prints["int8"]


def maxtext_like_base(workplace: Path, form: str) -> str:
  from maxtext_like.checkpoint.read_weights import read_weights
  from maxtext_like.checkpoint.store.fingerprint import fingerprint
  from maxtext_like.config.load import load_config
  from maxtext_like.training.step.program import make_program

  config = load_config("gemma3-tiny", [*WORDS, *LORA, f"base_weights={form}", f"dataset_path={workplace}/text.txt"]).config
  return fingerprint(read_weights(workplace / "base", make_program(config).model))


def test_it_is_the_same_model_however_it_is_loaded(workplace):
  """The run, its adapter on the base run, and its export have the same logits. The adapter exported for peft, loaded on weights
  that are not quantized, has other logits."""
  load = lambda *args, **more: maxtext_like.load(*args, dtype="float32", **more).logits(TOKENS)
  run, apart = load(workplace / "adapter"), load(workplace / "base", adapters=workplace / "adapter")
  np.testing.assert_allclose(apart, run, atol=1e-5)
  written = maxtext_like.export_checkpoint(workplace / "adapter", workplace / "hf", dtype="float32")
  np.testing.assert_allclose(load(workplace / "hf", tokenizer="bytes"), run, atol=1e-5)
  assert re.fullmatch("the adapter is merged into nf4 weights; rounding to float32 adds an error of 0 % .*", written.notes[0])
  maxtext_like.export_adapter(workplace / "adapter", workplace / "peft")
  whole = load(
    workplace / "base", adapters=workplace / "peft"
  )  # peft's files do not record the quantization, so the weights are used unquantized
  assert float(np.abs(whole - run).max()) > 1e-3


def test_verbs_use_the_weights_of_training_and_say_so(workplace, tmp_path, capsys):
  run = str(workplace / "adapter")
  stored = "note: the weights are stored as nf4, and the adapter is added in every product, as in training"
  words = ["--max-length", "16", "--stride", "8", "dtype=float32"]
  assert main(["perplexity", run, str(workplace / "text.txt"), *words]) == 0
  assert stored in capsys.readouterr().err
  np.savez(tmp_path / "in.npz", input_ids=TOKENS, labels=TOKENS)
  files = ["--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
  logits = maxtext_like.load(run, dtype="float32").logits(TOKENS)
  for more, line in (
    ([], stored),
    (["--gradients"], ", trained on nf4 weights, is merged into weights in float32"),
    (["base_weights=int8"], "as int8"),
  ):
    assert main(["forward", "--checkpoint", run, *files, "dtype=float32", *more]) == 0
    assert line in capsys.readouterr().out
    difference = np.abs(np.load(tmp_path / "out.npz")["logits"] - logits).max()
    assert (difference < 1e-4) == ("int8" not in line)


def test_what_merging_rounds_is_told(workplace, tmp_path):
  written = maxtext_like.export_checkpoint(workplace / "adapter", tmp_path / "hf", dtype="bfloat16")
  share = float(written.notes[0].split("rounding to bfloat16 adds an error of ")[1].split()[0]) / 100
  assert 1e-3 < share < 0.3


def test_several_adapters_on_one_base(workplace):
  words = (f"init_from={workplace}/base", *LORA, "steps=2", "lora_modules=[q_proj, down_proj]", "seed=5")
  assert train(workplace, "second", *words) == 0
  load = lambda *adapters: maxtext_like.load(workplace / "base", dtype="float32", adapters=adapters).logits(TOKENS)
  one, both, turned = (
    load(workplace / "adapter"),
    load(workplace / "adapter", workplace / "second"),
    load(workplace / "second", workplace / "adapter"),
  )
  np.testing.assert_allclose(both, turned, atol=1e-5)
  assert float(np.abs(both - one).max()) > 1e-3


def test_adapters_of_different_bases_are_not_added_up(workplace):
  assert train(workplace, "eight", f"init_from={workplace}/base", *LORA, "steps=1", "base_weights=int8") == 0
  with pytest.raises(UserError, match=r"was trained on base_weights=nf4, .*eight on int8"):
    _ = maxtext_like.load(workplace / "base", adapters=[workplace / "adapter", workplace / "eight"]).params


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["base_weights=nf4"], "base_weights = nf4 has no effect with lora_rank: 0"),
    (["lora_rank=2", "base_weights_modules=[q_proj]"], "base_weights_modules has no effect without base_weights"),
    (["lora_rank=2", "base_weights=nf4", "base_weights_modules=[embed_tokens]"], "is a table"),
    (["lora_rank=2", "base_weights=nf4", "base_weights_modules=[qproj]"], "base_weights_modules: 'qproj' matches no weight"),
  ],
)
def test_what_cannot_be_is_refused(workplace, capsys, words, said):
  assert train(workplace, "refused", "steps=1", *words) == 2
  assert said in capsys.readouterr().err
