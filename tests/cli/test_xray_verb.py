"""``maxtext-like xray`` reads text with the tokenizer of its checkpoint, or as bytes without a checkpoint."""

from types import SimpleNamespace

import pytest

from maxtext_like.capacity import memory
from maxtext_like.cli.main import main
from maxtext_like.errors import UserError
from maxtext_like.training.run import batches
from maxtext_like.training.step import program


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_checkpoint_brings_its_tokenizer(tmp_path, monkeypatch, capsys, with_checkpoint):
  directory = tmp_path / "hub"
  directory.mkdir()
  for name in ("config.json", "tokenizer.json"):
    (directory / name).write_text("{}")
  asked = []

  def open_data(program, split, settings):
    asked.append(settings.tokenizer)
    raise UserError("that is all this test wants to know")

  monkeypatch.setattr(program, "make_program", lambda config: SimpleNamespace(config=config))
  monkeypatch.setattr(memory, "require_fit", lambda program: None)
  monkeypatch.setattr(batches, "open_data", open_data)
  words = ["--checkpoint", str(directory)] if with_checkpoint else []
  assert main(["xray", "gemma3-tiny", f"output_dir={tmp_path}", *words]) == 2
  assert "that is all" in capsys.readouterr().err
  assert asked == [str(directory) if with_checkpoint else "bytes"]
