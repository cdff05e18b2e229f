"""Plain text files as documents, and the default data set: the source files of Python's standard library."""

import os
import sysconfig
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from maxtext_like.data.documents import BadRecordError, Record
from maxtext_like.data.readers import input_files
from maxtext_like.data.readers.input_files import FileDocuments
from maxtext_like.errors import UserError

SUFFIXES: tuple[str, ...] = ()  # endings of the files to take from a folder; empty for all
PIECE_BYTES = 2**16
WINDOW_BYTES = 2**12  # a piece ends at the first newline within this distance of its nominal end
STDLIB_PIECE_BYTES = 2**20  # longer than any file of the standard library, so each file is one document

# Folders that are not the library itself: tests (some are deliberately not UTF-8), caches and installed packages.
STDLIB_SKIPPED = frozenset(("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"))


class TextFiles(FileDocuments):
  """UTF-8 text files, each of which is one document. A file above ``piece_bytes`` is cut into pieces of about that size.

  A piece ends after a newline if one is near, otherwise between two characters. The pieces are separate records: they are
  shuffled, and each may be held out for evaluation. Only the first piece begins the document and only the last one ends it, for
  bos and eos. A byte-order mark is dropped, and CRLF becomes LF. A file that is not UTF-8 or has NUL bytes (UTF-16, binary) is
  a bad record; with ``skip_undecodable`` it is an empty one.
  """

  def __init__(
    self,
    files: Sequence[str],
    *,
    piece_bytes: int = PIECE_BYTES,
    skip_undecodable: bool = False,
    undivided: Iterable[str] = (),
    key: str = "dataset_path",
  ):
    """Divides the files into pieces.

    Args:
      files: paths of the files.
      piece_bytes: approximate size of a piece.
      skip_undecodable: treat files that are not text as empty.
      undivided: spellings that must not be divided between two pieces.
      key: key of the ``data:`` section that names the files.

    Raises:
      UserError: all files are empty.
    """
    self._files = list(files)
    self._sizes = input_files.sizes(self._files)
    if not sum(self._sizes):
      raise UserError(
        f"data.{key}: no text: {len(self._files)} file(s), 0 bytes (first: {self._files[0]})\n  fix: {key}=FILES with text"
      )
    self._piece_bytes = piece_bytes
    self._undivided = sorted((spelling.encode() for spelling in undivided), key=len, reverse=True)
    self._longest = len(self._undivided[0]) if self._undivided else 0
    self._skip_undecodable = skip_undecodable
    self._pieces = [max(1, -(-size // piece_bytes)) for size in self._sizes]  # an empty file is an empty document
    self._stops = list(accumulate(self._pieces))

  def place(self, index: int) -> str:
    file, piece = self._locate(index)
    if self._pieces[file] == 1:
      return self._files[file]
    return f"{self._files[file]} (piece {piece + 1} of {self._pieces[file]}, from byte {piece * self._piece_bytes})"

  def _boundary(self, file: int, position: int) -> int:
    """Returns the start of the piece whose nominal start is byte ``position``."""
    if position <= 0 or position >= self._sizes[file]:
      return max(0, min(position, self._sizes[file]))
    window = input_files.read_bytes(self._files[file], position - 1, WINDOW_BYTES)
    newline = window.find(b"\n")
    if newline >= 0:
      return position + newline
    skip = 1
    while skip < min(4, len(window)) and window[skip] & 0xC0 == 0x80:  # a continuation byte of a UTF-8 character
      skip += 1
    return self._after_spelling(file, position + skip - 1)

  def _after_spelling(self, file: int, position: int) -> int:
    """Returns the end of the spelling that contains ``position``; ``position`` if there is none."""
    if not self._undivided:
      return position
    begin = max(0, position - self._longest)
    window, at = input_files.read_bytes(self._files[file], begin, 2 * self._longest), position - begin
    for spelling in self._undivided:
      start = window.find(spelling, max(0, at - len(spelling) + 1))
      if 0 <= start < at:
        return begin + start + len(spelling)
    return position

  def read(self, index: int) -> Record:
    file, piece = self._locate(index)
    start = self._boundary(file, piece * self._piece_bytes)
    end = self._boundary(file, (piece + 1) * self._piece_bytes)
    data = input_files.read_bytes(self._files[file], start, end - start)
    if start == 0:
      data = data.removeprefix(b"\xef\xbb\xbf")
    try:
      text = data.decode("utf-8")
    except UnicodeDecodeError as error:
      if self._skip_undecodable:
        return Record("")
      byte = start + error.start
      line = data[: error.start].count(b"\n") + 1
      at = f"byte {byte}" if start else f"line {line}, byte {byte}"
      raise BadRecordError(self.place(index), f"not UTF-8 at {at} (0x{data[error.start]:02x})") from None
    if "\0" in text:
      if self._skip_undecodable:
        return Record("")
      raise BadRecordError(self.place(index), "has NUL bytes, so it is not a text file (binary, or UTF-16?)")
    return Record(text.replace("\r\n", "\n"), begins=piece == 0, ends=piece == self._pieces[file] - 1)

  def fingerprint(self) -> dict[str, str]:
    return input_files.fingerprint(self._files)


def stdlib_files(folder: str | None = None) -> list[str]:
  """Returns the .py files of the interpreter's standard library, sorted, without the folders in STDLIB_SKIPPED."""
  folder = folder or sysconfig.get_paths()["stdlib"]
  found = []
  for parent, folders, names in os.walk(folder):
    folders[:] = [name for name in folders if name not in STDLIB_SKIPPED]
    found += [os.path.join(parent, name) for name in names if name.endswith(".py")]
  if not found:
    raise UserError(
      f"dataset=python-stdlib: no .py file below {folder} (the library is in a zip file or has no sources)\n"
      "  fix: dataset=text dataset_path=YOUR_FILES"
    )
  return sorted(found)


def open_documents(files: Sequence[str], data: Any, *, vision: Any, undivided: Iterable[str], key: str) -> TextFiles:
  """Opens the files of dataset=text."""
  del data, vision
  return TextFiles(files, undivided=undivided, key=key)


def open_stdlib(files: Sequence[str], data: Any, *, vision: Any, undivided: Iterable[str], key: str) -> TextFiles:
  """Opens dataset=python-stdlib, which has no files to choose."""
  del files, data, vision, undivided, key
  return stdlib()


def stdlib() -> TextFiles:
  """Opens the sources of the standard library, which exist on every machine. Files that are not UTF-8 count as empty."""
  return TextFiles(stdlib_files(), piece_bytes=STDLIB_PIECE_BYTES, skip_undecodable=True)
