"""The directories of a checkpoint directory: which are steps, which are litter, which are moved aside or dropped.

A directory named by a number is a step that was whole once: a save is written under a name of its own and renamed when its
manifest stands. So whatever is missing in a numbered one was lost later, and a person may want the rest: it is moved aside and
told, never deleted. Everything is read from the disk each time: a cached list is how phantom steps are born.
"""

import contextlib
import dataclasses
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from maxtext_like import atomic
from maxtext_like.atomic import Fence
from maxtext_like.checkpoint.store import manifest
from maxtext_like.errors import UserError

_log = logging.getLogger(__name__)
_CORRUPT, _INCOMPLETE, _ABANDONED = ".corrupt", ".incomplete", ".abandoned"
_PRIVATE = re.compile(r"(\d+)\.(saving|dropping)-[0-9a-f]{8}")


class StepDirectories:
  """The steps under ``directory``, each named by its number.

  Args:
    directory: need not exist for the methods that only look.
    fence: entered around every rename and removal: raises, or does not return, when the directory is no longer ours.
    token: of this life of the run, 8 hexadecimal digits: nobody else's leftovers have it.
  """

  def __init__(
    self,
    directory: Path,
    fence: Fence = contextlib.nullcontext,
    token: str | None = None,
  ):
    self.directory = directory
    self._fence = fence
    self._token = token or secrets.token_hex(4)

  def path(self, step: int) -> Path:
    """Returns the directory of a step, whether it is there or not. It may be a link to one elsewhere."""
    return self.directory / str(step)

  def saving(self, step: int, save: int = 0) -> Path:
    """Returns where a step is written until it is whole. Another process that lost its lock cannot meet it there."""
    return self.directory / f"{step}.saving-{self._token}"

  def prepare(self, step: int, save: int) -> None:
    """Makes the directory of a save."""
    with self._fence():
      self.saving(step).mkdir()

  def discard(self, step: int, save: int) -> None:
    """Removes what a save left that failed. Writers that still run may put files back; the next start cleans again."""
    shutil.rmtree(self.saving(step), ignore_errors=True)

  def is_there(self) -> bool:
    """Whether the directory is."""
    return self.directory.is_dir()

  def has(self, step: int) -> bool:
    """Whether a step is complete."""
    return step in self.complete()

  def numbered(self) -> list[int]:
    """Returns every directory, or link to one, that is named like a step, oldest first."""
    names = (entry.name for entry in os.scandir(self.directory) if entry.is_dir())
    return sorted(int(name) for name in names if is_step_name(name))

  def with_manifest(self) -> list[int]:
    """Returns the steps that have a manifest, damaged or not, oldest first."""
    return [step for step in self.numbered() if (self.path(step) / manifest.FILE_NAME).exists()]

  def complete(self) -> list[int]:
    """Returns the steps whose manifest is whole and of that step, and whose files have the right sizes, oldest first."""
    return [step for step in self.numbered() if manifest.is_whole(self.path(step), step)]

  def require_names(self) -> None:
    """Looks whether every step is what its name says: a renamed one would be taken for progress that was never made.

    Raises:
      UserError: a directory whose manifest is of another step, or a link to what is not there.
    """
    if not self.directory.is_dir():
      return
    for entry in sorted(os.scandir(self.directory), key=lambda entry: entry.name):
      if _PRIVATE.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
        what = f"a link to {os.readlink(entry.path)}" if entry.is_symlink() else "no directory"
        raise UserError(
          f"{entry.path} is {what}; only a save that was interrupted has such a name, and it is a directory\n"
          "  fix: remove it, or give it another name"
        )
      if not is_step_name(entry.name):
        continue
      if entry.is_symlink() and not entry.is_dir():
        raise UserError(
          f"{entry.path} is a link to {os.readlink(entry.path)}, where no directory is (not mounted?)\n"
          "  fix: bring it back, or remove the link to go on without this step"
        )
      with contextlib.suppress(manifest.DamageError):
        found = manifest.read(Path(entry.path)).step
        if found != int(entry.name):
          raise UserError(
            f"{entry.path} holds step {found} by its own manifest: it was renamed or copied\n"
            f"  fix: name it {found}, or move it away; init_from={entry.path} starts a new run from its weights"
          )

  def make(self) -> None:
    """Makes the directory, finishes or removes what interrupted saves left, and moves aside what is no step any more.

    Raises:
      OSError: the directory cannot be made, read or cleaned.
      UserError: see ``require_names``.
    """
    if self.directory.is_symlink() and not self.directory.exists():
      raise UserError(
        f"checkpoint directory {self.directory} is a link to {os.readlink(self.directory)}, which is not there (not mounted?)"
      )
    self.directory.mkdir(parents=True, exist_ok=True)
    self.require_names()
    for path in sorted(self.directory.iterdir()):
      if found := _PRIVATE.fullmatch(path.name):
        step, doing = int(found[1]), found[2]
        if doing == "saving" and manifest.is_whole(path, step) and not self.path(step).exists():
          _log.warning("%s was whole and only lacked its name; it is step %d now", path, step)
          self.commit(step, path)
        else:
          _log.warning("%s is what an interrupted %s left; removed", path, "save" if doing == "saving" else "removal")
          shutil.rmtree(path)
    for step in self.numbered():
      path = self.path(step)
      if (path / manifest.FILE_NAME).exists():
        continue
      names = sorted(entry.name for entry in os.scandir(path))
      if not names and not path.is_symlink():
        _log.warning("%s is empty, not a checkpoint; removed", path)
        path.rmdir()
      elif all(name.startswith((*manifest.PARTS, manifest.FILE_NAME)) for name in names):
        aside = self._move_aside(step, _INCOMPLETE)
        _log.warning("%s has no %s, so it does not count; moved to %s", path, manifest.FILE_NAME, aside.name)
      else:
        _log.warning("%s is not a checkpoint (it holds %s); left alone", path, ", ".join(names[:3]))

  def publish(self, step: int, save: int, record: manifest.Manifest) -> None:
    """A step of which all is written gets its hashes, its manifest and its name. ``record``: without the files."""
    path = self.saving(step, save)
    manifest.write(path, dataclasses.replace(record, files=manifest.hash_files(path)))
    self.commit(step)
    atomic.sync_directory(self.directory)

  def commit(self, step: int, path: Path | None = None) -> None:
    """Gives a step that was written whole its name. From here on it counts. What lies in the way is moved aside."""
    with self._fence():
      if os.path.lexists(self.path(step)):
        self._move_aside(step, _CORRUPT if (self.path(step) / manifest.FILE_NAME).exists() else _INCOMPLETE)
      (path or self.saving(step)).rename(self.path(step))

  def drop_old(self, keep: int | None, spare: Collection[int] = ()) -> None:
    """Keeps the newest ``keep`` complete steps, all with None, and those of ``spare``; no damaged twin of a complete one.

    Of the abandoned ones those go that were saved anew, or are older than what is kept.
    A step loses its name first: a half-deleted one never counts. Of a linked one only the link is removed.
    """
    complete = self.complete()
    for step in complete:
      for twin in self.directory.glob(f"{step}{_CORRUPT}*"):
        shutil.rmtree(twin, ignore_errors=True)
    for step in self._abandoned():
      if step in complete or (keep and complete and step < complete[-keep:][0]):
        for path in self.directory.glob(f"{step}{_ABANDONED}*"):
          shutil.rmtree(path, ignore_errors=True)
    for step in complete[:-keep] if keep else []:
      if step in spare:
        continue
      path, dropping = self.path(step), self.directory / f"{step}.dropping-{self._token}"
      with self._fence():
        if path.is_symlink():
          _log.warning("%s was a link and is removed; what it led to is left: %s", path, os.readlink(path))
          path.unlink()
          continue
        path.rename(dropping)
      shutil.rmtree(dropping)

  def set_aside(self, step: int) -> Path:
    """Renames a damaged step so that it is no longer met, keeps it for whoever wants to look, and returns where."""
    with self._fence():
      return self._move_aside(step, _CORRUPT)

  def abandon_after(self, step: int) -> list[int]:
    """Moves aside the steps after this one, which the run has gone back to: they are no part of it now. Returns them."""
    later = [number for number in self.with_manifest() if number > step]
    for number in later:
      with self._fence():
        aside = self._move_aside(number, _ABANDONED)
      _log.warning("%s: the run went back past it, to step %d; moved to %s", self.path(number), step, aside.name)
    return later

  def abandoned(self) -> set[int]:
    """Returns the numbers that ``abandon_after`` moved aside and that no step has had since."""
    return self._abandoned() - set(self.numbered()) if self.directory.is_dir() else set()

  def _abandoned(self) -> set[int]:
    parts = (entry.name.partition(_ABANDONED) for entry in os.scandir(self.directory))
    return {int(number) for number, suffix, _ in parts if suffix and is_step_name(number)}

  def _move_aside(self, step: int, suffix: str) -> Path:
    number = 1
    while os.path.lexists(target := self.directory / f"{step}{suffix}{f'-{number}' if number > 1 else ''}"):
      number += 1
    self.path(step).rename(target)
    return target


def is_step_name(name: str) -> bool:
  """Whether a directory of this name is a step."""
  return name.isascii() and name.isdecimal() and str(int(name)) == name
