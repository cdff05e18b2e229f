"""Creates a directory completely or not at all: by a rename on a disk, by uploading one file last in a store."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from maxtext_like.errors import UserError
from maxtext_like.storage import Place, failed, is_remote
from maxtext_like.strict_json import printable


@dataclass
class NewDirectory:
  """A directory that is being written.

  Attributes:
    path: temporary local directory; every file in it becomes a file of the new directory.
    place: the new directory if it is in a store, else None.
  """

  path: Path
  place: Place | None = None
  _sent: list[Place] = field(default_factory=list)

  def is_whole(self, name: str) -> None:
    """Call it when a file is complete. For a store, uploads the file and deletes it locally, to free disk space for the next.

    Raises:
      OSError: as Place; or the stored object has another size.
    """
    if self.place is None:
      return
    path, to = self.path / name, self.place / name
    self._sent.append(to)
    to.upload(str(path))
    if (entry := to.entry()) is None or entry.size != path.stat().st_size:
      raise OSError(errno.EIO, "the stored object has another size than the file", str(to))
    path.unlink()


@contextlib.contextmanager
def new_directory(out: Path | Place, last: str) -> Iterator[NewDirectory]:
  """Yields a directory to write into. It becomes ``out`` if the with block succeeds, and is removed otherwise.

  Args:
    out: a directory that does not exist or is empty; in a store, a place without objects below it.
    last: the file without which the directory is unusable; in a store it is uploaded last.

  Raises:
    UserError: ``out`` is not empty or cannot be written.
    RetryableError: a store does not answer.
  """
  if isinstance(out, Place):
    with _in_store(out, last) as new:
      yield new
    return
  where = printable(out)
  part = out.with_name(f".{out.name}.{os.getpid()}.part")
  try:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
      raise UserError(f"{where}: already exists\n  fix: name a new directory")
    part.mkdir(parents=True)
  except OSError as error:
    raise UserError(f"{where}: cannot be written: {error.strerror}") from None
  try:
    yield NewDirectory(part)
    if out.exists():
      out.rmdir()
    os.rename(part, out)
  except OSError as error:
    raise UserError(f"{where}: cannot be written: {error.strerror}") from None
  finally:
    shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _in_store(out: Place, last: str) -> Iterator[NewDirectory]:
  with tempfile.TemporaryDirectory(prefix="maxtext-like-") as folder:
    new = NewDirectory(Path(folder), out)
    try:
      if out.entries():
        raise UserError(f"{printable(out)}: already exists\n  fix: name a new directory")
      yield new
      names = [path.relative_to(new.path).as_posix() for path in new.path.rglob("*") if path.is_file()]
      for name in sorted(names, key=lambda name: (name == last, name)):
        new.is_whole(name)
    except BaseException as error:
      with contextlib.suppress(OSError):  # leftovers lack the last file, so nothing takes them for a directory
        for place in new._sent:
          place.remove()
      if isinstance(error, OSError):
        raise _cannot(error) from error
      raise


def _cannot(error: OSError) -> Exception:
  """Returns the error to raise: ``failed`` for a store, or the local disk's own error."""
  if isinstance(error.filename, str) and is_remote(error.filename):
    return failed(error)
  return UserError(f"{tempfile.gettempdir()}: cannot be written: {error.strerror}\n  fix: set TMPDIR to another folder")
