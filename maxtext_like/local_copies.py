"""Local copies of objects in a remote store, for code that needs random access, memory mapping or a file path.

A copy is stored at ``<folder>/<protocol>/<bucket>/<name>``, next to a note with the size and version of the copied object. If
the object has changed since, it is copied again. All processes of a host share the copies.
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
_TOLD_FROM = 256 * 2**20  # bytes; larger downloads are announced in the log because they take noticeable time
_log = logging.getLogger(__name__)


def folder() -> Path:
  """Returns the folder of the copies: ``$MAXTEXT_LIKE_COPIES``, or ``maxtext_like/copies`` in the user's cache directory."""
  if value := os.environ.get(FOLDER_VARIABLE):
    return Path(value).expanduser().absolute()
  return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "maxtext_like" / "copies"


def path_of(place: Place) -> Path:
  """Returns the path of the local copy of ``place``, which may not exist yet."""
  return folder().joinpath(place.protocol, *place.parts)


def copy(entries: Sequence[Entry]) -> list[Path]:
  """Downloads the objects that have no up-to-date local copy.

  Returns:
    The path of each local copy, in the order of ``entries``.

  Raises:
    UserError: not enough disk space, no permission, or an object no longer exists.
    RetryableError: the store does not answer, or the received data do not match its size or checksum.
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
  """Copies one object, named by its URL. Returns the local path.

  Raises:
    UserError, RetryableError: as ``copy``; UserError also if there is no such object.
  """
  place = Place(url)
  try:
    entry = place.entry()
  except OSError as error:
    raise failed(error) from error
  if entry is None:
    raise UserError(f"{place}: no such object", fix="name an object that exists; gcloud storage ls or aws s3 ls lists them")
  return copy([entry])[0]


def copy_folder(place: Place, wanted: Callable[[Entry], bool], below: Sequence[str] = ()) -> Path:
  """Copies the wanted objects directly below ``place``, and removes local copies of objects that no longer exist.

  Args:
    place: the folder in the store.
    wanted: returns True for each object to copy.
    below: names of subfolders to copy in the same way, if they exist.

  Returns:
    The local folder.

  Raises:
    UserError, RetryableError: as ``copy``; UserError also if the folder is empty or does not exist.
  """
  try:
    entries = place.children()
  except OSError as error:
    raise failed(error) from error
  if not entries:
    raise UserError(
      f"{place}: no such object, and none directly below",
      fix="name a folder that exists; gcloud storage ls or aws s3 ls lists them",
    )
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
      f"{there}: not enough disk space to copy {needed / 1e9:.2f} GB from the store: {free / 1e9:.2f} GB are free\n"
      f"  fix: free disk space, or set the environment variable {FOLDER_VARIABLE} to a folder on a larger disk"
    )
  if needed >= _TOLD_FROM:
    _log.warning("copying %.2f GB from the store to %s", needed / 1e9, there)


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
        if attempt == _ATTEMPTS or (isinstance(error, OSError) and isinstance(failed(error), UserError)):
          raise  # a missing object, refused credentials or a wrong setting: another attempt would fail as well
        _log.warning("%s; trying again", error)
        time.sleep(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1))


def _copy_once(entry: Entry, path: Path) -> None:
  part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
  try:
    entry.place.download(str(part))
    if (wrong := _difference(entry, part)) is not None:
      if (now := entry.place.entry()) is None or now.version != entry.version:
        raise RetryableError(f"{entry.place}: the object was rewritten during the copy; run the same command again")
      raise RetryableError(f"{entry.place}: the downloaded data are damaged: {wrong}")
    if entry.modified is not None:  # large files are identified by their modification time, which must agree on all hosts
      os.utime(part, (entry.modified, entry.modified))
    _note_of(path).unlink(missing_ok=True)
    os.replace(part, path)
    atomic.write_text(_note_of(path), json.dumps(_note(entry)) + "\n")
  finally:
    part.unlink(missing_ok=True)


def _difference(entry: Entry, path: Path) -> str | None:
  """Compares a file with its object by size and by the store's own checksum. Returns the difference, or None if they agree."""
  if (size := path.stat().st_size) != entry.size:
    return f"{size} bytes received of {entry.size}"
  if (expected := entry.checksums.get("md5")) is not None:
    with open(path, "rb") as file:
      found = base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode()
    return None if found == expected else f"md5 {found}, expected {expected}"
  if (expected := entry.checksums.get("crc32c")) is not None:
    return None if (found := crc32c(path)) == expected else f"crc32c {found}, expected {expected}"
  return None


def crc32c(path: Path) -> str:
  """Returns the CRC32C of a file in the format of gs://: base64 of its four bytes in big-endian order."""
  import google_crc32c

  digest = google_crc32c.Checksum()
  with open(path, "rb", buffering=0) as file:
    while chunk := file.read(16 << 20):
      digest.update(chunk)
  return base64.b64encode(digest.digest()).decode()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
  """Lets one process and thread at a time copy an object. The system releases the lock if the process dies."""
  with open(path.with_name(f".{path.name}.lock"), "a", encoding="utf-8") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
