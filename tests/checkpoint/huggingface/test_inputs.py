"""Inputs of ``forward``: arrays mean what they mean in transformers, and arrays that cannot be used are refused."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_like.checkpoint.huggingface.inputs import make_batch, read_arrays
from maxtext_like.errors import UserError
from maxtext_like.layers.embedding import Lookup

IDS = np.array([[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]])


def batch(**arrays: Any) -> dict[str, np.ndarray]:
  arrays = {"input_ids": IDS} | {name: np.asarray(value) for name, value in arrays.items()}
  return make_batch(arrays, "in.npz", vocab_size=10).batch


def test_ids_alone_are_rows_of_one_document():
  found = batch()
  np.testing.assert_array_equal(found["tokens"], IDS)
  np.testing.assert_array_equal(found["positions"], [range(5)] * 2)
  np.testing.assert_array_equal(found["segments"], np.ones((2, 5)))
  assert "targets" not in found
  assert {array.dtype.name for array in found.values()} == {"int32"}


def test_labels_are_shifted_and_nothing_follows_the_last():
  found = batch(labels=[[5, 6, -100, 8, 9], [1, 2, 3, 4, 0]])
  np.testing.assert_array_equal(found["targets"], [[6, -100, 8, 9, -100], [2, 3, 4, 0, -100]])


def test_mask_on_either_side_keeps_positions_and_drops_targets_at_padding():
  found = batch(attention_mask=[[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], labels=IDS)
  np.testing.assert_array_equal(found["segments"], [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
  np.testing.assert_array_equal(found["positions"], [range(5)] * 2)
  np.testing.assert_array_equal(found["targets"], [[6, 7, -100, -100, -100], [-100, -100, 4, 0, -100]])
  np.testing.assert_array_equal(batch(attention_mask=np.ones((2, 5), bool))["segments"], np.ones((2, 5)))


def test_positions_that_jump_begin_a_document_unless_there_is_a_mask():
  positions = [[0, 1, 0, 1, 2], [7, 8, 9, 20, 21]]
  found = batch(position_ids=positions, labels=IDS)
  np.testing.assert_array_equal(found["segments"], [[1, 1, 2, 2, 2], [1, 1, 1, 2, 2]])
  np.testing.assert_array_equal(found["positions"], positions)
  np.testing.assert_array_equal(found["targets"][0], [6, 7, 8, 9, -100])  # as in transformers, documents do not change targets
  masked = batch(position_ids=positions, attention_mask=np.ones((2, 5), np.int64))
  np.testing.assert_array_equal(masked["segments"], np.ones((2, 5)))
  np.testing.assert_array_equal(batch(position_ids=[[3, 4, 5, 6, 7]])["positions"], [range(3, 8)] * 2)


def test_segments_restart_positions_and_part_targets():
  found = batch(segment_ids=[[1, 1, 2, 2, 0], [4, 4, 4, 9, 9]], labels=IDS)
  np.testing.assert_array_equal(found["positions"], [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]])
  np.testing.assert_array_equal(found["targets"], [[6, -100, 8, -100, -100], [2, 3, -100, 0, -100]])
  found = batch(segment_ids=[[1, 1, 2, 2, 2]] * 2, attention_mask=[[1, 1, 1, 1, 0]] * 2, position_ids=[[0, 1, 2, 3, 4]])
  np.testing.assert_array_equal(found["segments"][0], [1, 1, 2, 2, 0])
  np.testing.assert_array_equal(found["positions"][0], range(5))


def test_placeholders_may_lie_beyond_the_vocabulary_and_every_other_token_has_a_row():
  lookup = Lookup(vocab_size=10, per_layer_rows=8, placeholders=(500, 9))
  found = make_batch({"input_ids": np.array([[1, 500, 9, 7]])}, "in.npz", vocab_size=10, lookup=lookup).batch
  np.testing.assert_array_equal(found["tokens"], [[1, 500, 9, 7]])
  with pytest.raises(UserError, match=r"input_ids\[0, 1\] = 8: the per-layer embedding has rows for ids 0 to 7"):
    make_batch({"input_ids": np.array([[1, 8]])}, "in.npz", vocab_size=10, lookup=lookup)
  with pytest.raises(UserError, match="= 501: the vocabulary has ids 0 to 9"):
    make_batch({"input_ids": np.array([[501]])}, "in.npz", vocab_size=10, lookup=lookup)


def test_names_without_a_meaning_are_told():
  assert make_batch({"input_ids": IDS, "note": IDS}, "x", vocab_size=10).unused == ("note",)


WRONG: list[tuple[dict[str, Any], str]] = [
  ({"input_ids": [[1, 10, 2]]}, r"input_ids\[0, 1\] = 10: the vocabulary has ids 0 to 9"),
  ({"input_ids": [[1, -1]]}, "input_ids: -1 is out of range"),
  ({"input_ids": [[1.0, 2.0]]}, "input_ids: dtype float64, expected integers"),
  ({"input_ids": [[True]]}, "input_ids: dtype bool"),
  ({"input_ids": [["a"]]}, "input_ids: dtype"),
  ({"input_ids": [1, 2]}, r"input_ids: shape \[2\]"),
  ({"input_ids": [[[1]]]}, "input_ids: shape"),
  ({"input_ids": np.zeros((2, 0), int)}, r"shape \[2, 0\]"),
  ({"input_ids": np.zeros((0, 3), int)}, r"shape \[0, 3\]"),
  ({"input_ids": np.array([[2**63]], np.uint64)}, "out of range"),
  ({"labels": IDS[:, :4]}, r"labels: shape \[2, 4\], expected that of input_ids, \[2, 5\]"),
  ({"labels": IDS + 1}, "labels: 10 is out of range"),
  ({"labels": IDS - 101}, "labels: -101 is out of range"),
  ({"labels": IDS - 3}, "negative values other than -100"),
  ({"labels": IDS * 1.0}, "labels: dtype"),
  ({"attention_mask": IDS}, "attention_mask: 9 is out of range, expected from 0 to 1"),
  ({"attention_mask": np.ones((2, 1, 5, 5), int)}, "attention_mask: shape"),
  ({"position_ids": -IDS}, "position_ids: -9 is out of range"),
  ({"position_ids": IDS + 2**31}, "position_ids"),
  ({"segment_ids": IDS - 1}, "segment_ids: -1 is out of range"),
  ({"segment_ids": IDS[:1]}, "segment_ids: shape"),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arrays_are_refused_by_name(arrays: dict[str, Any], message: str):
  with pytest.raises(UserError, match=message) as error:
    batch(**arrays)
  assert str(error.value).startswith("in.npz: ")


def test_missing_ids():
  with pytest.raises(UserError, match="input_ids is missing; found labels"):
    make_batch({"labels": IDS}, "in.npz", vocab_size=10)


class _Canary:
  def __init__(self, path: Path):
    self.path = path

  def __reduce__(self):
    return (Path.touch, (self.path,))


def test_objects_are_refused_and_not_unpickled(tmp_path: Path):
  canary, path = tmp_path / "canary", tmp_path / "in.npz"
  np.savez(path, input_ids=np.array([_Canary(canary)], object))
  with pytest.raises(UserError, match="pickle can run code"):
    read_arrays(path)
  path.write_bytes(pickle.dumps(_Canary(canary)))
  with pytest.raises(UserError, match=r"not an \.npz file"):
    read_arrays(path)
  assert not canary.exists()


def test_broken_files(tmp_path: Path):
  path = tmp_path / "in.npz"
  with pytest.raises(UserError, match="No such file"):
    read_arrays(path)
  for content in (b"", b"PK\x03\x04", b"input_ids"):
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"not an \.npz file"):
      read_arrays(path)
  buffer = io.BytesIO()
  np.savez_compressed(buffer, input_ids=IDS)
  whole = bytearray(buffer.getvalue())
  whole[60:70] = bytes(10)
  path.write_bytes(whole)
  with pytest.raises(UserError, match=r"in\.npz"):
    read_arrays(path)


def test_a_file_that_unpacks_beyond_reason_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  path = tmp_path / "in.npz"
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("input_ids.npy", bytes(1 << 20))
  monkeypatch.setattr("maxtext_like.checkpoint.huggingface.inputs._SIZE_LIMIT", 1 << 19)
  with pytest.raises(UserError, match="unpacks to 1048576 bytes"):
    read_arrays(path)
