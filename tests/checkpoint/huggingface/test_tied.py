"""An output head and an embedding in one file: which of them is used, from import to export, as in transformers 5."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from maxtext_like import load
from maxtext_like.api.forward import forward
from maxtext_like.checkpoint.huggingface.config import read_config
from maxtext_like.checkpoint.huggingface.shards import Shards
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.tied import other_head
from maxtext_like.checkpoint.huggingface.weights import load_hugging_face
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.cli.main import main
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from tests.generation.letters import write_letters

GOLDEN = Path(__file__).parents[2] / "golden"
# The names of the embedding and of the head in the file.
TIED = {
  "gemma3_text": ("model.embed_tokens.weight", "lm_head.weight"),
  "gemma3_vision": ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
  "gemma4_e2b": ("model.language_model.embed_tokens.weight", "lm_head.weight"),
}


def rewritten(folder: Path, case: str, change: Any) -> Path:
  """Write a copy of a golden checkpoint whose tensors, {name: array}, ``change`` has edited."""
  folder.mkdir(parents=True, exist_ok=True)
  file = SafetensorsFile(GOLDEN / case / "checkpoint" / "model.safetensors")
  arrays = {name: np.array(file.tensor(name)) for name in file.entries}
  change(arrays, *TIED[case])
  dtypes = {"float32": "F32", "bfloat16": "BF16"}
  write(folder, [Source(n, dtypes[a.dtype.name], a.shape, lambda a=a: a) for n, a in arrays.items()], shard_size=10**9)
  shutil.copy(GOLDEN / case / "checkpoint" / "config.json", folder)
  return folder


def another_head(arrays: dict[str, np.ndarray], embedding: str, head: str) -> None:
  arrays[head] = arrays[embedding].copy()
  arrays[head][-1, -1] += 0.5  # one number in the last block of the comparison


def the_same_head(arrays: dict[str, np.ndarray], embedding: str, head: str) -> None:
  arrays[head] = arrays[embedding].astype(np.float32)  # values are compared, not dtypes


def nothing_but_the_head(arrays: dict[str, np.ndarray], embedding: str, head: str) -> None:
  arrays[head] = arrays.pop(embedding)


def logits(folder: Path, tmp_path: Path, *words: str) -> tuple[np.ndarray, list[str]]:
  np.savez(tmp_path / "in.npz", input_ids=np.array([[2, 5, 9, 14]]))
  found = forward(folder, tmp_path / "in.npz", "dtype=float32", *words)
  return found.arrays["logits"], list(found.notes)


@pytest.mark.parametrize("case", TIED)
def test_a_head_that_differs_is_the_head(case: str, tmp_path: Path):
  folder = rewritten(tmp_path / "model", case, another_head)
  config = read_config(folder)
  assert not config.model["logits_via_embedding"]
  (note,) = config.notes
  assert note.startswith(f"{TIED[case][1]} differs from the embedding")
  assert read_config(GOLDEN / case / "checkpoint").model["logits_via_embedding"]


@pytest.mark.slow
def test_it_is_the_head_in_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture):
  case = "gemma3_text"
  folder = rewritten(tmp_path / "model", case, another_head)
  got, notes = logits(folder, tmp_path)
  plain, _ = logits(GOLDEN / case / "checkpoint", tmp_path)
  assert any("differs from the embedding" in note for note in notes)
  np.testing.assert_allclose(got[..., :-1], plain[..., :-1], rtol=0, atol=1e-5)
  assert np.abs(got[..., -1] - plain[..., -1]).min() > 1e-3
  write_letters(folder)
  assert not load(folder).model.decoder.cfg.tied
  ours, out = tmp_path / "ours", tmp_path / "out"
  assert main(["import", str(folder), "--out", str(ours)]) == 0
  assert "note: lm_head.weight differs from the embedding" in capsys.readouterr().out
  assert not load_config(ours / "model.yml").config.model.logits_via_embedding
  assert main(["export", str(ours), "--out", str(out)]) == 0
  assert not json.loads((out / "config.json").read_text())["tie_word_embeddings"]
  before, after = Shards(folder), Shards(out)
  assert sorted(before) == sorted(after)
  assert all(before.raw(name).tobytes() == after.raw(name).tobytes() for name in before)
  np.testing.assert_array_equal(logits(out, tmp_path)[0], got)


def test_a_run_whose_model_ties_them_is_refused_and_told(tmp_path: Path):
  folder = rewritten(tmp_path / "model", "gemma3_text", another_head)
  model = load_config(_model_file(tmp_path)).config.model
  decoder = load(write_letters(folder)).model.decoder
  with pytest.raises(UserError) as error:
    load_hugging_face(folder, decoder, model=model)
  message = str(error.value)
  assert "\n  tie_word_embeddings (logits_via_embedding): tensors false, this run true" in message
  assert "\n  note: lm_head.weight differs from the embedding" in message
  untied = load_config(_model_file(tmp_path), ["logits_via_embedding=false"]).config.model
  assert "head" in load_hugging_face(folder, decoder, model=untied)


def _model_file(tmp_path: Path) -> Path:
  """Write the model of the golden checkpoint's config.json to a model file."""
  from maxtext_like.checkpoint.huggingface.model_file import model_file

  path = tmp_path / "tied.yml"
  path.write_text(model_file(read_config(GOLDEN / "gemma3_text" / "checkpoint"), "golden"))
  return path


@pytest.mark.parametrize("change", [the_same_head, nothing_but_the_head])
@pytest.mark.parametrize("case", ["gemma3_text", "gemma3_vision", "gemma4_e2b"])
@pytest.mark.slow
def test_a_head_that_is_the_embedding(change: Any, case: str, tmp_path: Path):
  folder = rewritten(tmp_path / "model", case, change)
  assert read_config(folder).model["logits_via_embedding"]
  if case != "gemma3_vision" or change is nothing_but_the_head:
    got, notes = logits(folder, tmp_path)
    assert any("tie_word_embeddings" in note for note in notes)
    np.testing.assert_array_equal(got, logits(GOLDEN / case / "checkpoint", tmp_path)[0])


def test_the_same_damage_in_both_does_not_untie_them(tmp_path: Path):
  def damaged(arrays: dict[str, np.ndarray], embedding: str, head: str) -> None:
    arrays[embedding][3, 1] = np.nan
    the_same_head(arrays, embedding, head)

  assert read_config(rewritten(tmp_path / "model", "gemma3_text", damaged)).model["logits_via_embedding"]


def test_without_a_tie_a_missing_embedding_is_missing(tmp_path: Path):
  folder = rewritten(tmp_path / "model", "gemma3_text", nothing_but_the_head)
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
  with pytest.raises(UserError, match="no tensor can be the token embedding"):
    logits(folder, tmp_path)


def test_tables_are_compared_by_their_numbers(tmp_path: Path):
  def quieter(arrays: dict[str, np.ndarray], embedding: str, head: str) -> None:
    arrays[embedding] = arrays[embedding].astype(np.float32)
    arrays[embedding][0, 0] = 1 + 2.0**-20  # 1 in bfloat16
    arrays[head] = arrays[embedding].astype(ml_dtypes.bfloat16)

  def other_shape(arrays: dict[str, np.ndarray], embedding: str, head: str) -> None:
    arrays[head] = arrays[embedding][:-1].copy()

  for i, change in enumerate((quieter, other_shape)):
    assert other_head(rewritten(tmp_path / str(i), "gemma3_text", change), (128, 128)) == "lm_head.weight"
  assert other_head(tmp_path, (128, 128)) is None
