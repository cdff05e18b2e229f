"""Configurations from Python: every model's configuration survives a ``ConfigDict`` unchanged, and mistakes are reported."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.api.config import load_config
from maxtext_like.api.risk import risk
from maxtext_like.config.files import model_names
from maxtext_like.errors import UserError


@pytest.mark.parametrize("name", model_names())
def test_to_a_config_dict_and_back(name):
  loaded = load_config(name, learning_rate=3e-4, seed=np.int64(7))
  values: Any = loaded.to_config_dict()
  assert values.is_locked
  assert load_config(values).config == loaded.config
  assert load_config(loaded.config).config == loaded.config
  values.training.steps, values.data.dataset_path = 9, ["a b.txt", "ü.txt"]
  changed = load_config(values, "dataset=text", run_name="x").config
  assert (changed.training.steps, changed.data.dataset_path, changed.logging.run_name) == (9, ("a b.txt", "ü.txt"), "x")
  assert changed.model == loaded.config.model


def test_what_was_loaded_is_taken_again():
  loaded = load_config("gemma4-tiny", steps=3)
  assert load_config(loaded) is loaded
  assert load_config(loaded, output_dir=Path("there")).config.logging.output_dir == "there"


def test_a_none_may_become_a_number_and_types_are_judged():
  values: Any = load_config("gemma4-tiny").to_config_dict()
  values.training.lr_schedule_steps = 50
  assert load_config(values).config.training.lr_schedule_steps == 50
  values.training.steps = "many"
  with pytest.raises(UserError, match=r"^ConfigDict: steps: "):
    load_config(values)


def test_mistakes_are_those_of_an_argument():
  with pytest.raises(UserError, match="argument \"stpes=2\": unknown key 'stpes', did you mean 'steps'"):
    load_config("gemma4-tiny", stpes=2)
  with pytest.raises(UserError, match="argument 'steps'"):
    load_config("gemma4-tiny", "steps")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"])
def test_a_dtype_may_be_that_of_arrays(dtype):
  assert load_config("gemma4-tiny", dtype=dtype).config.precision.dtype == "bfloat16"


@pytest.mark.parametrize("given", [None, 3, {"model_name": "gemma4-tiny"}])
def test_what_is_no_configuration_is_told(given: Any):
  with pytest.raises(UserError, match=r"is not a configuration\n  fix: pass a model name"):
    load_config(given)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
  with pytest.raises(UserError, match="is a directory, not a configuration file"):
    load_config(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(UserError, match=r"config\.json: model_type missing is not supported"):
    load_config(tmp_path)


GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3_text" / "checkpoint"


def test_a_checkpoint_alone_is_model_and_weights():
  loaded = load_config(GOLDEN, steps=3)
  model = loaded.config.model
  assert (model.decoder_block, model.vocab_size, model.emb_dim, model.num_decoder_layers) == ("gemma3", 160, 48, 7)
  assert (loaded.config.checkpoint.init_from, loaded.config.training.steps) == (str(GOLDEN), 3)
  assert loaded.origins["model.emb_dim"] == f"{GOLDEN}/config.json"
  assert load_config("gemma3", init_from=GOLDEN, steps=3).config == loaded.config
  with pytest.raises(UserError, match=r"is a checkpoint of gemma3, not of qwen3\n  fix: "):
    load_config("qwen3", init_from=GOLDEN)
  with pytest.raises(UserError, match="gemma3: no such model"):
    load_config("gemma3", init_from="nowhere")


def test_a_checkpoint_of_few_positions_has_rows_as_long(tmp_path):
  text = (GOLDEN / "config.json").read_text()
  (tmp_path / "config.json").write_text(text.replace('"max_position_embeddings": 131072', '"max_position_embeddings": 64'))
  (tmp_path / "model.safetensors").write_bytes((GOLDEN / "model.safetensors").read_bytes())
  assert load_config(tmp_path).config.training.max_target_length == 64
  assert risk(tmp_path).risks
  with pytest.raises(UserError, match="max_target_length = 65 is more than max_position_embeddings = 64"):
    load_config(tmp_path, max_target_length=65)


@pytest.mark.parametrize(
  ("path", "keys", "dataset"),
  [
    ("a.jsonl", {}, "jsonl"),
    ("a.jsonl.gz", {}, "jsonl"),
    ("a/*.parquet", {}, "parquet"),
    ("a.arrow", {}, "arrow"),
    ("notes/*.txt", {}, "text"),
    ("a.py", {}, "text"),
    ("a.csv", {}, "jsonl"),
    ("a.json", {}, "jsonl"),
    ("a.txt", {"data_format": "chat"}, "jsonl"),
    (["b.txt", "a.parquet"], {}, "parquet"),
    ("a.jsonl", {"dataset": "text"}, "text"),
    (None, {"data_format": "chat", "dataset": "parquet", "eval_fraction": 0.0}, None),
  ],
)
def test_the_kind_of_data_set_follows_from_the_files(path, keys, dataset):
  if dataset is None:
    with pytest.raises(UserError, match="dataset: parquet without dataset_path"):
      load_config("gemma4-tiny", **keys)
    return
  loaded = load_config("gemma4-tiny", dataset_path=path, **keys)
  assert loaded.config.data.dataset == dataset
  assert loaded.origins["data.dataset"] == ('argument "dataset=text"' if "dataset" in keys else "follows from dataset_path")
  assert load_config(load_config("gemma4-tiny").config, dataset_path=path, **keys).config.data.dataset == dataset


def test_a_data_set_that_was_chosen_is_not_replaced():
  for dataset in ("python-stdlib", "synthetic"):
    with pytest.raises(UserError, match=f"dataset: {dataset} reads no files, but dataset_path is set"):
      load_config("gemma4-tiny", dataset=dataset, dataset_path="a.jsonl")
