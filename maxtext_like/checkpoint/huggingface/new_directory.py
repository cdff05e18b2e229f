"""A directory that comes to be as a whole or not at all: on this machine by a rename, in a store by the file that goes last."""

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
  """Where it is written before it is there.

  Attributes:
    path: on this machine; every file in it becomes one of the directory.
    place: what it becomes, where that is in a store.
  """

  path: Path
  place: Place | None = None
  _sent: list[Place] = field(default_factory=list)

  def is_whole(self, name: str) -> None:
    """Takes a file that nothing more is written to: one for a store goes there now, and leaves its room to the next.

    Raises:
      OSError: as Place's; or the store has another size than was sent.
    """
    if self.place is None:
      return
    path, to = self.path / name, self.place / name
    self._sent.append(to)
    to.upload(str(path))
    if (entry := to.entry()) is None or entry.size != path.stat().st_size:
      raise OSError(errno.EIO, "arrived with another size than it was sent", str(to))
    path.unlink()


@contextlib.contextmanager
def new_directory(out: Path | Place, last: str) -> Iterator[NewDirectory]:
  """A directory to write into, which becomes ``out`` when the with statement ends well and is removed when not.

  Args:
    out: a directory that does not exist, or an empty one; in a store a place that nothing is below.
    last: the file without which the others are nothing; in a store it goes last.

  Raises:
    UserError: ``out`` is not empty, or cannot be written.
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
      raise UserError(f"{where}: already exists; name a new directory")
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
        raise UserError(f"{printable(out)}: already exists; name a new directory")
      yield new
      names = [path.relative_to(new.path).as_posix() for path in new.path.rglob("*") if path.is_file()]
      for name in sorted(names, key=lambda name: (name == last, name)):
        new.is_whole(name)
    except BaseException as error:
      with contextlib.suppress(OSError):  # what is left has no such last file, and so is nothing
        for place in new._sent:
          place.remove()
      if isinstance(error, OSError):
        raise _cannot(error) from error
      raise


def _cannot(error: OSError) -> Exception:
  """A store's error as ``failed`` has it, a full disk of this machine as what it is."""
  if isinstance(error.filename, str) and is_remote(error.filename):
    return failed(error)
  return UserError(f"{tempfile.gettempdir()}: cannot be written: {error.strerror}\n  fix: TMPDIR=DIR names another folder")
