"""From data.dataset_path (a path, a list or globs) to a sorted list of files, and what identifies their contents."""

import glob
import os
import stat
from collections.abc import Sequence

from maxtext_like.errors import RetryableError, UserError

HASH_CONTENTS_UP_TO = 64 * 2**20  # reading this much takes a fraction of a second; larger sets go by size and time
LIST_FILES_UP_TO = 64  # the fingerprint names the files one by one up to here


def find(dataset_path: str | Sequence[str] | None, suffixes: tuple[str, ...], dataset: str) -> list[str]:
  """Absolute paths of the files that `dataset_path` names, sorted, each once.

  Every entry is a file, a directory (all files below it whose name ends in one of `suffixes`; any suffix when that is
  empty; hidden files and folders are left out) or a glob, where ** matches folders. An entry that is the name of an
  existing file is never read as a glob. Raises UserError for an entry that matches nothing, is not a regular file or
  cannot be read.
  """
  entries = [dataset_path] if isinstance(dataset_path, str) else list(dataset_path or ())
  if not entries or any(not entry for entry in entries):
    raise UserError(
      f"data.dataset_path is empty, but dataset={dataset} reads files: give a file, a folder, a glob or a list of them"
    )
  found: set[str] = set()
  for entry in entries:
    path = os.path.expanduser(entry)
    if os.path.lexists(path):
      matches = [path]
    else:
      matches = glob.glob(path, recursive=True)
      if not matches:
        hint = "the glob matches nothing" if glob.has_magic(path) else "no such file or folder"
        raise UserError(f"data.dataset_path {entry!r}: {hint} (working directory {os.getcwd()})")
    files = [file for match in sorted(matches) for file in _expand(match, suffixes, entry)]
    if not files:
      kind = " or ".join(suffixes) if suffixes else "regular"
      raise UserError(f"data.dataset_path {entry!r}: {len(matches)} match(es), but no {kind} file in them")
    found.update(files)
  for file in sorted(found):
    if not os.access(file, os.R_OK):
      raise UserError(f"{file}: no permission to read it (data.dataset_path)")
  return sorted(found)


def _expand(path: str, suffixes: tuple[str, ...], entry: str) -> list[str]:
  if not os.path.exists(path):
    raise UserError(f"data.dataset_path {entry!r}: {path} is a link to nothing")
  if os.path.isdir(path):
    if not os.access(path, os.R_OK | os.X_OK):
      raise UserError(f"data.dataset_path {entry!r}: no permission to list {path}")
    files = []
    for folder, folders, names in os.walk(path):
      folders[:] = [name for name in folders if not name.startswith(".")]
      for name in names:
        file = os.path.join(folder, name)
        if not name.startswith(".") and name.endswith(suffixes or "") and os.path.isfile(file):
          files.append(os.path.abspath(file))
    return files
  if not stat.S_ISREG(os.stat(path).st_mode):
    raise UserError(f"data.dataset_path {entry!r}: {path} is not a regular file")
  return [os.path.abspath(path)]


def read_bytes(path: str, start: int = 0, length: int | None = None) -> bytes:
  """Bytes [start, start + length) of a file. UserError when it is gone or forbidden, RetryableError on I/O errors."""
  try:
    with open(path, "rb", buffering=0) as file:
      if start:
        file.seek(start)
      if length is None:
        return file.readall()
      parts = []
      while length > 0 and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
      return b"".join(parts)
  except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
    raise UserError(f"{path}: {error.strerror} (it was there when the run started)") from error
  except OSError as error:
    raise RetryableError(f"{path}: reading failed: {error}") from error


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
