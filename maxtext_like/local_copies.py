"""Objects of a store as files of this machine: what is read by random access, mapped, or by libraries that want a path.

A copy lies at ``<folder>/<protocol>/<bucket>/<name>``, beside what its object was when it was copied. It is taken again when
the object has been written since. Several processes of a host share it.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxtext_like import atomic
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.storage import Entry, Place, failed

FOLDER_VARIABLE = "MAXTEXT_LIKE_COPIES"
_AT_ONCE = 8
_ATTEMPTS, _FIRST_WAIT_SECONDS = 3, 1.0
_TOLD_FROM = 256 * 2**20  # bytes that take so long that somebody asks what is going on
_log = logging.getLogger(__name__)


def folder() -> Path:
  """Where copies lie: ``$MAXTEXT_LIKE_COPIES``, else ``maxtext_like/copies`` in the user's cache."""
  if value := os.environ.get(FOLDER_VARIABLE):
    return Path(value).expanduser().absolute()
  return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "maxtext_like" / "copies"


def path_of(place: Place) -> Path:
  """Where the copy of a place is, or would be."""
  return folder().joinpath(place.protocol, *place.parts)


def copy(entries: Sequence[Entry]) -> list[Path]:
  """Brings the newest version of each object to this machine, where it is not there yet; returns where they are, in order.

  Raises:
    UserError: no room, no permission, or an object is gone.
    RetryableError: the store does not answer, or what it sends is not what it says it has.
  """
  missing = [entry for entry in entries if not _is_there(entry)]
  try:
    if missing:
      _require_room(sum(entry.size for entry in missing))
      with ThreadPoolExecutor(_AT_ONCE, "copy") as pool:
        for _ in pool.map(_copy, missing):
          pass
  except OSError as error:
    raise failed(error) from error
  return [path_of(entry.place) for entry in entries]


def copy_file(url: str) -> Path:
  """``copy`` of one object by its URL.

  Raises:
    UserError: there is none of that name, too.
  """
  place = Place(url)
  try:
    entry = place.entry()
  except OSError as error:
    raise failed(error) from error
  if entry is None:
    raise UserError(f"{place}: no such object")
  return copy([entry])[0]


def copy_folder(place: Place, wanted: Callable[[Entry], bool], below: Sequence[str] = ()) -> Path:
  """``copy`` of the wanted objects directly below a place; copies of what is not there any more go. Returns the folder.

  Args:
    place: the folder.
    wanted: which objects.
    below: folders in it that are copied likewise, where they are there.

  Raises:
    UserError: nothing is there, too.
  """
  try:
    entries = place.children()
  except OSError as error:
    raise failed(error) from error
  if not entries:
    raise UserError(f"{place}: no such object, and none directly below")
  path, names = path_of(place), {entry.place.name for entry in entries}
  for note in path.glob(".*.copied"):
    if (name := note.name[1:].removesuffix(".copied")) not in names:
      note.unlink(missing_ok=True)
      (path / name).unlink(missing_ok=True)
  copy([entry for entry in entries if wanted(entry)])
  for name in below:
    try:
      is_there = bool((place / name).children())
    except OSError as error:
      raise failed(error) from error
    if is_there:
      copy_folder(place / name, wanted)
    elif (path / name).is_dir():
      shutil.rmtree(path / name, ignore_errors=True)
  return path


def _require_room(needed: int) -> None:
  there = folder()
  there.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(there).free
  if free < needed:
    raise UserError(
      f"{there}: {needed / 1e9:.2f} GB are to be copied here from the store, {free / 1e9:.2f} GB are free\n"
      f"  fix: free some space, or {FOLDER_VARIABLE}=DIR in the environment names a folder on a larger disk"
    )
  if needed >= _TOLD_FROM:
    _log.warning("%.2f GB are copied from the store to %s", needed / 1e9, there)


def _note_of(path: Path) -> Path:
  return path.with_name(f".{path.name}.copied")


def _is_there(entry: Entry) -> bool:
  path = path_of(entry.place)
  try:
    return json.loads(_note_of(path).read_text("utf-8")) == _note(entry) and path.stat().st_size == entry.size
  except (OSError, ValueError):
    return False


def _note(entry: Entry) -> dict[str, object]:
  return {"size": entry.size, "version": entry.version}


def _copy(entry: Entry) -> None:
  path = path_of(entry.place)
  path.parent.mkdir(parents=True, exist_ok=True)
  with _alone(path):
    for attempt in range(1, _ATTEMPTS + 1):
      if _is_there(entry):
        return
      try:
        _copy_once(entry, path)
      except (OSError, RetryableError) as error:
        if attempt == _ATTEMPTS or isinstance(error, FileNotFoundError | PermissionError):
          raise
        _log.warning("%s; trying again", error)
        time.sleep(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1))


def _copy_once(entry: Entry, path: Path) -> None:
  part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
  try:
    entry.place.download(str(part))
    if (wrong := _difference(entry, part)) is not None:
      if (now := entry.place.entry()) is None or now.version != entry.version:
        raise RetryableError(f"{entry.place}: was written again while it was copied; start again")
      raise RetryableError(f"{entry.place}: arrived damaged: {wrong}")
    if entry.modified is not None:  # by which large files are told apart, on every host alike
      os.utime(part, (entry.modified, entry.modified))
    _note_of(path).unlink(missing_ok=True)
    os.replace(part, path)
    atomic.write_text(_note_of(path), json.dumps(_note(entry)) + "\n")
  finally:
    part.unlink(missing_ok=True)


def _difference(entry: Entry, path: Path) -> str | None:
  """How a file differs from its object, by size and the store's own checksum; None: it does not."""
  if (size := path.stat().st_size) != entry.size:
    return f"{size} bytes of {entry.size}"
  if (expected := entry.checksums.get("md5")) is not None:
    with open(path, "rb") as file:
      found = base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode()
    return None if found == expected else f"md5 {found}, not {expected}"
  if (expected := entry.checksums.get("crc32c")) is not None:
    return None if (found := crc32c(path)) == expected else f"crc32c {found}, not {expected}"
  return None


def crc32c(path: Path) -> str:
  """The checksum of a file as gs:// writes it: base64 of the four bytes, the largest first."""
  import google_crc32c

  digest = google_crc32c.Checksum()
  with open(path, "rb", buffering=0) as file:
    while chunk := file.read(16 << 20):
      digest.update(chunk)
  return base64.b64encode(digest.digest()).decode()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
  """One process and thread at a time; freed by the system when it dies."""
  with open(path.with_name(f".{path.name}.lock"), "a", encoding="utf-8") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
