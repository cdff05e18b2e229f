"""The steps of a run in an object store, where nothing is renamed: a step counts when, and only when, its manifest is there.

Layout, beside what ``manifest`` says::

  120/5f0c9a21.7/state/     the arrays: the life of the run that wrote it, and its seventh save
  120/COMPLETE.json         the manifest, written last, on the condition that there is none; names the folder
  110/CORRUPT.json          the manifest of a step that failed its checksums; 90/ABANDONED.json: that the run went back past

A folder has the name of one save of one life, so a process that was stopped, and lost the run to another, writes where nobody
looks. What no manifest names is litter, and goes at the next start or with its step.
"""

import contextlib
import dataclasses
import logging
import re
import secrets
from collections.abc import Callable, Collection

from maxtext_like.atomic import Fence
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.steps import is_step_name
from maxtext_like.errors import UserError
from maxtext_like.storage import Place

_log = logging.getLogger(__name__)
_CORRUPT, _ABANDONED = "CORRUPT.json", "ABANDONED.json"
_FOLDER = re.compile(r"[0-9a-f]{8}\.\d+")


class RemoteSteps:
  """The steps below ``directory``, each named by its number; ``StepDirectories`` says what the methods do. OSErrors as Place's.

  Args:
    directory: in a store that writes on conditions, which are gs:// and s3://.
    fence: entered around every publication and removal: raises, or does not return, when the run is no longer ours.
    token: of this life of the run, 8 hexadecimal digits.
  """

  def __init__(
    self,
    directory: Place,
    fence: Fence = contextlib.nullcontext,
    token: str | None = None,
  ):
    self.directory = directory
    self._fence = fence
    self._token = token or secrets.token_hex(4)

  def path(self, step: int) -> Place:
    """Where a step is, whether it is there or not."""
    return self.directory / str(step)

  def saving(self, step: int, save: int) -> Place:
    """Where a step is written by the save of this number."""
    return self.path(step) / f"{self._token}.{save}"

  def is_there(self) -> bool:
    """Whether anything is."""
    return bool(self.directory.folders())

  def numbered(self) -> list[int]:
    """Everything that is named like a step, oldest first."""
    return sorted(int(name) for name in self.directory.folders() if is_step_name(name))

  def with_manifest(self) -> list[int]:
    """The steps that have a manifest, damaged or not, oldest first."""
    return [step for step in self.numbered() if self._has(step, manifest.FILE_NAME)]

  def complete(self) -> list[int]:
    """The steps whose manifest is whole and of that step, and whose objects are what was written, oldest first."""
    return [step for step in self.numbered() if self.has(step)]

  def has(self, step: int) -> bool:
    """Whether this one is complete."""
    return manifest.is_whole(self.path(step), step)

  def require_names(self) -> None:
    """Looks whether every step is what its name says.

    Raises:
      UserError: one has the manifest of another.
    """
    for step in self.numbered():
      with contextlib.suppress(manifest.DamageError):
        if (found := manifest.read(self.path(step)).step) != step:
          raise UserError(
            f"{self.path(step)} holds step {found} by its own manifest: it was copied\n"
            f"  fix: move it away; init_from={self.path(step)} starts a new run from its weights"
          )

  def make(self) -> None:
    """Removes what interrupted saves and removals left."""
    self.require_names()
    for step in self.numbered():
      if self._remove_litter(step):
        _log.warning("%s: what an interrupted save or removal left is removed", self.path(step))

  def prepare(self, step: int, save: int) -> None:
    """There are no directories to make."""

  def discard(self, step: int, save: int) -> None:
    """What a save left that failed goes later: a store that does not answer must not be waited for here."""

  def publish(self, step: int, save: int, record: manifest.Manifest) -> None:
    """A step of which all is written counts from here on. What had its name is moved aside, unless it is whole and so the same.

    Raises:
      FileExistsError: another process has published this step meanwhile.
    """
    path = self.saving(step, save)
    record = dataclasses.replace(record, files=manifest.describe_objects(path), folder=path.name)
    content = manifest.to_text(record).encode()
    if self.has(step):
      return
    with self._fence():
      if self._has(step, manifest.FILE_NAME):
        self._move_aside(step, _CORRUPT)
      (self.path(step) / manifest.FILE_NAME).create(content)

  def drop_old(self, keep: int | None, spare: Collection[int] = ()) -> None:
    """Keeps the newest ``keep`` complete steps, all with None, and what no manifest names nowhere."""
    complete = self.complete()
    kept = complete[-keep:] if keep else complete
    for step in self.numbered():
      if step in kept or step in spare:
        if step in kept:
          self._remove_litter(step)
      elif step in complete or (self._has(step, _ABANDONED) and kept and step < kept[0]):
        with self._fence():  # a step without its manifest never counts, however much of it is left
          (self.path(step) / manifest.FILE_NAME).remove()
        self._remove(step, lambda name: True)

  def set_aside(self, step: int) -> Place:
    """Takes a damaged step's manifest away from it; its objects stay for whoever wants to look. Returns where it is now."""
    with self._fence():
      return self._move_aside(step, _CORRUPT)

  def abandon_after(self, step: int) -> list[int]:
    """The same with the steps after this one, which the run has gone back to. Returns them."""
    later = [number for number in self.with_manifest() if number > step]
    for number in later:
      with self._fence():
        aside = self._move_aside(number, _ABANDONED)
      _log.warning("%s: the run went back past it, to step %d; its manifest is %s now", self.path(number), step, aside.name)
    return later

  def abandoned(self) -> set[int]:
    """The numbers that ``abandon_after`` took the manifest from and that no step has had since."""
    return {step for step in self.numbered() if self._has(step, _ABANDONED) and not self._has(step, manifest.FILE_NAME)}

  def _has(self, step: int, name: str) -> bool:
    return (self.path(step) / name).entry() is not None

  def _move_aside(self, step: int, name: str) -> Place:
    place, target = self.path(step) / manifest.FILE_NAME, self.path(step) / name
    with contextlib.suppress(FileNotFoundError):
      target.write_bytes(place.read_bytes())
    place.remove()
    return target

  def _remove_litter(self, step: int) -> bool:
    """Removes the folders of a step that no manifest of it names, not even one that was moved aside; says whether any was."""
    if self.has(step):  # of a damaged twin nobody wants to know any more
      named, aside = {manifest.read(self.path(step)).folder}, True
    elif any(self._has(step, name) for name in (manifest.FILE_NAME, _CORRUPT, _ABANDONED)):
      return False  # a person may want it
    else:
      named, aside = set(), False
    moved = (_CORRUPT, _ABANDONED) if aside else ()
    litter = lambda name: name in moved or (_FOLDER.fullmatch(name) is not None and name not in named)
    return self._remove(step, litter)

  def _remove(self, step: int, wanted: Callable[[str], bool]) -> bool:
    """Removes the objects of a step by the first part of their names in it."""
    place = self.path(step)
    gone = [entry.place for entry in place.entries() if wanted(entry.place.parts[len(place.parts)])]
    if gone:
      with self._fence():
        pass  # it is still ours; to remove many objects takes longer than others may be kept waiting
      for found in gone:
        found.remove()
    return bool(gone)
