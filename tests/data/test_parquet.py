"""Parquet: rows as documents, row groups, checksums, damaged files, and a missing pyarrow."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.parquet import Parquet
from maxtext_like.errors import UserError


def write(path, values, kind=None, name="text", **options):
  pq.write_table(pa.table({name: pa.array(values, kind), "id": list(range(len(values)))}), path, **options)
  return str(path)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_rows_of_several_files_and_row_groups(tmp_path, kind):
  values = ["a", "b\u2028\0", "", "漢" * 100, "e"]
  paths = [
    write(tmp_path / "a.parquet", values, kind, row_group_size=2),
    write(tmp_path / "b.parquet", [], kind),
    write(tmp_path / "c.parquet", ["f"], kind),
  ]
  documents = Parquet(paths, "text")
  assert [documents.read(i).text for i in range(len(documents))] == [*values, "f"]
  assert [documents.read(i).text for i in (5, 0, 3)] == ["f", "a", values[3]]
  assert documents.groups == [0, 2, 4, 5]
  assert documents.place(3) == f"{paths[0]}, row group 1, row 1"


def test_bad_values(tmp_path, monkeypatch):
  documents = Parquet([write(tmp_path / "a.parquet", ["a", None, "long text"])], "text")
  with pytest.raises(BadRecordError, match="row 1: field 'text' is null"):
    documents.read(1)
  monkeypatch.setattr("maxtext_like.data.parquet.MAX_RECORD_BYTES", 5)
  with pytest.raises(BadRecordError, match="9 characters, more than the limit of 5"):
    documents.read(2)
  binary = pa.array([b"ok", b"\xff\xfe"], pa.binary())
  string = pa.Array.from_buffers(pa.string(), 2, binary.buffers())
  pq.write_table(pa.table({"text": string}), tmp_path / "b.parquet")
  documents = Parquet([str(tmp_path / "b.parquet")], "text")
  assert documents.read(0).text == "ok"
  with pytest.raises(BadRecordError, match="not UTF-8 at byte 0"):
    documents.read(1)


def test_columns(tmp_path):
  path = write(tmp_path / "a.parquet", ["a"], name="body")
  assert Parquet([path], "body").read(0).text == "a"
  with pytest.raises(UserError, match=r"no column 'text' \(data.text_field\); columns: body, id"):
    Parquet([path], "text")
  with pytest.raises(UserError, match=r"column 'id' .* is int64, expected a string"):
    Parquet([path], "id")


def test_no_rows(tmp_path):
  with pytest.raises(UserError, match=r"no records: 1 parquet file\(s\), 0 rows"):
    Parquet([write(tmp_path / "a.parquet", [], pa.string())], "text")


@pytest.mark.parametrize(
  "content", [b"", b"PAR1", b"hello world, no parquet here", b"PAR1" + b"\0" * 50 + b"\xff\xff\xff\x7fPAR1"]
)
def test_not_parquet(tmp_path, content):
  path = tmp_path / "a.parquet"
  path.write_bytes(content)
  with pytest.raises(UserError, match=r"a\.parquet: (not a readable|damaged) parquet file"):
    Parquet([str(path)], "text")


def test_every_flipped_byte_is_found(tmp_path):
  """With checksums in the file, no flip changes a text in silence: it is refused, or does not matter."""
  values = [f"document number {i} with its own words {i * i}" for i in range(40)]
  path = tmp_path / "a.parquet"
  write(path, values, write_page_checksum=True, compression="none", use_dictionary=False)
  good = path.read_bytes()
  refused = 0
  for position in range(4, len(good), 37):
    path.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
    try:
      documents = Parquet([str(path)], "text")
      found = [documents.read(i).text for i in range(len(documents))]
    except (UserError, BadRecordError):
      refused += 1
      continue
    assert found == values, position
  assert refused > 20
  path.write_bytes(good[: len(good) // 2])
  with pytest.raises(UserError):
    Parquet([str(path)], "text")


def test_fingerprint(tmp_path):
  path = write(tmp_path / "a.parquet", ["a", "b"])
  first = Parquet([path], "text").fingerprint()
  assert Parquet([path], "text").fingerprint() == first
  write(path, ["a", "c"])
  assert Parquet([path], "text").fingerprint() != first


def test_without_pyarrow(tmp_path, monkeypatch):
  path = write(tmp_path / "a.parquet", ["a"])
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  with pytest.raises(UserError, match=r"pip install -e '.\[parquet\]'"):
    Parquet([path], "text")
