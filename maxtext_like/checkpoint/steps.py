"""The numbered directories of a checkpoint directory: which count, which are litter, which are set aside or dropped.

Everything is read from the disk each time: a cached list is how phantom steps are born.
"""

import logging
import os
import shutil
from pathlib import Path

from maxtext_like.checkpoint import manifest

_log = logging.getLogger(__name__)
_CORRUPT = ".corrupt"


class StepDirectories:
  """The steps under ``directory``, each named by its number."""

  def __init__(self, directory: Path):
    self.directory = directory

  def path(self, step: int) -> Path:
    """Returns the directory of a step, whether it is there or not."""
    return self.directory / str(step)

  def numbered(self) -> list[int]:
    """Returns every directory that is named like a step, oldest first."""
    names = (entry.name for entry in os.scandir(self.directory) if entry.is_dir(follow_symlinks=False))
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)

  def with_manifest(self) -> list[int]:
    """Returns the steps that were complete once, damaged or not, oldest first."""
    return [step for step in self.numbered() if (self.path(step) / manifest.FILE_NAME).exists()]

  def complete(self) -> list[int]:
    """Returns the steps whose manifest is whole and whose files have the right sizes, oldest first. Reads no array."""
    found = []
    for step in self.numbered():
      try:
        manifest.check_sizes(self.path(step), manifest.read(self.path(step)))
      except manifest.DamageError:
        continue
      found.append(step)
    return found

  def make(self) -> None:
    """Makes the directory; removes, and tells, what interrupted saves left. Anybody else's files are only told.

    Raises:
      OSError: the directory cannot be made, read or cleaned.
    """
    self.directory.mkdir(parents=True, exist_ok=True)
    for step in self.numbered():
      path = self.path(step)
      if (path / manifest.FILE_NAME).exists():
        continue
      names = [entry.name for entry in os.scandir(path)]
      if all(name.startswith((*manifest.PARTS, manifest.FILE_NAME)) for name in names):
        _log.warning("%s is not a complete checkpoint (an interrupted save); removed", path)
        shutil.rmtree(path)
      else:
        _log.warning("%s is not a checkpoint (it holds %s); left alone", path, ", ".join(sorted(names)[:3]))

  def drop_old(self, keep: int | None) -> None:
    """Keeps the newest ``keep`` complete steps, all with None, and no damaged twin of a complete one.

    The manifest goes first: a half-deleted step never counts.
    """
    complete = self.complete()
    for step in complete:
      shutil.rmtree(self.directory / f"{step}{_CORRUPT}", ignore_errors=True)
    for step in complete[:-keep] if keep else []:
      (self.path(step) / manifest.FILE_NAME).unlink()
      shutil.rmtree(self.path(step))

  def set_aside(self, step: int) -> None:
    """Renames a damaged step so that it is no longer met, and keeps it for whoever wants to look."""
    target = self.directory / f"{step}{_CORRUPT}"
    if target.exists():
      shutil.rmtree(target)
    self.path(step).rename(target)
