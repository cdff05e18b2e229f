"""The lock of a run in gs:// or s3://: an object that names the holder, made on the condition that there is none.

Its holder writes it again every ``BEAT_SECONDS``, on the condition that it is still the one that it wrote; who wants the run
watches it for change, and takes its place on the condition that it is still the one that was watched. So of all who write it
one at a time succeeds, and each other knows that it did not.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from maxtext_like.errors import UserError
from maxtext_like.storage import Place

BEAT_SECONDS = 10.0
WATCH_SECONDS = 45.0  # four beats: a request may take a while
_LOOK_SECONDS = 2.0
_log = logging.getLogger(__name__)


class RemoteLock:
  """One holder's lock.

  Args:
    place: of the object.
    identity: what tells the holder from every other, as JSON values with a "token".
    lives: a holder -> whether it lives, as far as this machine can tell; None: it cannot.
    lost: called from the thread of the beat, with what became of the lock, when it is another's.
  """

  def __init__(
    self, place: Place, identity: dict[str, Any], lives: Callable[[dict[str, Any]], bool | None], lost: Callable[[str], None]
  ):
    self._place, self._identity, self._lives, self._lost = place, identity, lives, lost
    self._version = ""
    self._beats = 0
    self._writing = threading.Lock()
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None

  def acquire(self) -> dict[str, Any] | None:
    """Takes the lock, and keeps it. Returns the holder that lives, where one does; None: it is ours.

    Raises:
      OSError: as Place's.
      UserError: the store has no conditions.
    """
    while True:
      entry = self._place.entry()
      try:
        if entry is None:
          self._version = self._place.create(self._content())
          self._require_conditions()
          break
        holder = holder_of(self._place)
        if holder is not None and self._living(holder, entry.version):
          return holder
        self._version = self._place.replace(self._content(), entry.version)
        _log.warning("%s: taken over from one that is gone", self._place)
        break
      except (FileExistsError, FileNotFoundError):
        continue  # somebody was faster
    self._thread = threading.Thread(target=self._beat, name="remote-lock", daemon=True)
    self._thread.start()
    return None

  def why_lost(self) -> str | None:
    """What became of the lock, by the store's own word; None: it is ours. OSError as Place's."""
    try:
      holder = holder_of(self._place)
    except FileNotFoundError:
      return "its lock was removed while this run was going on"
    if holder is not None and holder.get("token") == self._identity["token"]:
      return None
    return f"process {(holder or {}).get('pid')} on {(holder or {}).get('host')} took it over"

  def release(self) -> None:
    """Gives the lock up, where it is still ours. OSError as Place's."""
    self._stop.set()
    with self._writing:
      if self.why_lost() is None:
        self._place.remove()

  def _require_conditions(self) -> None:
    """Looks whether the store heeds conditions at all, as not every one that speaks like s3:// does."""
    try:
      self._place.create(b"{}")
    except FileExistsError:
      return
    self._place.remove()
    raise UserError(
      f"{self._place}: the store writes an object that is to be new over one that is there (If-None-Match)\n"
      "  why: two runs could have one directory\n"
      "  fix: a directory of this machine as output_dir, and this store as checkpoint_mirror"
    )

  def _content(self) -> bytes:
    return json.dumps({**self._identity, "beats": self._beats}, indent=1).encode()

  def _living(self, holder: dict[str, Any], version: str) -> bool:
    if (known := self._lives(holder)) is not None:
      return known
    _log.warning("%s: held from %s; watching it for %d s", self._place, holder.get("host"), WATCH_SECONDS)
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
      time.sleep(min(_LOOK_SECONDS, WATCH_SECONDS / 4))
      entry = self._place.entry()
      if entry is None:
        return False
      if entry.version != version:
        return True
    return False

  def _beat(self) -> None:
    failing = False
    while not self._stop.wait(BEAT_SECONDS):
      try:
        with self._writing:
          if self._stop.is_set():
            return
          self._beats += 1
          self._version = self._place.replace(self._content(), self._version)
      except FileExistsError:
        try:
          why = self.why_lost()
          if why is None:  # an earlier beat, of which nobody told us that it was written
            entry = self._place.entry()
            self._version = entry.version if entry is not None else ""
            continue
        except OSError:
          continue
        self._lost(why)
        return
      except OSError as error:
        if not failing:
          _log.warning("%s: heartbeat failed: %s; trying on", self._place, error.strerror)
        failing = True
        continue
      if failing:
        _log.warning("%s: heartbeat works again", self._place)
      failing = False


def holder_of(place: Place) -> dict[str, Any] | None:
  """Who a lock names; None where it is no lock. OSError as Place's, where there is none too."""
  try:
    found = json.loads(place.read_bytes())
  except ValueError:
    return None
  return found if isinstance(found, dict) else None
