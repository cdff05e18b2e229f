"""Arrow files as `datasets` writes them: rows, nulls, several batches and shards, damage, other files in the folder."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest

from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.readers import arrow
from maxtext_like.data.readers.arrow import Arrow
from maxtext_like.errors import UserError

VALUES = ["a", "b\u2028\0", "", "漢" * 100, None, "e"]


def write(path, values, kind=None, *, batch=2, of_file=False, options=None, name="text"):
  table = pa.table({"id": pa.array(range(len(values)), pa.int64()), name: pa.array(values, kind or pa.string())})
  new = pa.ipc.new_file if of_file else pa.ipc.new_stream
  with new(str(path), table.schema, options=options) as writer:
    writer.write_table(table, max_chunksize=batch)
  return str(path)


def save_to_disk(folder, shards):
  """Writes a folder like datasets 4.x: the shards, state.json and dataset_info.json."""
  folder.mkdir(parents=True)
  names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
  for name, values in zip(names, shards, strict=True):
    write(folder / name, values)
  state = {
    "_data_files": [{"filename": name} for name in names], "_fingerprint": "0123456789abcdef", "_format_columns": None,
    "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": "train",
  }  # fmt: skip
  (folder / "state.json").write_text(json.dumps(state))
  (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))
  return folder


def texts(documents):
  """Returns the texts, read one by one; checks that one pass gives the same."""
  scanned = [None if isinstance(record, BadRecordError) else record.text for record in documents.scan()]
  for i in reversed(range(len(documents))):
    if scanned[i] is None:
      with pytest.raises(BadRecordError, match="field 'text' is null"):
        documents.read(i)
    else:
      assert documents.read(i).text == scanned[i]
  return scanned


@pytest.mark.parametrize("of_file", [False, True])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_rows_of_several_files_and_batches(tmp_path, kind, of_file, monkeypatch):
  many = [None if i % 7 == 3 else f"number {i}" for i in range(40)]
  paths = [
    write(tmp_path / "a.arrow", VALUES, kind, of_file=of_file),
    write(tmp_path / "b.arrow", [], kind, of_file=of_file),
    write(tmp_path / "c.arrow", many, kind, batch=19, of_file=of_file),
  ]
  documents = Arrow(paths, "text")
  assert texts(documents) == [*VALUES, *many]
  assert documents.place(7) == f"{paths[2]}, row 1"
  assert documents.groups is None
  monkeypatch.setattr(arrow, "READ_AT_ONCE", 0)
  assert texts(documents) == [*VALUES, *many]


def test_a_folder_of_save_to_disk(tmp_path):
  folder = save_to_disk(tmp_path / "saved", [["a", "b"], ["c"]])
  write(folder / "cache-0123.arrow", ["of map"])
  files = sorted(map(str, folder.glob("*.arrow")))
  assert texts(Arrow(files, "text")) == ["a", "b", "c"]
  os.remove(files[1])
  with pytest.raises(UserError, match=r"data-00000-of-00002\.arrow: missing, .*state\.json names it \(1 of 2 files"):
    Arrow([files[0], files[2]], "text")
  (folder / "state.json").write_text("{}")
  with pytest.raises(UserError, match=r"state\.json: is not a state.json of datasets' save_to_disk"):
    Arrow([files[2]], "text")


def test_of_several_splits_one_has_to_be_named(tmp_path):
  for split in ("test", "train"):
    save_to_disk(tmp_path / "all" / split, [[split]])
  (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
  files = sorted(map(str, tmp_path.glob("all/*/*.arrow")))
  with pytest.raises(UserError, match=r"all has the splits test, train\n  fix: eval_path=.*all/train"):
    Arrow(files, "text", key="eval_path")
  assert texts(Arrow(files[1:], "text")) == ["train"]


def test_a_cut_or_damaged_file_is_refused_or_harmless(tmp_path):
  """A file cut anywhere is refused. A flipped byte outside the text gives an error, the right texts, or a bad record."""
  path = tmp_path / "a.arrow"
  write(path, values := [f"document number {i}" for i in range(40)], batch=10)
  data = path.read_bytes()
  for cut in [*range(0, len(data), 97), len(data) - 8, len(data) - 1]:
    path.write_bytes(data[:cut])
    with pytest.raises(UserError, match=r"a\.arrow: "):
      Arrow([str(path)], "text")
  wrong = 0
  for at in np.random.default_rng(0).integers(0, len(data), 120).tolist():
    path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    try:
      documents = Arrow([str(path)], "text")
      found = [documents.read(i).text for i in range(len(documents))]
      wrong += found != values
    except (UserError, BadRecordError):
      pass
  assert wrong < 60, "Arrow has no checksums: a flip inside a text shows nowhere"


def test_a_file_that_changes_under_the_run(tmp_path):
  path = tmp_path / "a.arrow"
  write(path, ["one", "two"])
  documents = Arrow([str(path)], "text")
  os.utime(path, (1, 1))
  assert documents.read(0).text == "one"
  data = path.read_bytes()
  path.write_bytes(data[:-20])
  with pytest.raises(UserError, match=r"a\.arrow: cut off, or not an arrow file"):
    documents.read(1)
  write(path, ["one", "two", "three"])
  with pytest.raises(UserError, match=r"a\.arrow: the file changed during the run"):
    documents.read(1)
  path.unlink()
  with pytest.raises(UserError, match="existed when the run started"):
    documents.read(1)


def test_bad_values(tmp_path, monkeypatch):
  binary = pa.array([b"ok", b"\xff\xfe", b"long text"], pa.binary())
  table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, binary.buffers())})
  with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
    writer.write_table(table)
  documents = Arrow([str(tmp_path / "a.arrow")], "text")
  assert documents.read(0).text == "ok"
  with pytest.raises(BadRecordError, match="row 1: not UTF-8 at byte 0"):
    documents.read(1)
  monkeypatch.setattr(arrow, "MAX_RECORD_BYTES", 5)
  with pytest.raises(BadRecordError, match="9 bytes, more than the limit of 5"):
    documents.read(2)


def test_wrong_files(tmp_path):
  path = write(tmp_path / "a.arrow", ["a"], name="body")
  assert Arrow([path], "body").read(0).text == "a"
  with pytest.raises(UserError, match=r"no column 'text' \(data.text_field\); columns: 'id', 'body'\n  fix: text_field=body"):
    Arrow([path], "text")
  with pytest.raises(UserError, match=r"column 'id' .* is int64, expected a string"):
    Arrow([path], "id")
  with pytest.raises(UserError, match=r"data.dataset_path: no records: 1 arrow file\(s\), 0 rows"):
    Arrow([write(tmp_path / "b.arrow", [])], "text")
  packed = write(tmp_path / "c.arrow", ["a" * 1000], options=pa.ipc.IpcWriteOptions(compression="zstd"))
  with pytest.raises(UserError, match=r"c\.arrow: batch 0 is compressed, .*\n  fix: write it without"):
    Arrow([packed], "text")
  for content in (b"", b"ARROW1", b"hello world, no arrow here", b"\xff\xff\xff\xff\0\0\0\0"):
    (tmp_path / "d.arrow").write_bytes(content)
    with pytest.raises(UserError, match=r"d\.arrow: "):
      Arrow([str(tmp_path / "d.arrow")], "text")
