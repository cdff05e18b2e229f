"""A file that is not regular is never opened, wherever it is named."""

import os
import socket
import time

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.data.image_text.image_names import shown
from maxtext_like.data.image_text.images import BadImageError, load_image
from maxtext_like.data.readers import input_files
from maxtext_like.data.tokenization.tokenizer import load_tokenizer
from maxtext_like.errors import UserError


@pytest.fixture
def odd(tmp_path, monkeypatch):
  """A FIFO without a writer, a socket, a folder, a device."""
  monkeypatch.chdir(tmp_path)  # the path of a socket must be short
  os.mkfifo("fifo.json")
  with socket.socket(socket.AF_UNIX) as listening:
    listening.bind("socket.json")
    os.mkdir("folder.json")
    os.symlink("/dev/zero", "device.json")
    yield {"fifo.json": "a FIFO", "socket.json": "a socket", "folder.json": "a folder", "device.json": "a device"}


def test_odd_files_are_refused_at_once(odd):
  vision = load_config("gemma4-tiny", ["use_multimodal=true"]).config.vision
  for name, kind in odd.items():
    with pytest.raises(input_files.NotRegularError, match=f"{kind}, not a regular file"):
      input_files.open_regular(name)
    with pytest.raises(BadImageError, match=f"^{kind}, not a regular file"):
      load_image(name, vision)
    with pytest.raises(UserError, match=f"{name}: {kind}, not a regular file"):
      input_files.read_bytes(name)
    if kind != "a folder":
      with pytest.raises(UserError, match=f"'{name}' is not a regular file"):
        load_tokenizer(name)
      with pytest.raises(UserError, match=f"{name} is {kind}, not a regular file"):
        input_files.find(name, (), "text")


def test_a_fifo_beside_a_tokenizer(odd, tmp_path):
  from tokenizers import Tokenizer, models

  Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
  os.rename("fifo.json", "tokenizer_config.json")
  with pytest.raises(UserError, match=r"tokenizer_config\.json: a FIFO, not a regular file"):
    load_tokenizer(str(tmp_path))


def test_a_file_that_a_fifo_takes_the_place_of_between_look_and_open(tmp_path, monkeypatch):
  path = tmp_path / "a"
  path.write_text("a")
  regular = os.stat(path)
  path.unlink()
  os.mkfifo(path)
  monkeypatch.setattr(input_files.os, "stat", lambda *_: regular)
  with pytest.raises(input_files.NotRegularError, match="a FIFO"):
    input_files.open_regular(path)


def test_names_in_records_and_folders_forge_no_lines(tmp_path):
  assert shown("a\nerror: forged.png") == "a\\nerror: forged.png"
  (tmp_path / "a\nerror: forged.model").write_bytes(b"")
  with pytest.raises(UserError, match=r"a\\nerror: forged\.model has characters that cannot be printed") as refused:
    load_tokenizer(str(tmp_path))
  assert "\n" not in str(refused.value).removesuffix("\n  fix: rename it")


@pytest.mark.parametrize("name", ["a\nerror: forged.jsonl", "a\x1b[2J.jsonl", "a\rb.jsonl"])
def test_names_that_would_forge_lines_are_refused(name, tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / name).write_text('{"text": "a"}\n')
  for paths in (str(tmp_path), str(tmp_path / "**/*.jsonl"), str(tmp_path / "folder" / name)):
    with pytest.raises(UserError, match="the name has a line break or another character") as refused:
      input_files.find(paths, (".jsonl",), "jsonl")
    assert name not in str(refused.value)
    assert name.encode("unicode_escape").decode() in str(refused.value)


def test_a_long_search_is_told(tmp_path, monkeypatch, caplog):
  def slow(*_: object, **__: object) -> list[str]:
    deadline = time.monotonic() + 60
    while len(caplog.messages) < 2 and time.monotonic() < deadline:
      time.sleep(0.02)
    return []

  monkeypatch.setattr(input_files, "SLOW_SECONDS", 0.05)
  monkeypatch.setattr(input_files.glob, "glob", slow)
  with pytest.raises(UserError, match="the glob matches nothing"):
    input_files.find("/**/*.x", (".x",), "text")
  first, second, *_ = caplog.messages
  assert first.startswith("data.dataset_path '/**/*.x': searching for files in every folder below (")
  assert first == second or first.partition("(")[0] == second.partition("(")[0]
