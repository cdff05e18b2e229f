"""Keys that hold a path, and URLs as their values."""

import argparse

import pytest

from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.config.paths import LOCAL_KEYS, PLACE_KEYS, is_url, new_file, require_local
from maxtext_like.config.schema import LEAVES
from maxtext_like.errors import UserError
from maxtext_like.storage import Place


def test_every_key_with_a_path_is_known():
  named = {leaf for leaf in LEAVES if leaf.endswith(("_dir", "_path", "_from", "_file")) or leaf == "tokenizer"}
  assert named | {"checkpoint_mirror"} == {*LOCAL_KEYS, *PLACE_KEYS}


@pytest.mark.parametrize("key", LOCAL_KEYS)
def test_a_url_is_refused_as_it_was_typed(key):
  with pytest.raises(UserError) as refused:
    load_config("gemma4-tiny", [f"{key}=gs://bucket//a/../b/"])
  assert f'{key} = gs://bucket//a/../b/ is a URL, not a path\n  where: argument "{key}=gs://bucket//a/../b/"' in str(
    refused.value
  )


def test_every_url_of_a_command_is_listed():
  with pytest.raises(UserError) as refused:
    load_config("gemma4-tiny", ["dataset=text", "dataset_path=[/a, s3:/b, s3://b, file://c]", "output_dir=http://d"])
  assert "3 problems" in str(refused.value)


def test_names_of_files_may_be_url_like():
  assert not any(is_url(text) for text in ("://b", "/a://b", "C:/x", "gs:", "1s://x", "bytes", ""))
  assert require_local("bags:/x") == "bags:/x"


@pytest.mark.parametrize("text", ["gs://b", "s3://b/x", "hf://a/b", "https://a", "file:///x", "memory://x", "gs:/b"])
def test_urls(text):
  with pytest.raises(UserError, match=f"^{text} is a URL"):
    require_local(text)


@pytest.mark.parametrize("key", PLACE_KEYS)
@pytest.mark.parametrize(("given", "meant"), [("gs:/b/x", "gs://b/x"), ("file:/b/x", "/b/x")])
def test_a_url_needs_both_slashes(key, given, meant):
  more = {"dataset_path": ["dataset=text"], "eval_path": ["dataset=text", "dataset_path=/a", "eval_interval=1"]}.get(key, [])
  with pytest.raises(UserError, match=f"^{key} = {given} is not a complete URL(.|\n)*fix: write {meant}$"):
    load_config("gemma4-tiny", [*more, f"{key}={given}"])
  load_config("gemma4-tiny", [*more, f"{key}=gs://b/x"])


@pytest.mark.parametrize("words", [("{}/model.yml",), ("gemma4-tiny", "{}/mine.yml")])
def test_configuration_files_may_be_in_a_store(words, monkeypatch, tmp_path):
  monkeypatch.setenv("MAXTEXT_LIKE_COPIES", str(tmp_path))
  words = [word.format("memory://of-test-paths") for word in words]
  with pytest.raises(UserError, match=f"^{words[-1]}: no such object"):
    load_config(words[0], words[1:])
  tiny = configs_folder() / "models" / "gemma4-tiny.yml"
  Place(words[-1]).write_bytes(tiny.read_bytes().replace(b"training:\n", b"training:\n  steps: 7\n"))
  assert load_config(words[0], words[1:]).config.training.steps == 7
  with pytest.raises(UserError, match=r"gs:/b/model\.yml is a URL, not a path"):
    load_config("gs:/b/model.yml", [])


def test_a_run_can_be_in_two_kinds_of_store():
  load_config("gemma4-tiny", ["output_dir=gs://b/runs"])
  load_config("gemma4-tiny", ["output_dir=s3://b/runs"])
  with pytest.raises(UserError, match=r"(?s)output_dir = abfs://b/runs: .*gs:// and s3.*mirror=abfs://b/runs"):
    load_config("gemma4-tiny", ["output_dir=abfs://b/runs"])
  with pytest.raises(UserError, match=r"checkpoint_mirror = /m with output_dir = gs://b/runs"):
    load_config("gemma4-tiny", ["output_dir=gs://b/runs", "checkpoint_mirror=/m"])


@pytest.mark.parametrize(
  ("name", "wrong"), [("", "is a directory"), ("nowhere/x.json", "the folder of this file does not exist")]
)
def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path, name, wrong):
  with pytest.raises(argparse.ArgumentTypeError, match=wrong):
    new_file(str(tmp_path / name))
  assert new_file(str(tmp_path / "x.json")) == str(tmp_path / "x.json")
  (tmp_path / "x.json").write_text("{}")
  assert new_file(str(tmp_path / "x.json")) == str(tmp_path / "x.json")
