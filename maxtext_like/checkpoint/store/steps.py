"""The directories of a checkpoint directory: finding, publishing, cleaning up, setting aside and removing steps.

A directory named by a number is a step that was complete once: a save is written under a temporary name and renamed after its
manifest is written. A numbered directory with missing files therefore lost them later. Someone may need the rest, so it is
renamed and reported, never deleted. Every method reads the disk: a cached list could contain steps that no longer exist.
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
  """The steps in ``directory``, each in a subdirectory named by its number.

  Args:
    directory: it need not exist for methods that only read.
    fence: context entered around every rename and removal; it raises, or never returns, if another process owns the directory.
    token: 8 hexadecimal digits, unique to this start of the run. They distinguish its temporary directories from others.
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
    """Returns the directory of a step, which need not exist. It may be a symbolic link."""
    return self.directory / str(step)

  def saving(self, step: int, save: int = 0) -> Path:
    """Returns the directory in which a step is written until it is complete. A process that lost its lock has another one."""
    return self.directory / f"{step}.saving-{self._token}"

  def prepare(self, step: int, save: int) -> None:
    """Creates the directory of a save."""
    with self._fence():
      self.saving(step).mkdir()

  def discard(self, step: int, save: int) -> None:
    """Removes the files of a failed save. Writers that still run may create files again; the next start removes those."""
    shutil.rmtree(self.saving(step), ignore_errors=True)

  def is_there(self) -> bool:
    """Returns True if the directory exists."""
    return self.directory.is_dir()

  def has(self, step: int) -> bool:
    """Returns True if a step is complete."""
    return step in self.complete()

  def numbered(self) -> list[int]:
    """Returns every directory, or link to one, whose name is a step number, oldest first."""
    names = (entry.name for entry in os.scandir(self.directory) if entry.is_dir())
    return sorted(int(name) for name in names if is_step_name(name))

  def with_manifest(self) -> list[int]:
    """Returns the steps with a manifest, intact or damaged, oldest first."""
    return [step for step in self.numbered() if (self.path(step) / manifest.FILE_NAME).exists()]

  def complete(self) -> list[int]:
    """Returns the steps whose manifest is intact and matches the name, and whose files have the right sizes, oldest first."""
    return [step for step in self.numbered() if manifest.is_complete(self.path(step), step)]

  def require_names(self) -> None:
    """Checks that the name of every step matches its manifest. A renamed step would count as progress that was never made.

    Raises:
      UserError: a directory has the manifest of another step, or is a broken link.
    """
    if not self.directory.is_dir():
      return
    for entry in sorted(os.scandir(self.directory), key=lambda entry: entry.name):
      if _PRIVATE.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
        what = f"a link to {os.readlink(entry.path)}" if entry.is_symlink() else "not a directory"
        raise UserError(
          f"{entry.path} is {what}; this name is reserved for the directory of an interrupted save\n"
          "  fix: remove it or rename it"
        )
      if not is_step_name(entry.name):
        continue
      if entry.is_symlink() and not entry.is_dir():
        raise UserError(
          f"{entry.path} is a link to {os.readlink(entry.path)}, which does not exist (is the disk mounted?)\n"
          "  fix: restore the target, or remove the link to continue without this step"
        )
      with contextlib.suppress(manifest.DamageError):
        found = manifest.read(Path(entry.path)).step
        if found != int(entry.name):
          raise UserError(
            f"{entry.path} holds step {found} according to its manifest: it was renamed or copied\n"
            f"  fix: rename it to {found} or move it away; init_from={entry.path} starts a new run with its weights"
          )

  def make(self) -> None:
    """Creates the directory, completes or removes interrupted saves, and renames directories that are not valid steps.

    Raises:
      OSError: the directory cannot be created, read or cleaned.
      UserError: see ``require_names``.
    """
    if self.directory.is_symlink() and not self.directory.exists():
      raise UserError(
        f"checkpoint directory {self.directory} is a link to {os.readlink(self.directory)}, which does not exist "
        "(is the disk mounted?)",
        fix="mount the disk, or remove the link",
      )
    self.directory.mkdir(parents=True, exist_ok=True)
    self.require_names()
    # Temporary directories: a complete save was interrupted just before its rename, so rename it now. Remove all others.
    for path in sorted(self.directory.iterdir()):
      if found := _PRIVATE.fullmatch(path.name):
        step, doing = int(found[1]), found[2]
        if doing == "saving" and manifest.is_complete(path, step) and not self.path(step).exists():
          _log.warning("%s was complete except for its name; it is step %d now", path, step)
          self.commit(step, path)
        else:
          _log.warning("%s was left by an interrupted %s and is removed", path, "save" if doing == "saving" else "removal")
          shutil.rmtree(path)
    # Numbered directories without a manifest.
    for step in self.numbered():
      path = self.path(step)
      if (path / manifest.FILE_NAME).exists():
        continue
      names = sorted(entry.name for entry in os.scandir(path))
      if not names and not path.is_symlink():
        _log.warning("%s is empty and not a checkpoint; it is removed", path)
        path.rmdir()
      elif all(name.startswith((*manifest.PARTS, manifest.FILE_NAME)) for name in names):
        aside = self._move_aside(step, _INCOMPLETE)
        _log.warning("%s has no %s, so it is not a checkpoint; it was renamed to %s", path, manifest.FILE_NAME, aside.name)
      else:
        _log.warning("%s is not a checkpoint (it contains %s); it is left unchanged", path, ", ".join(names[:3]))

  def publish(self, step: int, save: int, record: manifest.Manifest) -> None:
    """Completes a step whose files are written: hashes them, writes the manifest and renames the step.

    Args:
      step: number of the step.
      save: number of the save.
      record: the manifest without ``files``.
    """
    path = self.saving(step, save)
    manifest.write(path, dataclasses.replace(record, files=manifest.hash_files(path)))
    self.commit(step)
    atomic.sync_directory(self.directory)

  def commit(self, step: int, path: Path | None = None) -> None:
    """Renames a complete step to its number. From then on it counts. An existing directory of that name is set aside."""
    with self._fence():
      if os.path.lexists(self.path(step)):
        self._move_aside(step, _CORRUPT if (self.path(step) / manifest.FILE_NAME).exists() else _INCOMPLETE)
      (path or self.saving(step)).rename(self.path(step))

  def drop_old(self, keep: int | None, spare: Collection[int] = ()) -> None:
    """Removes old steps, except the newest ``keep`` complete ones (all if None) and those in ``spare``.

    Corrupt copies of complete steps are removed too. Abandoned steps are removed if they were saved again, or if they are older
    than the kept steps. A step is renamed before it is deleted, so that a partly deleted step never counts. Of a linked step
    only the link is removed.
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
          _log.warning("%s was a link and is removed; its target is kept: %s", path, os.readlink(path))
          path.unlink()
          continue
        path.rename(dropping)
      shutil.rmtree(dropping)

  def set_aside(self, step: int) -> Path:
    """Renames a damaged step so that it is no longer used, and returns the new path. The files stay for inspection."""
    with self._fence():
      return self._move_aside(step, _CORRUPT)

  def abandon_after(self, step: int) -> list[int]:
    """Renames the steps after ``step``, to which the run has gone back, so that they no longer count. Returns their numbers."""
    later = [number for number in self.with_manifest() if number > step]
    for number in later:
      with self._fence():
        aside = self._move_aside(number, _ABANDONED)
      _log.warning("%s: the run went back to step %d; this later step was renamed to %s", self.path(number), step, aside.name)
    return later

  def abandoned(self) -> set[int]:
    """Returns the steps that ``abandon_after`` renamed and that have not been saved again."""
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
  """Returns True if a directory of this name is a step."""
  return name.isascii() and name.isdecimal() and str(int(name)) == name
