"""Import and export: every tensor comes back bit for bit under its released name, and no partial output is left."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from maxtext_like import load
from maxtext_like.checkpoint.huggingface.config import export_config, interpret, read_config
from maxtext_like.checkpoint.huggingface.export import export_hugging_face, read_origin
from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
from maxtext_like.checkpoint.huggingface.shards import Shards
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.weights import Weights
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.generation.stop import stop_tokens
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder
from maxtext_like.storage import Place
from tests.gcs_emulator import BUCKET
from tests.generation.letters import copy_golden
from tests.s3_emulator import emulator

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/checkpoint"))
MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yml"))


def checkpoint(case: str) -> Path:
  return GOLDEN / case / "checkpoint"


def export(case: str, out: Path | Place, **options: Any) -> dict:
  """Load a golden checkpoint, including its tower, write it to ``out``, and return the parameters."""
  words = ["use_multimodal=true"] if read_config(checkpoint(case)).has_tower else []
  config, loaded = load_checkpoint_config(checkpoint(case), words)
  model, vision = loaded.config.model, loaded.config.vision
  decoder = build_decoder(model, Precision(weight_dtype="float32"), vision=vision)
  params = options.pop("params", None) or Weights(checkpoint(case), decoder, config).load()
  export_hugging_face(out, params, decoder, model, vision=vision, origin=read_origin(checkpoint(case)), **options)
  return params


def assert_same_files(original: Path, exported: Path) -> None:
  before, after = Shards(original), Shards(exported)
  assert sorted(before) == sorted(after)
  for name in before:
    assert before.entry(name).dtype == after.entry(name).dtype, name
    assert before.raw(name).tobytes() == after.raw(name).tobytes(), name


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_comes_back_bit_for_bit(case: str, tmp_path: Path):
  export(case, tmp_path / "out")
  assert_same_files(checkpoint(case), tmp_path / "out")
  before, after = read_config(checkpoint(case)), read_config(tmp_path / "out")
  assert before.model_type == after.model_type
  assert {**before.model, "model_name": ""} == {**after.model, "model_name": ""}
  assert before.vision == after.vision


@pytest.mark.parametrize("case", ["gemma3_vision", "deepseek3"])
def test_what_comes_back_otherwise(case: str, tmp_path: Path):
  """The two differences that docs/guides/hugging-face.md names: tower tensors in transformers' spelling come back in the
  released one, and a bias in 16 bits comes back as float32."""

  def spelled(name: str) -> str:
    return name.replace("vision_tower.vision_model.", "vision_tower.")

  source, ours, out = (tmp_path / name for name in ("source", "ours", "out"))
  source.mkdir()
  file = SafetensorsFile(checkpoint(case) / "model.safetensors")
  arrays = {name: file.tensor(name).astype(ml_dtypes.bfloat16) for name in file.entries}
  write(source, [Source(spelled(n), "BF16", a.shape, lambda a=a: a) for n, a in arrays.items()], shard_size=10**9)
  shutil.copy(checkpoint(case) / "config.json", source)
  assert main(["import", str(source), "--out", str(ours)]) == 0
  assert main(["export", str(ours), "--out", str(out)]) == 0
  before, after = Shards(source), Shards(out)
  assert sorted(after) == sorted(arrays), "the names of the released files"
  assert (sorted(before) != sorted(arrays)) == (case == "gemma3_vision")
  for name, array in arrays.items():
    bias = name.endswith("e_score_correction_bias")
    assert after.entry(name).dtype == ("F32" if bias else "BF16")
    np.testing.assert_array_equal(after.raw(name), array.astype(np.float32) if bias else array)


@pytest.mark.parametrize("case", ["gemma4_e2b", "deepseek32"])
def test_verbs_import_and_export(case: str, tmp_path: Path, capsys: pytest.CaptureFixture):
  source, ours, out = tmp_path / "source", tmp_path / "ours", tmp_path / "out"
  shutil.copytree(checkpoint(case), source)
  (source / "tokenizer.json").write_text('{"a": 1}')
  (source / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
  (source / "modeling_x.py").write_text("raise SystemExit")
  assert main(["import", str(source), "--out", str(ours)]) == 0
  assert f"init_from={ours}" in capsys.readouterr().out
  assert load_config(ours / "model.yml").config.model.num_decoder_layers == {"gemma4_e2b": 10, "deepseek32": 4}[case]
  assert main(["export", str(ours), "--out", str(out), "--shard-size", "100KB"]) == 0
  assert "tensors in bfloat16, generation_config.json, tokenizer.json" in capsys.readouterr().out
  assert_same_files(source, out)
  assert len(list(out.glob("*.safetensors"))) >= 3
  assert (out / "generation_config.json").read_text() == '{"eos_token_id": [1, 106]}'
  assert not (out / "modeling_x.py").exists()


def test_dtypes_and_the_bias_that_stays_float32(tmp_path: Path):
  params = export("deepseek3", tmp_path / "bf16")
  export("deepseek3", tmp_path / "fp32", dtype="float32", params=params)
  export("deepseek3", tmp_path / "fp16", dtype="float16", params=params)
  for name, dtype in (("bf16", "BF16"), ("fp32", "F32"), ("fp16", "F16")):
    file = SafetensorsFile(tmp_path / name / "model.safetensors")
    assert {entry.dtype for entry in file.entries.values() if "bias" not in entry.name} == {dtype}
    assert file.entries["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "F32"
    long = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}[dtype]
    assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == long
  generation = json.loads((tmp_path / "fp32" / "generation_config.json").read_text())
  assert generation == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


def test_numbers_beyond_float16_stop_the_export_and_leave_nothing(tmp_path: Path):
  params = export("stress_fp16_mlp", tmp_path / "whole")
  params["final_norm"]["scale"] = np.full(32, 7e4, np.float32)
  with pytest.raises(UserError, match=r"model\.norm\.weight: contains numbers beyond 65504"):
    export("stress_fp16_mlp", tmp_path / "out", dtype="float16", params=params)
  assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_directory_with_files_is_not_touched(tmp_path: Path):
  (tmp_path / "mine.txt").write_text("mine")
  with pytest.raises(UserError, match="already exists"):
    export("stress_fp16_mlp", tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
  (tmp_path / "empty").mkdir()
  export("stress_fp16_mlp", tmp_path / "empty")
  assert (tmp_path / "empty" / "config.json").is_file()


def test_into_a_store_with_config_json_last_or_not_at_all(tmp_path: Path):
  store = emulator()
  out, sent = Place(f"s3://{BUCKET}/exports/a"), []
  params = export("deepseek3", tmp_path / "here", shard_size=10**5)

  def watched(method, path, query):
    if method == "PUT":
      sent.append(path.rpartition("/")[2])
    return None

  with store.failing(watched):
    export("deepseek3", out, shard_size=10**5, params=params)
  names = sorted(path.name for path in (tmp_path / "here").iterdir())
  assert sent[-1] == "config.json"
  assert sorted(sent) == names
  assert [store.read(f"exports/a/{name}") for name in names] == [(tmp_path / "here" / name).read_bytes() for name in names]
  with pytest.raises(UserError, match="already exists"):
    export("deepseek3", out, params=params)
  refused = lambda method, path, query: "403" if method == "PUT" and path.endswith("index.json") else None
  other = Place(f"s3://{BUCKET}/exports/b")
  with store.failing(refused), pytest.raises(UserError, match=r"exports/b/model\.safetensors\.index\.json: permission denied"):
    export("deepseek3", other, shard_size=10**5, params=params)
  assert not store.names("exports/b")


def test_failures_of_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture):
  for words, message in [
    (["export"], "needs RUN_OR_DIR"),
    (["export", str(tmp_path)], "needs --out"),
    (["export", str(tmp_path), "--out", str(tmp_path / "x")], "no complete checkpoint"),
    (["export", str(tmp_path), "--out", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
    (["export", str(tmp_path), "--out", "nowhere://x/y"], "unknown protocol nowhere://"),
    (["export", str(tmp_path), "--out", "gs:/x/y"], "gs:/x/y is a URL, not a path"),
    (["export", str(tmp_path), "--out", "x", "--shard-size", "5GiB"], "shard size '5GiB'"),
    (["export", str(tmp_path), "--out", "x", "steps=5"], "unknown word 'steps=5'"),
    (
      ["export", str(tmp_path), "--out", "x", "--format", "gguf"],
      "options are --out, --dtype, --shard-size, --merge, --adapter",
    ),
    (["import", "--out", str(tmp_path / "x")], "needs HF_DIR"),
    (["import", str(tmp_path), "--out", str(tmp_path / "x")], "has no config.json"),
    (["import", str(checkpoint("gemma3_text")), "--out", str(tmp_path / "x"), "weight_dtyp=float16"], "weight_dtype"),
  ]:
    assert main(words) == 2, words
    assert message in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def test_a_run_without_a_checkpoint_is_named_as_one(tmp_path: Path, capsys: pytest.CaptureFixture):
  (tmp_path / "config.yml").touch()
  for words in (
    ["export", str(tmp_path), "--out", str(tmp_path / "x")],
    ["generate", "--checkpoint", str(tmp_path), "--prompt", "a"],
    ["train", "gemma3-tiny", f"init_from={tmp_path}"],
  ):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "the run ended before its first one was saved\n" in said
    assert f"\n  fix: maxtext-like train {tmp_path}/config.yml" in said


def test_import_refuses_numbers_that_are_not_finite_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
  source = tmp_path / "source"
  shutil.copytree(checkpoint("stress_fp16_mlp"), source)
  raw = bytearray((source / "model.safetensors").read_bytes())
  raw[-2:] = b"\xc0\x7f"  # bfloat16 NaN
  (source / "model.safetensors").write_bytes(raw)
  assert main(["import", str(source), "--out", str(tmp_path / "out")]) == 2
  assert "non-finite numbers in " in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_file_survives_config_json(name: str):
  """The config.json of an exported model describes the same model as the model file."""
  config = load_config(name).config
  vision = config.vision if config.vision.hidden_size_for_vit else None
  shown = export_config(config.model, "bfloat16", vision and dataclasses.replace(vision, use_multimodal=True))
  read = interpret(json.loads(json.dumps(shown)), "config.json")
  ours = dataclasses.asdict(config.model)
  changed = {key: (ours[key], value) for key, value in read.model.items() if ours[key] != value}
  changed.pop("model_name")
  assert not changed


@pytest.mark.parametrize("name", ["gemma3-tiny", "gemma4-tiny", "qwen3-tiny"])
def test_a_model_that_transformers_would_compute_otherwise_is_refused(name: str):
  model = load_config(name, ["attn_logits_soft_cap=50"]).config.model
  with pytest.raises(UserError, match=r"attn_logits_soft_cap = 50: transformers.* would give other results"):
    export_config(model, "bfloat16")


def test_params_are_those_of_the_file(tmp_path: Path):
  params = export("gemma3_text", tmp_path / "out", dtype="float32")
  config, loaded = load_checkpoint_config(tmp_path / "out")
  decoder = build_decoder(loaded.config.model, Precision(weight_dtype="float32"))
  again = Weights(tmp_path / "out", decoder, config).load()
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(again))


@pytest.mark.slow
def test_every_token_that_ends_an_answer_survives_training(tmp_path: Path, capsys: pytest.CaptureFixture):
  """Both tokens that end an answer survive import, train and export, and also train and export. A chat model that knows only
  one of them may never stop."""
  source = copy_golden("gemma3_text", tmp_path / "source")
  config = json.loads((source / "config.json").read_text())
  (source / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 4]}))
  ours, run, out, again = (tmp_path / name for name in ("ours", "run", "out", "again"))
  assert main(["import", str(source), "--out", str(ours)]) == 0
  assert load_config(ours / "model.yml").config.model.eos_token_id == (1, 4)
  # A configuration that names only one of them, as the files in configs/models do, trains the same model.
  words = ["steps=1", f"output_dir={tmp_path}", "run_name=run", "max_target_length=16", "per_device_batch_size=1"]
  text = tmp_path / "a.txt"
  text.write_text("what is this, and that? " * 40)
  words += ["dataset=text", f"dataset_path={text}", "eos_token_id=1", "enable_tensorboard=false", "eval_fraction=0"]
  assert main(["train", str(ours / "model.yml"), f"init_from={ours}", *words]) == 0
  assert main(["export", str(run), "--out", str(out)]) == 0
  for name in ("config.json", "generation_config.json"):
    assert json.loads((out / name).read_text())["eos_token_id"] == [1, 4], name
  model = load(ours)
  assert stop_tokens(model.tokenizer, model.files, model=model.model.config.model) == {1, 4}
  # A generation_config.json is copied as it is, and config.json lists the tokens as well.
  (source / "generation_config.json").write_text('{"eos_token_id": [1, 4, 3]}')
  shutil.rmtree(run)
  assert main(["train", str(ours / "model.yml"), f"init_from={source}", *words]) == 0
  assert main(["export", str(run), "--out", str(again)]) == 0
  assert json.loads((again / "config.json").read_text())["eos_token_id"] == [1, 4]
  assert (again / "generation_config.json").read_text() == '{"eos_token_id": [1, 4, 3]}'
