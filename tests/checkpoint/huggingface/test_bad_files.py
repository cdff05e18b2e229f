"""Malformed files as a user meets them: ``import`` exits with 2, names the file and the reason, and leaves no output."""

import shutil
from pathlib import Path

import pytest

from maxtext_like.cli.main import main
from tests.checkpoint.huggingface.test_tensor_file import MALFORMED

GOLDEN = Path(__file__).parents[2] / "golden"
CONFIGS = {
  "empty": (b"", "not valid JSON"),
  "a list": (b"[1]", "not a JSON object"),
  "cut off": (b'{"model_type": ', "not valid JSON"),
  "no UTF-8": (b"\xff", "UTF-8"),
  "a key twice": (b'{"model_type": "gemma3", "model_type": "gemma4"}', "listed twice"),
  "NaN": (b'{"a": NaN}', "NaN"),
  "too deep": (b"[" * 100_000, "nested too deeply"),
  "too long": (b" " * (5 << 20), "more than the"),
  "another model": (b'{"model_type": "llama"}', "model_type 'llama' is not supported"),
  "no model": (b"{}", "model_type missing"),
  "a size of text": (b'{"model_type": "gemma3_text", "hidden_size": "48"}', "is not an integer"),
}


def imported(source: Path, capsys: pytest.CaptureFixture) -> str:
  """Return the message of an import that must exit with 2 and leave no files."""
  assert main(["import", str(source), "--out", str(source.parent / "out")]) == 2
  assert sorted(path.name for path in source.parent.iterdir()) == [source.name]
  return capsys.readouterr().err


def test_malformed_safetensors_files(tmp_path: Path, capsys: pytest.CaptureFixture):
  source = tmp_path / "source"
  source.mkdir()
  shutil.copy(GOLDEN / "gemma3_text/checkpoint/config.json", source)
  some = dict(list(MALFORMED.items())[::2])  # test_tensor_file.py covers all of them
  assert len(some) > 20
  for what, (content, reason) in some.items():
    (source / "model.safetensors").write_bytes(content)
    message = imported(source, capsys)
    assert f"{source}/model.safetensors" in message, what
    assert reason in message, what


def test_every_malformed_config(tmp_path: Path, capsys: pytest.CaptureFixture):
  source = tmp_path / "source"
  shutil.copytree(GOLDEN / "gemma3_text/checkpoint", source)
  for what, (content, reason) in CONFIGS.items():
    (source / "config.json").write_bytes(content)
    message = imported(source, capsys)
    assert f"{source}/config.json" in message, what
    assert reason in message, what
