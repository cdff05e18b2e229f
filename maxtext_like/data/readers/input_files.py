"""Finds the files that data.dataset_path names (a path, a list or globs), reads them safely and identifies their contents."""

import abc
import contextlib
import glob
import io
import logging
import os
import re
import shlex
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import xxhash

from maxtext_like import local_copies
from maxtext_like.data.documents import BadRecordError, Record
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.storage import Entry, Place, failed, is_remote
from maxtext_like.strict_json import printable

logger = logging.getLogger(__name__)

HASH_CONTENTS_UP_TO = 64 * 2**20  # bytes, hashed in a fraction of a second; larger sets are identified by size and time
SLOW_SECONDS = 3.0  # a search for files logs a line after this time
LIST_FILES_UP_TO = 64  # the fingerprint lists up to this many files one by one
UNPACKED_UP_TO = 256 * 2**20  # bytes to which any compressed file may expand
EXPANSION_UP_TO = 200  # largest expansion beyond that; text expands 3 to 10 times, repetitive text up to 100 times

FIX_DAMAGED = "\n  fix: copy or write the file again"

Found = TypeVar("Found")
_SHARD = re.compile(r"-\d+-of-\d+$")  # follows the suffix in names of TensorFlow's tools
_KINDS = {
  stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
  stat.S_ISBLK: "a device",
}  # fmt: skip


def find(paths: str | Sequence[str] | None, suffixes: tuple[str, ...], dataset: str, key: str = "dataset_path") -> list[str]:
  """Returns the absolute paths of the files that ``paths`` names, sorted and without repetition.

  An entry is a file, a folder or a glob, in which ** matches folders. A folder means all files below it that have one of
  the suffixes, except hidden files and folders. An entry that is the name of an existing file is never read as a glob. The same
  applies to URLs in a store, whose files are copied to this machine.

  Args:
    paths: value of data.``key``.
    suffixes: endings of the file names to take from folders; empty for any.
    dataset: the kind of data set, for messages.
    key: key of the ``data:`` section, for messages.

  Raises:
    UserError: an entry matches nothing, is not a regular file or cannot be read.
  """
  entries = [paths] if isinstance(paths, str) else list(paths or ())
  if not entries or any(not entry for entry in entries):
    raise UserError(
      f"data.{key} is empty, but dataset={dataset} reads files\n  fix: {key}=PATH of a file or folder, a glob, or a list"
    )
  found: set[str] = set()
  for entry in entries:
    if is_remote(entry):
      found.update(map(str, local_copies.copy(find_remote(entry, suffixes, key))))
      continue
    path = os.path.expanduser(entry)
    if os.path.lexists(path):
      matches = [path]
    else:
      with log_if_slow(f"data.{key} {entry!r}: searching for files" + " in every folder below" * ("**" in path)):
        matches = glob.glob(path, recursive=True)
      if not matches:
        hint = "the glob matches nothing" if glob.has_magic(path) else "no such file or folder"
        raise UserError(
          f"data.{key} {entry!r}: {hint} (working directory {os.getcwd()})\n  fix: {key}=PATH of files that exist"
        )
    with log_if_slow(f"data.{key} {entry!r}: searching for files in folders"):
      files = [file for match in sorted(matches) for file in _expand(match, suffixes, f"data.{key} {entry!r}")]
    if not files:
      kind = " or ".join(suffixes) if suffixes else "regular"
      raise UserError(
        f"data.{key} {entry!r}: {len(matches)} match(es), but no {kind} file in them\n  fix: name the files themselves"
      )
    found.update(files)
  for file in sorted(found):
    if not file.isprintable():  # a line break in the name could forge lines of logs and errors
      raise UserError(
        f"data.{key}: {printable(file)}: the name has a line break or another character that cannot be printed\n"
        "  fix: rename the file"
      )
    if not os.access(file, os.R_OK):
      raise UserError(f"{file}: no permission to read it (data.{key})\n  fix: chmod u+r {shlex.quote(file)}")
  return sorted(found)


@contextlib.contextmanager
def log_if_slow(what: str) -> Iterator[None]:
  """Logs ``what`` and the elapsed time while the block runs: first after SLOW_SECONDS, then at growing intervals."""
  begin, done = time.monotonic(), threading.Event()

  def say() -> None:
    wait = SLOW_SECONDS
    while not done.wait(wait):
      logger.warning("%s (%.0f s so far)", what, time.monotonic() - begin)
      wait = min(2 * wait, 60.0)

  thread = threading.Thread(target=say, name="log_if_slow", daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


def find_remote(url: str, suffixes: tuple[str, ...], key: str) -> list[Entry]:
  """Returns the objects that a URL names, by the rules of ``find``. Lists the store and copies nothing."""
  where = f"data.{key} {url!r}"
  try:
    if glob.has_magic(url):
      fixed, rest = re.split(r"/(?=[^/]*[*?\[])", url, maxsplit=1)
      matches = Place(fixed).glob(rest)
      if not matches:
        raise UserError(f"{where}: the glob matches nothing\n  fix: {key}=URL of files that exist")
      return matches
    place = Place(url)
    if (entry := place.entry()) is not None:
      return [entry]
    below = [entry for entry in place.entries() if not any(part.startswith(".") for part in _inside(entry.place, place))]
  except OSError as error:
    raise failed(error) from error
  if not below:
    raise UserError(f"{where}: no such object, and none below\n  fix: {key}=URL of files that exist")
  files = [entry for entry in below if _SHARD.sub("", entry.place.name).endswith(suffixes or "")]
  if not files:
    raise UserError(
      f"{where}: {len(below)} object(s), but no {' or '.join(suffixes)} file among them\n  fix: name the files themselves"
    )
  return files


def _inside(place: Place, folder: Place) -> tuple[str, ...]:
  return place.parts[len(folder.parts) :]


def _expand(path: str, suffixes: tuple[str, ...], where: str) -> list[str]:
  if not os.path.exists(path):
    raise UserError(f"{where}: {path} is a broken symbolic link\n  fix: repair or remove it")
  if os.path.isdir(path):
    if not os.access(path, os.R_OK | os.X_OK):
      raise UserError(f"{where}: no permission to list {path}\n  fix: chmod u+rx {shlex.quote(path)}")
    files = []
    for folder, folders, names in os.walk(path):
      folders[:] = [name for name in folders if not name.startswith(".")]
      for name in names:
        file = os.path.join(folder, name)
        if not name.startswith(".") and _SHARD.sub("", name).endswith(suffixes or "") and os.path.isfile(file):
          files.append(os.path.abspath(file))
    return files
  if (kind := other_kind(os.stat(path).st_mode)) is not None:
    raise UserError(f"{where}: {path} is {kind}, not a regular file", fix="name a regular file or a directory")
  return [os.path.abspath(path)]


def other_kind(mode: int) -> str | None:
  """Returns the kind of a file that is not regular ("a FIFO") from its ``st_mode``; None for a regular file."""
  if stat.S_ISREG(mode):
    return None
  return next((name for test, name in _KINDS.items() if test(mode)), "an unknown kind of file")


class NotRegularError(OSError):
  """A FIFO, device, socket or folder where a regular file is expected; ``strerror`` names the kind."""


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
  """Opens a regular file for unbuffered reading. Raises OSError as ``open``, and NotRegularError for any other kind of file.

  It never blocks on a FIFO and never opens a device, because opening some devices has effects.
  """
  require_regular(path, os.stat(path).st_mode)
  file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
  try:
    require_regular(path, os.fstat(file.fileno()).st_mode)  # the file may have been replaced after the first check
  except BaseException:
    file.close()
    raise
  return file


def require_regular(path: str | os.PathLike[str], mode: int) -> None:
  """Raises NotRegularError unless ``mode``, the ``st_mode`` of ``path``, is that of a regular file."""
  if (kind := other_kind(mode)) is not None:
    raise NotRegularError(0, f"{kind}, not a regular file", os.fspath(path))


def read_bytes(
  path: str, start: int = 0, length: int | None = None, *, check: Callable[[os.stat_result], None] | None = None
) -> bytes:
  """Reads bytes [start, start + length) of a file.

  Args:
    path: path of the file.
    start: first byte.
    length: number of bytes; None for all.
    check: called with the state of the file that is read.

  Raises:
    UserError: the file does not exist or may not be read.
    RetryableError: another I/O error.
  """
  try:
    with open_regular(path) as file:
      if check is not None:
        check(os.fstat(file.fileno()))
      if start:
        file.seek(start)
      if length is None:
        return file.readall()
      parts = []
      while length > 0 and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
      return b"".join(parts)
  except OSError as error:
    raise reading_failed(path, error) from error


def reading_failed(path: str, error: OSError) -> UserError | RetryableError:
  """Returns the error to raise for a file that existed when the run started. Only errors of the storage are retryable."""
  if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | NotRegularError):
    return UserError(
      f"{path}: {error.strerror} (the file existed when the run started)\n  fix: restore it and run the same command again"
    )
  return RetryableError(f"{path}: reading failed: {error}")


class Unchanged(Generic[Found]):
  """A file that must stay unchanged after it was inspected.

  Attributes:
    found: result of the inspection.
    digest: digest of that result.
  """

  def __init__(self, path: str, inspect: Callable[[str], Found], digest_of: Callable[[Found], str]):
    """Inspects the file.

    Args:
      path: path of the file.
      inspect: inspects a file by reading a small part of it. Its exceptions are passed on.
      digest_of: makes a digest of the result.
    """
    self._path, self._inspect, self._digest_of = path, inspect, digest_of
    self._stamp = _stamp(os.stat(path))
    self.found = inspect(path)
    self.digest = digest_of(self.found)

  def check(self, now: os.stat_result) -> None:
    """Raises UserError if ``now`` is the state of a changed file."""
    if _stamp(now) == self._stamp:
      return
    if self._digest_of(self._inspect(self._path)) != self.digest:
      raise UserError(f"{self._path}: the file changed during the run\n  fix: restore it and run the same command again")
    self._stamp = _stamp(now)


def _stamp(state: os.stat_result) -> tuple[int, int]:
  return state.st_size, state.st_mtime_ns


def check_expansion(path: str, packed: int, unpacked: int) -> None:
  """Raises UserError if ``packed`` bytes expand to ``unpacked`` bytes, and no text expands that far."""
  if unpacked > max(UNPACKED_UP_TO, EXPANSION_UP_TO * packed):
    raise UserError(
      f"{path}: {packed:,} bytes expand to {unpacked:,} or more, over {EXPANSION_UP_TO} times as many: refused as a "
      "decompression bomb\n  fix: if these are your data, store them without compression"
    )


def cache_folder() -> Path:
  """Returns the folder that keeps facts about data for later starts. It need not exist."""
  return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "maxtext-like" / "data"


def sizes(files: Sequence[str]) -> list[int]:
  """Returns the size of each file in bytes."""
  return [os.stat(file).st_size for file in files]


def names(files: Sequence[str]) -> list[str]:
  """Returns the paths relative to the common folder, so that a data set that was moved keeps its identity."""
  root = os.path.dirname(files[0]) if len(files) == 1 else os.path.commonpath(files)
  return [os.path.relpath(file, root) for file in files]


def fingerprint(files: Sequence[str], digests: Sequence[str] | None = None) -> dict[str, str]:
  """Returns the identity of files as {name: size and digest}. More than LIST_FILES_UP_TO files share one entry.

  Args:
    files: paths of the files.
    digests: a digest of each file. None: digests of the contents if the files are small, otherwise modification times.
  """
  lengths = sizes(files)
  if digests is None:
    if sum(lengths) <= HASH_CONTENTS_UP_TO:
      digests = [f"xxh3 {xxhash.xxh3_128_hexdigest(read_bytes(file))}" for file in files]
    else:
      digests = [f"modified {os.stat(file).st_mtime_ns}" for file in files]
  entries = {name: f"{size} bytes, {digest}" for name, size, digest in zip(names(files), lengths, digests, strict=True)}
  if len(entries) <= LIST_FILES_UP_TO:
    return entries
  total = xxhash.xxh3_128_hexdigest(repr(sorted(entries.items())).encode("utf-8", "surrogateescape"))
  return {f"{len(entries)} files": f"{sum(lengths)} bytes, xxh3 {total}"}


class FileDocuments(abc.ABC):
  """Documents of files, in the order of the files; see ``Documents``.

  Attributes:
    groups: see ``Documents``.
  """

  groups: Sequence[int] | None = None
  _files: list[str]
  _state: list[Unchanged[Any]]
  """The scanned state of each file, for readers that keep no other digest."""
  _stops: list[int]
  """Number of documents up to the end of each part: a file, or a group of records in it."""

  def __len__(self) -> int:
    return self._stops[-1]

  def _locate(self, index: int) -> tuple[int, int]:
    """Returns the part that contains a document, and the document's position inside it."""
    part = bisect_right(self._stops, index)
    return part, index - (self._stops[part - 1] if part else 0)

  @abc.abstractmethod
  def place(self, index: int) -> str:
    """Returns the place of document ``index`` for messages."""

  @abc.abstractmethod
  def read(self, index: int) -> Record:
    """Reads document ``index``."""

  def scan(self) -> Iterator[Record | BadRecordError]:
    """Reads all documents in order."""
    for index in range(len(self)):
      try:
        yield self.read(index)
      except BadRecordError as bad:
        yield bad

  def fingerprint(self) -> dict[str, str]:
    """Returns an identity of each file's contents."""
    return fingerprint(self._files, [state.digest for state in self._state])


def no_records(key: str, files: Sequence[str], found: str, wanted: str) -> UserError:
  """Returns the error about files without records.

  Args:
    key: key of the ``data:`` section that names the files.
    files: the files.
    found: the kind of files and the number of their records, such as "parquet file(s), 0 rows".
    wanted: the content that the files should have.
  """
  return UserError(f"data.{key}: no records: {len(files)} {found} (first: {files[0]})\n  fix: {key}=FILES with {wanted}")
