"""Files that are copied together with a model's weights, also from a subfolder, on a disk and in a store."""

import fsspec
import pytest

from maxtext_like.checkpoint.huggingface.writer import new_directory
from maxtext_like.checkpoint.store import sidecar_files
from maxtext_like.storage import Place

MORE = "additional_chat_templates/tool_use.jinja"


@pytest.fixture
def directory(tmp_path):
  (tmp_path / "model" / "additional_chat_templates").mkdir(parents=True)
  for name in ("tokenizer.json", "model.py", MORE, f"{MORE}.py"):
    (tmp_path / "model" / name).write_text(name)
  return tmp_path / "model"


@pytest.fixture
def place():
  yield Place("memory://bucket/out")
  fsspec.filesystem("memory").store.clear()


def test_templates_by_name_stay_below_their_folder(directory, place, tmp_path):
  assert sidecar_files.contents(directory) == {name: name.encode() for name in ("tokenizer.json", MORE)}
  sidecar_files.copy(sidecar_files.find(directory), tmp_path)
  for step in (tmp_path, place):
    sidecar_files.write(step, sidecar_files.of_tokenizer((directory / "tokenizer.json",)))
  for found in (tmp_path / MORE, tmp_path / "tokenizer" / MORE, place / "tokenizer" / MORE):
    assert found.read_bytes() == MORE.encode()


def test_an_export_to_a_store_has_them_too(directory, place):
  with new_directory(place, "tokenizer.json") as new:
    sidecar_files.copy(sidecar_files.find(directory), new.path)
  assert {"/".join(entry.place.parts[-2:]) for entry in place.entries()} == {"out/tokenizer.json", MORE}
