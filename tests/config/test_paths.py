"""Keys that hold a path, and URLs given to them."""

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.config.paths import PATH_KEYS, is_url, require_local
from maxtext_like.config.schema import LEAVES
from maxtext_like.errors import UserError

REMOTE = ("checkpoint_mirror",)  # keys that may hold a URL


def test_every_key_with_a_path_is_known():
  named = {leaf for leaf in LEAVES if leaf.endswith(("_dir", "_path", "_from", "_file")) or leaf == "tokenizer"}
  assert named - set(REMOTE) == set(PATH_KEYS)


@pytest.mark.parametrize("key", PATH_KEYS)
def test_a_url_is_refused_as_it_was_typed(key):
  more = {"dataset_path": ["dataset=text"], "eval_path": ["dataset=text", "dataset_path=/a", "eval_interval=1"]}.get(key, [])
  with pytest.raises(UserError) as refused:
    load_config("gemma4-tiny", [*more, f"{key}=gs://bucket//a/../b/"])
  assert f'{key} = gs://bucket//a/../b/ is a URL, not a path\n  where: argument "{key}=gs://bucket//a/../b/"' in str(
    refused.value
  )


def test_every_url_of_a_command_is_listed():
  with pytest.raises(UserError) as refused:
    load_config("gemma4-tiny", ["dataset=text", "dataset_path=[/a, s3://b, hf://c]", "output_dir=http://d"])
  assert "3 problems" in str(refused.value)


def test_names_of_files_may_be_url_like():
  assert not any(is_url(text) for text in ("://b", "/a://b", "C:/x", "gs:", "1s://x", "bytes", ""))
  assert require_local("bags:/x") == "bags:/x"


@pytest.mark.parametrize("text", ["gs://b", "s3://b/x", "hf://a/b", "https://a", "file:///x", "memory://x", "gs:/b"])
def test_urls(text):
  with pytest.raises(UserError, match=f"^{text} is a URL"):
    require_local(text)


@pytest.mark.parametrize(("given", "meant"), [("gs:/b/x", "gs://b/x"), ("file:/b/x", "/b/x")])
def test_a_mirror_needs_both_slashes(given, meant):
  with pytest.raises(UserError, match=f"^checkpoint_mirror = {given} would be a folder named (.|\n)*fix: write {meant}$"):
    load_config("gemma4-tiny", [f"checkpoint_mirror={given}"])
  assert load_config("gemma4-tiny", ["checkpoint_mirror=gs://b/x"]).config.checkpoint.checkpoint_mirror == "gs://b/x"


@pytest.mark.parametrize("words", [("gs://b/model.yml",), ("gemma4-tiny", "gs://b/mine.yml")])
def test_configuration_files_too(words):
  with pytest.raises(UserError, match=f"{words[-1]} is a URL"):
    load_config(words[0], words[1:])
