"""Adapters as files: exported for peft or merged, imported, used to start another run, and refused if they do not fit."""

import dataclasses
import json
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import maxtext_like
from maxtext_like.checkpoint.adapters.adapter_step import Base
from maxtext_like.checkpoint.adapters.init_adapter import require_base
from maxtext_like.checkpoint.huggingface import peft
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.fingerprint import of_files
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.training.step.program import make_program
from tests.tiers import nightly, slow
from tests.training.adapters.runs import LORA, WORDS, losses, train

PATTERNS = ["lora_rank_pattern={mlp.down: 2, layers.0.attention: 5}", "lora_alpha_pattern={q_proj: 1}"]


def test_peft_s_files_come_back_as_the_same_model(workplace, tmp_path):
  written = maxtext_like.export_adapter(workplace / "adapter", tmp_path / "peft")
  assert (written.maps, written.rank, written.base) == (14, 3, str(workplace / "base"))
  config = json.loads((tmp_path / "peft" / peft.CONFIG).read_text())
  assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 6.0, False)
  assert "model.layers.1.self_attn.o_proj" in config["target_modules"]
  merged = maxtext_like.load(workplace / "adapter", dtype="float32").logits([[5, 6, 7]])
  loaded = maxtext_like.load(workplace / "base", adapters=[tmp_path / "peft"], dtype="float32").logits([[5, 6, 7]])
  np.testing.assert_allclose(loaded, merged, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_of_a_run_that_added_rows_is_exported_with_a_note_and_the_tokenizer(workplace, tmp_path, capsys):
  tokenizer = tmp_path / "tokenizer.json"
  vocabulary = {letter: i for i, letter in enumerate(["?", *sorted(set("The fox runs. The hen sits. "))])}
  each = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
  model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
  tokenizer.write_text(json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": each, "model": model}))
  size = load_config("gemma3-tiny").config.model.vocab_size
  words = (f"init_from={workplace}/base", *LORA, "steps=1", f"vocab_size={size + 5}", f"tokenizer={tokenizer}")
  assert train(workplace, "more-rows", *words) == 0
  assert main(["export", str(workplace / "more-rows"), "--adapter", "--out", str(tmp_path / "peft")]) == 0
  assert f"({size} -> {size + 5}): call model.resize_token_embeddings({size + 5})" in capsys.readouterr().out
  assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == [peft.CONFIG, peft.WEIGHTS, "tokenizer.json"]


def test_what_has_no_adapter_is_not_merged(workplace, tmp_path, capsys):
  words = ["--out", str(tmp_path / "hf"), "--merge"]
  assert main(["export", str(workplace / "base"), *words]) == 2
  assert "is a complete model without an adapter to merge" in capsys.readouterr().err
  assert main(["export", str(workplace / "adapter"), *words, "--adapter"]) == 2
  assert "not allowed with argument --merge" in capsys.readouterr().err
  assert main(["export", str(workplace / "adapter"), *words]) == 0


@pytest.mark.slow
def test_an_export_has_the_adapter_added(workplace, tmp_path):
  maxtext_like.export_checkpoint(workplace / "adapter", tmp_path / "hf", dtype="float32")
  merged = maxtext_like.load(workplace / "adapter", dtype="float32").logits([[5, 6, 7]])
  exported = maxtext_like.load(tmp_path / "hf", dtype="float32", tokenizer="bytes").logits([[5, 6, 7]])
  np.testing.assert_allclose(exported, merged, atol=1e-6)
  inputs = {"input_ids": [[5, 6, 7]], "labels": [[5, 6, 7]]}
  of_run, of_export = (
    maxtext_like.forward(place, inputs, gradients=True, dtype="float32").arrays
    for place in (workplace / "adapter", tmp_path / "hf")
  )
  assert of_run.keys() == of_export.keys()
  np.testing.assert_allclose(of_run["logits"], merged, atol=1e-6)
  for name, value in of_run.items():
    np.testing.assert_allclose(value, of_export[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"peft_type": "IA3"}, "not a LoRA adapter"),
    ({"use_dora": True}, "has lora_A, lora_B instead of lora_A, lora_B, lora_magnitude_vector"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out = True is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"lora_alpha": "big"}, "lora_alpha = big is not a finite number"),
    ({"r": -1}, "r = -1 is not a rank"),
    ({"r": 10**12}, "r = 1000000000000 is not a rank"),
    ({"r": True}, "r = True is not a rank"),
    ({"r": 64}, "has rank 64 by r and rank_pattern, but its tensors have rank 3"),
    ({"rank_pattern": {"q_proj": 7}}, "has rank 7 by r and rank_pattern, but its tensors have rank 3"),
    ({"rank_pattern": [3]}, "rank_pattern = \\[3\\] is not a JSON object"),
    ({"init_lora_weights": "pissa_niter_4"}, "this initialization changes the base weights"),
    ({"use_qalora": True}, "use_qalora = True is not supported"),
    ({"use_rslora": "false"}, "use_rslora = 'false' is not true or false"),
    ({"target_modules": []}, "target_modules = \\[\\] leaves out"),
    ({"layers_to_transform": [0]}, "layers_to_transform = \\[0\\] leaves out 'model.layers.1"),
  ],
)
def test_what_peft_writes_and_is_not_here_is_refused(workplace, tmp_path, change, said):
  maxtext_like.export_adapter(workplace / "adapter", tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(UserError, match=said):
    _ = maxtext_like.load(workplace / "base", adapters=tmp_path / "peft").params


def test_a_setting_that_is_not_read_is_reported_once(workplace, tmp_path, caplog):
  maxtext_like.export_adapter(workplace / "adapter", tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | {"use_newest": True, "newer": None, "revision": "main"}))
  for _ in range(2):
    _ = maxtext_like.load(workplace / "base", adapters=tmp_path / "peft").params
  assert caplog.text.count("adapter_config.json: not read: use_newest; if") == 1


def test_what_is_no_adapter_is_refused(workplace, tmp_path):
  with pytest.raises(UserError, match=r"a (whole|complete) model\b.*\badapter"):
    maxtext_like.export_adapter(workplace / "base", tmp_path / "peft")
  with pytest.raises(UserError, match="no adapter"):
    _ = maxtext_like.load(workplace / "base", adapters=tmp_path).params


@pytest.fixture(scope="module")
def gone_on(workplace, for_peft):
  """Losses of three new runs that start from the result of the adapter run: its merged model, its adapter, and its export for
  peft."""
  same = [f"init_from={workplace}/base", "steps=2", "learning_rate=0.02"]
  assert train(workplace, "of-merged", f"init_from={workplace}/adapter", *LORA, "steps=1") == 0
  assert train(workplace, "of-run", *same, f"lora_from={workplace}/adapter") == 0
  assert train(workplace, "of-peft", *same, f"lora_from={for_peft}") == 0
  return [losses(workplace, name) for name in ("of-merged", "of-run", "of-peft")]


@pytest.mark.slow
def test_a_run_begins_with_a_given_adapter(workplace, gone_on):
  merged, of_run, of_peft = gone_on
  assert of_run[0] == pytest.approx(merged[0], rel=1e-5)
  assert of_run == pytest.approx(of_peft, rel=1e-6)
  assert of_run[1] < of_run[0] < losses(workplace, "adapter")[0] - 0.05
  stored = manifest.read(workplace / "of-peft/checkpoints/2").config["adapter"]
  assert (stored["lora_rank"], stored["lora_alpha"]) == (3, 6.0)
  assert stored["lora_modules"] == [
    "attention.k",
    "attention.o",
    "attention.q",
    "attention.v",
    "mlp.down",
    "mlp.gate",
    "mlp.up",
  ]


@pytest.mark.slow
def test_a_run_that_began_with_an_adapter_goes_on(workplace, gone_on):
  words = [f"init_from={workplace}/base", "learning_rate=0.02", f"lora_from={workplace}/for-peft"]
  assert train(workplace, "in-one-go", *words, "steps=3") == 0
  assert train(workplace, "of-peft", *words, "steps=3") == 0
  assert losses(workplace, "of-peft") == losses(workplace, "in-one-go")


@pytest.mark.slow
def test_layers_have_ranks_and_scales_of_their_own(workplace, tmp_path, capsys):
  """Layers of a stack share arrays. A layer with a smaller rank uses only a part of its slice; the rest stays zero in training.
  Export, import and the model's logits use the rank and scale of each layer."""
  words = (f"init_from={workplace}/base", *LORA, *PATTERNS, "adam_weight_decay=0.1", "steps=2")
  assert train(workplace, "patterns", *words) == 0
  assert "adapter LoRA of rank 2 to 5 times 0.2 to 3 on 14 arrays" in capsys.readouterr().out
  maxtext_like.export_adapter(workplace / "patterns", tmp_path / "peft")
  config = json.loads((tmp_path / "peft" / peft.CONFIG).read_text())
  layers = [f"model.layers.{i}." for i in (0, 1)]
  own = {f"{layers[0]}self_attn.{name}_proj": 5 for name in "kqov"} | {f"{layer}mlp.down_proj": 2 for layer in layers}
  assert (config["r"], config["rank_pattern"]) == (3, own)
  assert config["alpha_pattern"] == {f"{layer}self_attn.q_proj": 1.0 for layer in layers}
  load = lambda *args, **more: maxtext_like.load(*args, dtype="float32", **more).logits([[5, 6, 7]])
  run = load(workplace / "patterns")
  np.testing.assert_allclose(load(workplace / "base", adapters=tmp_path / "peft"), run, atol=1e-5)
  assert np.abs(run - load(workplace / "base")).max() > 1e-3
  assert main(["import", str(tmp_path / "peft"), "--out", str(tmp_path / "imported")]) == 0
  np.testing.assert_allclose(load(tmp_path / "imported"), run, atol=1e-5)
  assert "lora_rank_pattern: {" in (tmp_path / "imported/adapter.yml").read_text()
  assert train(workplace, "patterns", *words, "lora_alpha_pattern={q_proj: 1, k_proj: 2}", "steps=3") == 2
  assert 'lora_alpha_pattern: checkpoint {"q_proj": 1.0}, this run {"q_proj": 1.0, "k_proj": 2.0}' in capsys.readouterr().err


@pytest.mark.parametrize(
  ("words", "change", "said"),
  [
    (["lora_rank=4"], {}, "lora_rank: adapter 3, this run 4"),
    (["lora_rank=3"], {}, "lora_alpha: adapter 6.0, this run None"),
    (["lora_rank=3", "lora_alpha=6", "lora_modules=[q_proj]"], {}, "lora_modules: "),
    (
      ["lora_rank=3", "lora_alpha=6"],
      {"alpha_pattern": {"q_proj": 3}},
      "adapter 6.0 except {'attention.q': 3.0}, this run 6.0",
    ),
    (["lora_rank_pattern={q_proj: 2}"], {}, "has no effect with lora_from"),
    ([], {"peft_type": "LOHA"}, "not a LoRA adapter (peft_type LOHA)"),
    ([], {"lora_alpha": 0}, "adapter_config.json: lora_alpha = 0 for layers.0."),
    ([], {"alpha_pattern": {"q_proj": -1}}, "adapter_config.json: alpha_pattern = -1 for layers.0.attention.q is not above 0"),
    (["lora_alpha=3"], {}, "lora_alpha = 3.0 has no effect with lora_from"),
  ],
)
def test_an_adapter_that_is_not_the_run_s_is_refused(workplace, for_peft, tmp_path, capsys, words, change, said):
  shutil.copytree(for_peft, tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  assert train(workplace, "refused", f"init_from={workplace}/base", f"lora_from={tmp_path}/peft", *words, "steps=1") == 2
  assert said in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_that_was_trained_on_other_weights_is_refused(workplace, for_peft, capsys, caplog):
  drawn = ["learning_rate=0.02", "seed=5", "steps=1"]
  assert train(workplace, "on-others", *drawn, f"lora_from={workplace}/adapter") == 2
  said = capsys.readouterr().err
  assert f"lora_from: {workplace}/adapter was trained on other base weights\n  then: {workplace}/base, " in said
  assert "  now:  initialized from seed 5, " in said
  # int8 weights have another fingerprint than the adapter's base weights, so the source is compared instead.
  same = load_config("gemma3-tiny", [*WORDS, f"dataset_path={workplace}/text.txt", f"lora_from={workplace}/adapter"]).config
  int8 = dataclasses.replace(same, adapter=dataclasses.replace(same.adapter, base_weights="int8"))
  model: Any = SimpleNamespace(config=int8)
  require_base(model, Base(str(workplace / "base"), 0, "0"))
  with pytest.raises(UserError, match="was trained on other base weights"):
    require_base(model, Base(str(workplace / "elsewhere"), 0, "0"))
  # The content of the files is compared, not their path.
  files = of_files(workplace / "base")
  require_base(model, Base(str(workplace / "moved"), 0, "0", files))
  with pytest.raises(UserError, match="was trained on other base weights"):
    require_base(model, Base(str(workplace / "base"), 0, "0", f"step {'0' * 64}"))


def test_what_peft_names_is_compared_with_the_weights(workplace, for_peft, tmp_path, caplog):
  config = load_config("gemma3-tiny", [*WORDS, f"dataset_path={workplace}/text.txt", f"lora_from={tmp_path}/peft"]).config
  shutil.copytree(for_peft, tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  model: Any = SimpleNamespace(config=config)
  said = json.loads(path.read_text())
  snapshot = "/cache/models--google--gemma-3-4b-it/snapshots/0123"
  for named, source, warned in (
    (f"{workplace}/base", f"{workplace}/base", False),
    (f"{workplace}/base", f"{workplace}/base/checkpoints/1", False),
    ("google/gemma-3-4b-it", snapshot, False),
    ("google/gemma-3-4b-it", "/models/Gemma-3-4b-it", False),
    (None, "/models/other", False),
    ("google/gemma-3-4b-pt", snapshot, True),
    ("google/gemma-3-4b-pt", None, True),
  ):
    path.write_text(json.dumps(said | {"base_model_name_or_path": named}))
    caplog.clear()
    require_base(model, Base(source, 0, "0"))
    assert (f"was trained on {named}, but the weights here are {source or 'initialized from seed 0'}" in caplog.text) == warned


@pytest.mark.parametrize("kind", [nightly("adapter"), slow("whole-dora")])
def test_an_imported_adapter_is_the_run_s(workplace, tmp_path, kind, capsys):
  """An adapter imported from peft's files gives the run's logits, exports the same bytes again, and can be trained further."""
  base = f"init_from={workplace}/base"
  if kind == "whole-dora":
    assert train(workplace, kind, base, *LORA, "lora_dora=true", "lora_rslora=true", "steps=2") == 0
  maxtext_like.export_adapter(workplace / kind, tmp_path / "peft")
  assert main(["import", str(tmp_path / "peft"), "--out", str(tmp_path / "imported")]) == 0
  assert f"train with: maxtext-like train MODEL {tmp_path}/imported/adapter.yml" in capsys.readouterr().out
  load = lambda place: maxtext_like.load(place, dtype="float32").logits([[5, 6, 7]])
  np.testing.assert_allclose(load(tmp_path / "imported"), load(workplace / kind), atol=1e-5)
  maxtext_like.export_adapter(tmp_path / "imported", tmp_path / "again")
  files = [(tmp_path / name / peft.WEIGHTS).read_bytes() for name in ("peft", "again")]
  assert files[0] == files[1]
  found = []
  for name, words in (
    ("from-run", [f"lora_from={workplace}/{kind}", base]),
    ("from-file", [f"{tmp_path}/imported/adapter.yml"]),
  ):
    assert train(workplace, f"{kind}-{name}", *words, "steps=1") == 0
    found += losses(workplace, f"{kind}-{name}")
  assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_the_dropout_of_an_adapter_is_imported_or_reported(workplace, for_peft, tmp_path, caplog):
  shutil.copytree(for_peft, tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.125}))
  maxtext_like.import_checkpoint(tmp_path / "peft", tmp_path / "imported")
  assert "lora_dropout: 0.125" in (tmp_path / "imported/adapter.yml").read_text()
  words = [*WORDS, f"dataset_path={workplace}/text.txt", f"init_from={workplace}/base", f"lora_from={tmp_path}/peft"]
  for own, said in (("0.125", False), ("0", True)):
    program = make_program(load_config("gemma3-tiny", [*words, f"lora_dropout={own}"]).config)
    assert program.adapter is not None
    assert program.adapter.dropout == float(own)
    assert ("was trained with lora_dropout=0.125, this run has lora_dropout=0" in caplog.text) == said


def test_an_adapter_whose_weights_are_not_here_is_not_imported(workplace, for_peft, tmp_path):
  shutil.copytree(for_peft, tmp_path / "peft")
  path = tmp_path / "peft" / peft.CONFIG
  path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "some/model"}))
  with pytest.raises(UserError, match=r"the weights below are some/model, which is not a directory(?s:.*)init_from=DIR"):
    maxtext_like.import_checkpoint(tmp_path / "peft", tmp_path / "imported")
