"""From data.dataset_path (a path, a list or globs) to a sorted list of files, and what identifies their contents."""

import contextlib
import glob
import io
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from maxtext_like import local_copies
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.storage import Entry, Place, failed, is_remote
from maxtext_like.strict_json import printable

logger = logging.getLogger(__name__)

HASH_CONTENTS_UP_TO = 64 * 2**20  # reading this much takes a fraction of a second; larger sets go by size and time
SLOW_SECONDS = 3.0  # without a line, of a search for files
LIST_FILES_UP_TO = 64  # the fingerprint names the files one by one up to here
UNPACKED_UP_TO = 256 * 2**20  # compressed data may always become so many bytes,
EXPANSION_UP_TO = 200  # and beyond that so many times their own; text is packed 3 to 10 times, repetitive text up to 100

Found = TypeVar("Found")
_SHARD = re.compile(r"-\d+-of-\d+$")  # behind the suffix, as TensorFlow's tools number files
_KINDS = {
  stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
  stat.S_ISBLK: "a device",
}  # fmt: skip


def find(paths: str | Sequence[str] | None, suffixes: tuple[str, ...], dataset: str, key: str = "dataset_path") -> list[str]:
  """Absolute paths of the files that `paths`, the value of data.`key`, names, sorted, each once.

  Every entry is a file, a directory (all files below it whose name ends in one of `suffixes`; any suffix when that is
  empty; hidden files and folders are left out) or a glob, where ** matches folders. An entry that is the name of an
  existing file is never read as a glob. The same for a URL, in its store; its files are copied to this machine. Raises
  UserError for an entry that matches nothing, is not a regular file or cannot be read.
  """
  entries = [paths] if isinstance(paths, str) else list(paths or ())
  if not entries or any(not entry for entry in entries):
    raise UserError(f"data.{key} is empty, but dataset={dataset} reads files: give a file, a folder, a glob or a list of them")
  found: set[str] = set()
  for entry in entries:
    if is_remote(entry):
      found.update(map(str, local_copies.copy(find_remote(entry, suffixes, key))))
      continue
    path = os.path.expanduser(entry)
    if os.path.lexists(path):
      matches = [path]
    else:
      with saying_if_slow(f"data.{key} {entry!r}: looking for files" + ", in every folder below" * ("**" in path)):
        matches = glob.glob(path, recursive=True)
      if not matches:
        hint = "the glob matches nothing" if glob.has_magic(path) else "no such file or folder"
        raise UserError(f"data.{key} {entry!r}: {hint} (working directory {os.getcwd()})")
    with saying_if_slow(f"data.{key} {entry!r}: looking for files in folders"):
      files = [file for match in sorted(matches) for file in _expand(match, suffixes, f"data.{key} {entry!r}")]
    if not files:
      kind = " or ".join(suffixes) if suffixes else "regular"
      raise UserError(f"data.{key} {entry!r}: {len(matches)} match(es), but no {kind} file in them")
    found.update(files)
  for file in sorted(found):
    if not file.isprintable():  # a line break in it would forge lines of logs and errors
      raise UserError(
        f"data.{key}: {printable(file)}: the name has a line break or another character that cannot be printed\n"
        "  fix: rename the file"
      )
    if not os.access(file, os.R_OK):
      raise UserError(f"{file}: no permission to read it (data.{key})")
  return sorted(found)


@contextlib.contextmanager
def saying_if_slow(what: str) -> Iterator[None]:
  """Logs ``what`` and the time that it has taken after SLOW_SECONDS, and then less and less often, while the block runs."""
  begin, done = time.monotonic(), threading.Event()

  def say() -> None:
    wait = SLOW_SECONDS
    while not done.wait(wait):
      logger.warning("%s (%.0f s so far)", what, time.monotonic() - begin)
      wait = min(2 * wait, 60.0)

  thread = threading.Thread(target=say, name="saying_if_slow", daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


def find_remote(url: str, suffixes: tuple[str, ...], key: str) -> list[Entry]:
  """The objects that a URL names, as `find` does it with files. Asks the store, and copies nothing."""
  where = f"data.{key} {url!r}"
  try:
    if glob.has_magic(url):
      fixed, rest = re.split(r"/(?=[^/]*[*?\[])", url, maxsplit=1)
      matches = Place(fixed).glob(rest)
      if not matches:
        raise UserError(f"{where}: the glob matches nothing")
      return matches
    place = Place(url)
    if (entry := place.entry()) is not None:
      return [entry]
    below = [entry for entry in place.entries() if not any(part.startswith(".") for part in _inside(entry.place, place))]
  except OSError as error:
    raise failed(error) from error
  if not below:
    raise UserError(f"{where}: no such object, and none below")
  files = [entry for entry in below if _SHARD.sub("", entry.place.name).endswith(suffixes or "")]
  if not files:
    raise UserError(f"{where}: {len(below)} object(s), but no {' or '.join(suffixes)} file among them")
  return files


def _inside(place: Place, folder: Place) -> tuple[str, ...]:
  return place.parts[len(folder.parts) :]


def _expand(path: str, suffixes: tuple[str, ...], where: str) -> list[str]:
  if not os.path.exists(path):
    raise UserError(f"{where}: {path} is a link to nothing")
  if os.path.isdir(path):
    if not os.access(path, os.R_OK | os.X_OK):
      raise UserError(f"{where}: no permission to list {path}")
    files = []
    for folder, folders, names in os.walk(path):
      folders[:] = [name for name in folders if not name.startswith(".")]
      for name in names:
        file = os.path.join(folder, name)
        if not name.startswith(".") and _SHARD.sub("", name).endswith(suffixes or "") and os.path.isfile(file):
          files.append(os.path.abspath(file))
    return files
  if (kind := other_kind(os.stat(path).st_mode)) is not None:
    raise UserError(f"{where}: {path} is {kind}, not a regular file")
  return [os.path.abspath(path)]


def other_kind(mode: int) -> str | None:
  """What a file is that is not a regular one ("a FIFO"), from its `st_mode`; None for a regular file."""
  if stat.S_ISREG(mode):
    return None
  return next((name for test, name in _KINDS.items() if test(mode)), "no file")


class NotRegularError(OSError):
  """A FIFO, a device, a socket or a folder where a file is wanted; `strerror` says which."""


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
  """Opens a regular file for reading, unbuffered. OSError as `open`, NotRegularError for anything else.

  Never waits for the other end of a FIFO, and opens no device, which may do something.
  """
  require_regular(path, os.stat(path).st_mode)
  file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
  try:
    require_regular(path, os.fstat(file.fileno()).st_mode)  # what was looked at may have been replaced
  except BaseException:
    file.close()
    raise
  return file


def require_regular(path: str | os.PathLike[str], mode: int) -> None:
  """NotRegularError unless `mode`, the `st_mode` of `path`, is that of a regular file."""
  if (kind := other_kind(mode)) is not None:
    raise NotRegularError(0, f"{kind}, not a regular file", os.fspath(path))


def read_bytes(
  path: str, start: int = 0, length: int | None = None, *, check: Callable[[os.stat_result], None] | None = None
) -> bytes:
  """Bytes [start, start + length) of a file. UserError when it is gone or forbidden, RetryableError on I/O errors.

  `check` sees the state of the file that is read.
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
  """What to raise for an error of a file that was there when the run started: a retry may mend the storage's own only."""
  if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError | NotRegularError):
    return UserError(f"{path}: {error.strerror} (it was there when the run started)")
  return RetryableError(f"{path}: reading failed: {error}")


class Unchanged(Generic[Found]):
  """A file that is to stay what it was when it was looked at.

  Attributes:
    found: what the look gave.
    digest: of that.
  """

  def __init__(self, path: str, look: Callable[[str], Found], digest_of: Callable[[Found], str]):
    """`look`: reads little of a file. Raises what that raises."""
    self._path, self._look, self._digest_of = path, look, digest_of
    self._stamp = _stamp(os.stat(path))
    self.found = look(path)
    self.digest = digest_of(self.found)

  def check(self, now: os.stat_result) -> None:
    """UserError if a file in the state `now` is another one."""
    if _stamp(now) == self._stamp:
      return
    if self._digest_of(self._look(self._path)) != self.digest:
      raise UserError(f"{self._path}: changed under the run: it is not the file that the run started with")
    self._stamp = _stamp(now)


def _stamp(state: os.stat_result) -> tuple[int, int]:
  return state.st_size, state.st_mtime_ns


def check_expansion(path: str, packed: int, unpacked: int) -> None:
  """UserError for data of `packed` bytes that become `unpacked` bytes or more: what no text does is meant to harm."""
  if unpacked > max(UNPACKED_UP_TO, EXPANSION_UP_TO * packed):
    raise UserError(
      f"{path}: {packed:,} bytes become {unpacked:,} or more, over {EXPANSION_UP_TO} times as many: refused as a "
      "decompression bomb; if these are your data, store them without compression"
    )


def cache_folder() -> Path:
  """Where what was found out about data is kept for later starts; need not exist."""
  return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "maxtext-like" / "data"


def sizes(files: Sequence[str]) -> list[int]:
  """The size of each file in bytes."""
  return [os.stat(file).st_size for file in files]


def names(files: Sequence[str]) -> list[str]:
  """Names relative to the common folder, so that a moved or mounted-elsewhere data set keeps its identity."""
  root = os.path.dirname(files[0]) if len(files) == 1 else os.path.commonpath(files)
  return [os.path.relpath(file, root) for file in files]


def fingerprint(files: Sequence[str], digests: Sequence[str] | None = None) -> dict[str, str]:
  """{name: size and digest}. Without `digests`: of the contents when they are small, else the modification times.

  More than LIST_FILES_UP_TO files are folded in one entry.
  """
  import xxhash

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
