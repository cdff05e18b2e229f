"""The steps of a run in an object store. Objects cannot be renamed there: a step counts if and only if its manifest exists.

Layout, in addition to that in ``manifest``::

  120/5f0c9a21.7/state/     the arrays: the token of the run's start that wrote them, and the number of its save
  120/COMPLETE.json         the manifest, written last and only if there is none yet; it names the folder
  110/CORRUPT.json          the manifest of a step that failed its checksums
  90/ABANDONED.json         the manifest of a step that the run discarded when it went back to an earlier step

Each save writes to a new folder. A process that was suspended and lost the run to another one therefore writes where
nothing reads. Folders that no manifest names are leftovers; they are removed at the next start or together with their step.
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
  """The steps below ``directory``, each named by its number. ``StepDirectories`` documents the methods, Place their errors.

  Args:
    directory: a folder in a store with conditional writes, which are gs:// and s3://.
    fence: context entered around every publication and removal; it raises, or never returns, if another process owns the run.
    token: 8 hexadecimal digits, unique to this start of the run.
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
    """Returns the place of a step, which need not exist."""
    return self.directory / str(step)

  def saving(self, step: int, save: int) -> Place:
    """Returns the folder to which the save with this number writes a step."""
    return self.path(step) / f"{self._token}.{save}"

  def is_there(self) -> bool:
    """Returns True if there is any step."""
    return bool(self.directory.folders())

  def numbered(self) -> list[int]:
    """Returns every folder whose name is a step number, oldest first."""
    return sorted(int(name) for name in self.directory.folders() if is_step_name(name))

  def with_manifest(self) -> list[int]:
    """Returns the steps with a manifest, intact or damaged, oldest first."""
    return [step for step in self.numbered() if self._has(step, manifest.FILE_NAME)]

  def complete(self) -> list[int]:
    """Returns the steps whose manifest is intact and matches the name, and whose objects are unchanged, oldest first."""
    return [step for step in self.numbered() if self.has(step)]

  def has(self, step: int) -> bool:
    """Returns True if this step is complete."""
    return manifest.is_complete(self.path(step), step)

  def require_names(self) -> None:
    """Checks that the name of every step matches its manifest.

    Raises:
      UserError: a step has the manifest of another one.
    """
    for step in self.numbered():
      with contextlib.suppress(manifest.DamageError):
        if (found := manifest.read(self.path(step)).step) != step:
          raise UserError(
            f"{self.path(step)} holds step {found} according to its manifest: it was copied\n"
            f"  fix: move it away; init_from={self.path(step)} starts a new run with its weights"
          )

  def make(self) -> None:
    """Removes what interrupted saves and removals left."""
    self.require_names()
    for step in self.numbered():
      if self._remove_litter(step):
        _log.warning("%s: leftovers of an interrupted save or removal were removed", self.path(step))

  def prepare(self, step: int, save: int) -> None:
    """Does nothing: a store has no directories to create."""

  def discard(self, step: int, save: int) -> None:
    """Does nothing: leftovers are removed later, so that training does not wait for a store that does not answer."""

  def publish(self, step: int, save: int, record: manifest.Manifest) -> None:
    """Publishes a step whose objects are written. A manifest under that name is set aside, unless its step is already complete.

    Raises:
      FileExistsError: another process has published this step in the meantime.
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
    """Removes old steps, except the newest ``keep`` complete ones (all if None) and those in ``spare``, and all leftovers."""
    complete = self.complete()
    kept = complete[-keep:] if keep else complete
    for step in self.numbered():
      if step in kept or step in spare:
        if step in kept:
          self._remove_litter(step)
      elif step in complete or (self._has(step, _ABANDONED) and kept and step < kept[0]):
        with self._fence():  # without its manifest a step never counts, even if removal is interrupted
          (self.path(step) / manifest.FILE_NAME).remove()
        self._remove(step, lambda name: True)

  def set_aside(self, step: int) -> Place:
    """Renames the manifest of a damaged step and returns its new place. The objects stay for inspection."""
    with self._fence():
      return self._move_aside(step, _CORRUPT)

  def abandon_after(self, step: int) -> list[int]:
    """Renames the manifests of the steps after ``step``, to which the run has gone back. Returns their numbers."""
    later = [number for number in self.with_manifest() if number > step]
    for number in later:
      with self._fence():
        aside = self._move_aside(number, _ABANDONED)
      _log.warning("%s: the run went back to step %d; this later step has %s now", self.path(number), step, aside.name)
    return later

  def abandoned(self) -> set[int]:
    """Returns the steps whose manifest ``abandon_after`` renamed and that have not been saved again."""
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
    """Removes the folders of a step that no manifest names. Returns True if there were any."""
    if self.has(step):  # the step is complete, so an older damaged version of it is useless
      named, aside = {manifest.read(self.path(step)).folder}, True
    elif any(self._has(step, name) for name in (manifest.FILE_NAME, _CORRUPT, _ABANDONED)):
      return False  # someone may need the damaged step
    else:
      named, aside = set(), False
    moved = (_CORRUPT, _ABANDONED) if aside else ()
    litter = lambda name: name in moved or (_FOLDER.fullmatch(name) is not None and name not in named)
    return self._remove(step, litter)

  def _remove(self, step: int, wanted: Callable[[str], bool]) -> bool:
    """Removes the objects of a step whose first name component is wanted. Returns True if there were any."""
    place = self.path(step)
    gone = [entry.place for entry in place.entries() if wanted(entry.place.parts[len(place.parts)])]
    if gone:
      with self._fence():
        pass  # check ownership once; removing many objects would block other users of the fence for too long
      for found in gone:
        found.remove()
    return bool(gone)
