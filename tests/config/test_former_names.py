"""Renamed keys: the former name still works wherever a key is read, and a note names the new one."""

import pytest

from maxtext_like.api.keys import list_keys
from maxtext_like.checkpoint.store import manifest
from maxtext_like.config import former_names
from maxtext_like.config.choices import OBJECTIVES
from maxtext_like.config.layer_precision import layer_values
from maxtext_like.config.load import load_config
from maxtext_like.config.schema import LEAVES
from maxtext_like.errors import UserError


def test_the_table_leads_from_names_that_are_gone_to_keys():
  assert set(former_names.RENAMED.values()) <= set(LEAVES)
  assert not set(former_names.RENAMED) & set(LEAVES)


def test_a_former_value():
  assert {key: set(values.values()) for key, values in former_names.RENAMED_VALUES.items()} == {"objective": set(OBJECTIVES)}
  loaded = load_config("gemma4-tiny", ["objective=language_modelling"])
  assert loaded.config.training.objective == "language_modeling"
  assert any("language_modelling" in note and "language_modeling" in note for note in loaded.notes)
  stored = {"training": {"objective": "language_modelling", "steps": 3, "milestones": [1, 2]}}
  assert former_names.renamed(stored) == {"training": stored["training"] | {"objective": "language_modeling"}}


def test_a_word_with_the_former_name():
  loaded = load_config("gemma4-tiny", ["dtype=float16", "float16_rescue=false"])
  assert loaded.config.precision.float16_clamp is False
  assert any("float16_rescue" in note and "float16_clamp" in note for note in loaded.notes)
  assert not any("float16_rescue" in note for note in load_config("gemma4-tiny", ["float16_clamp=true"]).notes)


def test_a_file_with_the_former_name(tmp_path):
  path = tmp_path / "gemma4-tiny.yml"
  words = ["dtype=float16", "float16_clamp=false", "layer_precision=[1 float16_clamp=true]"]
  text = load_config("gemma4-tiny", words).to_yaml()
  path.write_text(text.replace("float16_clamp", "float16_rescue"))
  config = load_config(path).config.precision
  assert config.float16_clamp is False
  assert layer_values(config.layer_precision, 6)[1] == {"float16_clamp": True}


def test_a_layer_with_the_former_name():
  loaded = load_config("gemma4-tiny", ["dtype=float16", "layer_precision=[0 float16_rescue=false, 2-3 dtype=float32]"])
  assert loaded.config.precision.layer_precision == ("0 float16_clamp=false", "2-3 dtype=float32")
  assert sum("float16_rescue is now called float16_clamp" in note for note in loaded.notes) == 1
  assert not any("float16_rescue" in note for note in load_config("gemma4-tiny", ["layer_precision=[0 dtype=bfloat16]"]).notes)


def test_both_names_are_one_key_twice(tmp_path):
  path = tmp_path / "gemma4-tiny.yml"
  text = load_config("gemma4-tiny").to_yaml()
  path.write_text(text.replace("  float16_clamp: true", "  float16_clamp: true\n  float16_rescue: true"))
  with pytest.raises(UserError, match="duplicate key 'float16_clamp'"):
    load_config(path)


def test_a_stored_configuration():
  stored = {"precision": {"float16_rescue": False, "layer_precision": ["0-2 float16_rescue=true"]}, "model": {"emb_dim": 8}}
  present = {"precision": {"float16_clamp": False, "layer_precision": ["0-2 float16_clamp=true"]}, "model": {"emb_dim": 8}}
  assert former_names.renamed(stored) == present


def test_a_manifest_with_the_former_name(tmp_path):
  config = {"precision": {"float16_rescue": False}}
  written = manifest.Manifest(step=1, finite=True, config=config, extra={}, leaves={}, files={}, versions={})
  manifest.write(tmp_path, written)
  assert manifest.read(tmp_path).config == {"precision": {"float16_clamp": False}}


def test_the_search_for_keys_says_the_present_name():
  assert any("float16_clamp" in line for line in list_keys("float16_rescue").elsewhere)
