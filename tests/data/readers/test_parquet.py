"""Parquet: rows as documents, row groups, checksums, damaged files, and a missing pyarrow."""

import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.readers.parquet import Parquet
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
  monkeypatch.setattr("maxtext_like.data.readers.parquet.MAX_RECORD_BYTES", 5)
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
  with pytest.raises(UserError, match=r"no column 'text' \(data.text_field\); columns: 'body', 'id'\n  fix: text_field=body"):
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
  """With checksums in the file, a flipped bit never changes a text unnoticed: the file is refused, or the bit is unused."""
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


def test_bombs_are_refused_by_what_the_file_says(tmp_path, monkeypatch):
  """Texts that expand far beyond the size of the file, and rows that hold nothing."""
  monkeypatch.setattr("maxtext_like.data.readers.input_files.UNPACKED_UP_TO", 2**20)
  monkeypatch.setattr("maxtext_like.data.readers.parquet.ROWS_UP_TO", 2**10)
  path = write(tmp_path / "a.parquet", ["x" * 10**6] * 4, compression="zstd", use_dictionary=False)
  with pytest.raises(UserError, match=r"a\.parquet, row group 0: [\d,]+ bytes expand to 4,000,\d+ or more.*decompression bomb"):
    Parquet([path], "text")
  pq.write_table(pa.table({"text": pa.nulls(10**6, pa.string())}), tmp_path / "b.parquet")
  with pytest.raises(UserError, match=r"b\.parquet: 1,000,000 rows in [\d,]+ bytes: refused"):
    Parquet([str(tmp_path / "b.parquet")], "text")


MEASURED = """
import resource, sys
from maxtext_like.data.readers.parquet import Parquet
documents = Parquet([sys.argv[1]], "text")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert [len(documents.read(i).text) for i in (0, 299)] == [16_000_000] * 2
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_equal_texts_are_in_memory_once(tmp_path):
  """4.8 GB of text in a file of 1 KB: reading does not multiply a text that the file stores once."""
  once = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["x" * 16_000_000]))
  pq.write_table(pa.table({"text": once}), tmp_path / "a.parquet", compression="zstd", store_schema=False)
  assert (tmp_path / "a.parquet").stat().st_size < 2000
  done = subprocess.run([sys.executable, "-c", MEASURED, str(tmp_path / "a.parquet")], capture_output=True, text=True)
  assert int(done.stdout) * 1024 < 250e6, done


def test_a_file_that_is_replaced_under_the_run(tmp_path):
  path = write(tmp_path / "a.parquet", ["a", "b", "c"], row_group_size=1)
  documents = Parquet([path], "text")
  assert documents.read(0).text == "a"
  os.utime(path, (1, 1))
  assert documents.read(1).text == "b"
  write(tmp_path / "a.parquet", ["a", "b", "d"], row_group_size=1)
  with pytest.raises(UserError, match=r"a\.parquet: the file changed during the run"):
    documents.read(2)
