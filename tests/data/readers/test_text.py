"""Text files: decoding, pieces, and the forms of dataset_path."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.readers import input_files
from maxtext_like.data.readers import text as data_text
from maxtext_like.data.readers.text import TextFiles, stdlib_files
from maxtext_like.errors import UserError


def write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return str(path)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab\n\u2028é漢🙂"), min_size=1, max_size=200), st.integers(4, 50))
def test_pieces_put_together_are_the_file(tmp_path_factory, text, piece_bytes):
  path = write(tmp_path_factory.mktemp("pieces") / "a.txt", text)
  documents = TextFiles([path], piece_bytes=piece_bytes)
  records = [documents.read(i) for i in range(len(documents))]
  assert "".join(record.text for record in records) == text
  assert [record.begins for record in records] == [True] + [False] * (len(records) - 1)
  assert [record.ends for record in records] == [False] * (len(records) - 1) + [True]


def test_pieces_end_at_lines_when_there_are_lines(tmp_path):
  path = write(tmp_path / "a.txt", "".join(f"line {i}\n" for i in range(100)))
  documents = TextFiles([path], piece_bytes=50)
  texts = [documents.read(i).text for i in range(len(documents))]
  assert len(texts) > 10
  assert all(text.endswith("\n") for text in texts if text)


def test_no_piece_ends_inside_a_spelling_that_is_to_stay_whole(tmp_path):
  """At every possible position of a cut in a line without an end, surrounded by characters of several bytes."""
  for shift in range(20):
    path = write(tmp_path / f"{shift}.txt", "é" * 10 + "." * shift + "<|turn>é<turn|>" * 3 + "é" * 20)
    documents = TextFiles([path], piece_bytes=16, undivided=("<|", "<|turn>", "<turn|>"))
    pieces = [documents.read(i).text for i in range(len(documents))]
    assert "".join(pieces) == Path(path).read_text()
    assert sum(piece.count("<|turn>") for piece in pieces) == sum(piece.count("<turn|>") for piece in pieces) == 3


def test_bom_and_crlf(tmp_path):
  path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")
  assert TextFiles([path]).read(0).text == "one\n\ntwo\n"


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"fine\nnot \xff fine\n", r"a\.txt: not UTF-8 at line 2, byte 9 \(0xff\)"),
    ("caf\u00e9".encode("latin-1"), r"not UTF-8 at line 1, byte 3 \(0xe9\)"),
    ("hello".encode("utf-16-le"), "NUL bytes"),
    (b"\xed\xa0\x80 surrogate", "not UTF-8"),
  ],
)
def test_bad_files(tmp_path, content, message):
  path = write(tmp_path / "a.txt", content)
  with pytest.raises(BadRecordError, match=message):
    TextFiles([path]).read(0)
  assert TextFiles([path], skip_undecodable=True).read(0).text == ""


def test_a_bad_byte_in_a_later_piece_is_placed(tmp_path):
  path = write(tmp_path / "a.txt", b"0123456\n" * 4 + b"\xff")
  documents = TextFiles([path], piece_bytes=8)
  with pytest.raises(BadRecordError, match=r"piece 5 of 5, from byte 32\): not UTF-8 at byte 32"):
    documents.read(4)


def test_tiny_files(tmp_path):
  one = write(tmp_path / "one.txt", b"x")
  empty = write(tmp_path / "empty.txt", b"")
  documents = TextFiles([empty, one])
  assert [documents.read(i).text for i in range(len(documents))] == ["", "x"]
  with pytest.raises(UserError, match=r"no text: 1 file\(s\), 0 bytes"):
    TextFiles([empty])


def test_naming_files(tmp_path, monkeypatch):
  a, b = write(tmp_path / "x" / "a.txt", "a"), write(tmp_path / "x" / "y" / "b.txt", "b")
  c = write(tmp_path / "c[1].txt", "c")
  write(tmp_path / "x" / ".hidden.txt", "h")
  write(tmp_path / "x" / ".git" / "d.txt", "d")
  os.mkfifo(tmp_path / "x" / "pipe")
  assert input_files.find(str(tmp_path / "x"), (), "text") == [a, b]
  assert input_files.find(str(tmp_path / "**" / "*.txt"), (), "text") == sorted([a, b, c])
  assert input_files.find([b, str(tmp_path / "x"), a], (), "text") == [a, b]
  assert input_files.find(c, (), "text") == [c], "the name of a file is not a glob"
  monkeypatch.chdir(tmp_path)
  assert input_files.find("x/a.txt", (), "text") == [a]
  monkeypatch.setenv("HOME", str(tmp_path))
  assert input_files.find("~/x/y", (), "text") == [b]


def test_naming_no_file(tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "link").symlink_to(tmp_path / "nowhere")
  os.mkfifo(tmp_path / "pipe")
  write(tmp_path / "a.txt", "a")
  for path, suffixes, message in [
    ("", (), "dataset_path is empty"),
    (None, (), "dataset_path is empty"),
    ([], (), "dataset_path is empty"),
    (["a.txt", ""], (), "dataset_path is empty"),
    ("missing.txt", (), "no such file or folder"),
    ("*.nothing", (), "the glob matches nothing"),
    ("empty", (), "no regular file"),
    (".", (".jsonl", ".ndjson"), r"no \.jsonl or \.ndjson file"),
    ("link", (), "a broken symbolic link"),
    ("pipe", (), "not a regular file"),
  ]:
    where = path
    if path:
      where = [str(tmp_path / p) if p else p for p in path] if isinstance(path, list) else str(tmp_path / path)
    with pytest.raises(UserError, match=message):
      input_files.find(where, suffixes, "text")


def test_an_unreadable_file(tmp_path, monkeypatch):
  path = write(tmp_path / "a.txt", "a")
  documents = TextFiles([path])
  os.chmod(path, 0)
  if os.access(path, os.R_OK):  # root may read every file
    monkeypatch.setattr(os, "access", lambda *_: False)
  else:
    with pytest.raises(UserError, match="Permission denied"):
      documents.read(0)
  with pytest.raises(UserError, match=r"a\.txt: no permission"):
    input_files.find(path, (), "text")


def test_a_file_that_disappears(tmp_path):
  path = write(tmp_path / "a.txt", "a")
  documents = TextFiles([path])
  os.remove(path)
  with pytest.raises(UserError, match=r"a\.txt: No such file.*existed when the run started"):
    documents.read(0)


def test_fingerprint_sees_contents_and_ignores_place_and_time(tmp_path, monkeypatch):
  paths = [write(tmp_path / "one" / name, name) for name in ("a.txt", "b.txt")]
  moved = [write(tmp_path / "two" / name, name) for name in ("a.txt", "b.txt")]
  os.utime(moved[0], (1, 1))
  first = TextFiles(paths).fingerprint()
  assert set(first) == {"a.txt", "b.txt"}
  assert TextFiles(moved).fingerprint() == first
  write(tmp_path / "two" / "b.txt", "B.txt")
  changed = TextFiles(moved).fingerprint()
  assert {name for name in first if first[name] != changed[name]} == {"b.txt"}
  monkeypatch.setattr(input_files, "HASH_CONTENTS_UP_TO", 3)
  assert "modified 1000000000" in TextFiles(moved).fingerprint()["a.txt"]
  monkeypatch.setattr(input_files, "LIST_FILES_UP_TO", 1)
  assert set(TextFiles(moved).fingerprint()) == {"2 files"}


def test_the_standard_library_is_found_sorted_and_decodes():
  files = stdlib_files()
  assert files == sorted(files)
  names = {os.path.basename(file) for file in files}
  assert {"json", "email"} <= {os.path.basename(os.path.dirname(file)) for file in files}
  assert "argparse.py" in names
  assert not any({"test", "tests", "site-packages"} & set(file.split(os.sep)[-3:-1]) for file in files)
  documents = data_text.stdlib()
  assert len(documents) == len(files), "one document a file"
  assert sum(bool(documents.read(i).text) for i in range(len(files))) > 0.9 * len(files)


def test_a_library_without_sources(tmp_path):
  with pytest.raises(UserError, match=r"no \.py file below"):
    stdlib_files(str(tmp_path))
