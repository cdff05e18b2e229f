"""The positions of lines: compared with a loop over the bytes, and stored between starts."""

import gzip
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.data.readers import compressed, lines
from maxtext_like.data.readers.jsonl import JsonLines
from maxtext_like.data.readers.lines import LineFile, index_lines, kept_index


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"", b"", b"a", b"bc\r", b"\xef\xbb\xbf"]), max_size=12), st.booleans(), st.integers(1, 5))
def test_lines_are_where_a_loop_finds_them(parts, terminated, size):
  data = b"\n".join(parts) + b"\n" * terminated
  index = index_lines(data[i : i + size] for i in range(0, len(data), size))
  found = [(index.number(i), data[index.start(i) : index.end(i)]) for i in range(len(index))]
  wanted = [(i + 1, line) for i, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n")) if line]
  assert found == wanted
  assert (index.size, index.terminated) == (len(data), data.endswith(b"\n"))


@pytest.fixture
def path(tmp_path, monkeypatch):
  monkeypatch.setattr(lines, "KEEP_FROM", 10)
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "one"}\n\n\n{"text": "two"}\n\n{"text": "three"}')
  os.utime(path, (1, 1))
  monkeypatch.setattr(lines, "SETTLED_SECONDS", -1.0)  # its ctime is now
  return path


def test_a_kept_index_spares_the_reading(path, monkeypatch):
  first = JsonLines([str(path)], "text")
  monkeypatch.setattr(lines, "index_lines", lambda contents: pytest.fail("read again"))
  again = JsonLines([str(path)], "text")
  assert [again.read(i).text for i in range(3)] == ["one", "two", "three"]
  assert [again.place(i)[-2:] for i in range(3)] == [":1", ":4", ":6"]
  assert again.fingerprint() == first.fingerprint()
  assert len(list(again.scan())) == 3


@pytest.mark.parametrize("change", ["contents", "entry cut off", "entry flipped", "no entry"])
def test_what_is_kept_counts_while_all_is_the_same(path, change, cache):
  before = os.stat(path)
  JsonLines([str(path)], "text")
  (entry,) = (cache / "maxtext-like" / "data").glob("lines-*")
  data = entry.read_bytes()
  if change == "contents":  # same size and modification time: only the change time of the inode differs
    time.sleep(0.02)
    path.write_text(path.read_text().replace("one", '1"}').replace('1"}"}', '1"}  '))
    os.utime(path, (1, 1))
    assert os.stat(path).st_size == before.st_size
  elif change == "no entry":
    entry.unlink()
  else:
    entry.write_bytes(data[:-3] if change == "entry cut off" else data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
  documents = JsonLines([str(path)], "text")
  assert documents.read(0).text == ("1" if change == "contents" else "one")
  assert entry.read_bytes() == data or change == "contents"


def test_a_file_that_was_just_written_is_not_kept(path, cache, monkeypatch):
  monkeypatch.setattr(lines, "SETTLED_SECONDS", 600.0)
  kept_index(str(path), os.stat(path), lambda: [path.read_bytes()])
  assert not list((cache / "maxtext-like" / "data").glob("*"))


def test_a_packed_file_is_entered_in_its_middle_all_the_same(path, monkeypatch):
  """The restart points of a gzip file are not stored: they are found again on the way to the first chunk that is read."""
  for module in (lines, compressed):
    monkeypatch.setattr(module, "SPACING_BYTES", 2**21)
  whole = b"".join(b'{"text": "%d%s"}\n' % (i, b"x" * (i * 37 % 991)) for i in range(20_000))
  file = path.with_suffix(".jsonl.gz")
  file.write_bytes(gzip.compress(whole, 1))
  LineFile(str(file), lines.ChunkCache())
  again = LineFile(str(file), lines.ChunkCache())
  assert len(again.chunks) > 3
  wanted = whole.splitlines()
  for row in (19_999, 0, 10_000, 15_000):
    assert again.read(row) == wanted[row]
  assert again._packed is not None
  points = [point.unpacked for point in again._packed._points]
  assert len(points) > 3
  assert points == sorted(set(points))
