"""Several processes as one run: joined once, then they agree on what must be the same in all, and miss the one that is lost.

Alone, which is the default, nothing here touches a network, and every function answers at once. What travels goes through the
key-value store of JAX's coordinator, which lives in process 0; arrays never do.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from maxtext_like.errors import ExitError, RetryableError, UserError
from maxtext_like.sharding import launchers, rendezvous

_PREFIX = "maxtext_like"
_LOOK_SECONDS = 0.5  # between two looks whether another process has failed at what all do together
_GATHER_SECONDS = 0.05  # between two looks whether all are there
_GOODBYE_SECONDS = 10.0  # between the ends of the first process and the last
_JAX_SECONDS = 24 * 3600  # JAX must not end a process before we have said which one is lost
T = TypeVar("T")


@dataclass(frozen=True)
class _Joined:
  index: int
  hosts: tuple[str, ...]
  client: Any


_joined: _Joined | None = None
_turns = itertools.count()
_meetings = itertools.count()


def index() -> int:
  """Which process this is."""
  return _joined.index if _joined else 0


def count() -> int:
  """How many processes the run has."""
  return len(_joined.hosts) if _joined else 1


def primary() -> bool:
  """Whether this is process 0, which alone writes what is not a checkpoint."""
  return index() == 0


def name_of(number: int) -> str:
  """A process as it is told: its number and its host."""
  return f"process {number} (host {_joined.hosts[number]})" if _joined else "process 0"


def join(facts: Mapping[str, str], seconds: float, environment: Mapping[str, str] = os.environ) -> None:
  """Joins the other processes of the run, if a launcher started several. Before the first device is touched, and once.

  Args:
    facts: what must be the same in all of them: {what it is: its value}.
    seconds: how long to wait for the others.
    environment: of this process.

  Raises:
    UserError: they are not of one run, their port is taken, or this process was one of several already.
    RetryableError: some did not come.
  """
  global _joined
  place = launchers.place(environment) or launchers.place_of_tpu_vm(environment)
  if place is None:
    return
  if _joined is not None:
    was = f"this Python was {name_of(index())} of a run already, and JAX joins once"
    raise UserError(f"{was}\n  fix: a new Python, in all of them, for each run")
  import jax

  address, total, number = place.address, place.count, place.index
  if address is None or total is None or number is None:
    address, total, number = _found_by_jax(place.launcher, seconds)
  hosts = rendezvous.meet(address, number, total, facts, seconds)
  # We end the run ourselves when a process is lost, naming it; SIGTERM stays ours too.
  jax.config.update("jax_enable_recoverability", True)
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    address, total, number, cluster_detection_method="deactivate", initialization_timeout=int(seconds) + 1,
    heartbeat_timeout_seconds=_JAX_SECONDS, shutdown_timeout_seconds=10,
  )  # fmt: skip
  from jax._src import distributed  # JAX has no public name for its key-value store

  _joined = _Joined(number, tuple(hosts), distributed.global_state.client)


def _found_by_jax(launcher: str, seconds: float) -> tuple[str, int, int]:
  from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize() asks

  reason = "it does not know where they meet"
  try:
    address, total, number, _ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(seconds))
  except Exception as error:  # each cluster has its own ways to fail, from missing variables to a metadata server
    address, total, number, reason = None, None, None, f"{type(error).__name__}: {error}"
  if address is None or total is None or number is None:
    raise UserError(
      f"{launcher}: JAX cannot find the other processes: {reason}\n"
      "  fix: set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each of them"
    )
  return address, total, number


def barrier(name: str, seconds: float) -> None:
  """Waits until every process is here. ``name``: of this meeting, the same in all; used again only when it is over.

  Raises:
    RetryableError: some did not come.
  """
  if _joined is None:
    return
  try:
    _joined.client.wait_at_barrier(f"{_PREFIX}/{name}", _milliseconds(seconds))
  except Exception as error:  # of JAX's own kind, which has no public name
    reason = str(error).splitlines()[0]
    raise RetryableError(f"not all processes came to {name!r} in {seconds:.0f} s: {reason}") from error


def await_compiled(program: str, seconds: float) -> None:
  """Wait until every process has compiled a program; call it before the program first runs.

  The collectives of a CPU (gloo) wait 30 s for the other processes to connect and then fail. One process may find its program
  in the compilation cache while another compiles for minutes.

  Args:
    program: its name, the same in all processes.
    seconds: the limit of a compilation; 0 for none.

  Raises:
    RetryableError: a process did not finish in time.
  """
  barrier(f"compiled {program}", seconds or math.inf)


def gather(name: str, seconds: float) -> None:
  """``barrier`` for what runs in ``together``: its thread may be left behind, and must not be in JAX's client when that ends.

  Args:
    name: of this meeting, the same in all; never used again.
    seconds: how long to wait for the others.

  Raises:
    RetryableError: some did not come.
  """
  if _joined is None:
    return
  put(f"{name}/{_joined.index}", "here")
  deadline = time.monotonic() + seconds
  while len(_joined.client.key_value_dir_get(f"{_PREFIX}/{name}/")) < count():
    if time.monotonic() > deadline:
      raise RetryableError(f"not all processes came to {name!r} in {seconds:.0f} s")
    time.sleep(_GATHER_SECONDS)


def everyone(value: str, seconds: float, name: str | None = None) -> list[str]:
  """What each process gives, in their order. Every process calls it at the same point; ``name`` as ``barrier``, for threads."""
  if _joined is None:
    return [value]
  # Two names in turn are enough, and the store stays small: who is at the next meeting has read what was said at this one.
  name = name or f"meeting-{next(_meetings) % 2}"
  put(f"{name}/{_joined.index}", value)
  barrier(name, seconds)
  said = dict(_joined.client.key_value_dir_get(f"{_PREFIX}/{name}/"))
  return [said[f"{_PREFIX}/{name}/{number}"] for number in range(count())]


def require_same(values: Mapping[str, Any], seconds: float) -> None:
  """Looks whether what each process found on its host is the same.

  Args:
    values: {what it is: a JSON value}, with the same keys in all.
    seconds: how long to wait for the others.

  Raises:
    UserError: it differs; the same one in all of them.
  """
  if _joined is None:
    return
  said = [json.loads(value) for value in everyone(json.dumps(values), seconds)]
  for what, here in said[0].items():
    for number, other in enumerate(said):
      if (there := other[what]) != here:
        names = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        raise UserError(
          f"the {what} of {name_of(number)} are not those of {name_of(0)}: {', '.join(names)} differs\n"
          "  fix: a disk that all of the hosts share, or the same files on each"
        )


def from_primary(make: Callable[[], T], seconds: float) -> T:
  """What process 0 makes (a JSON value), in all of them; or its error: an ``ExitError`` as it is, others with exit code 1."""
  if _joined is None:
    return make()
  name = f"turn-{next(_turns)}"
  if not primary():
    said = json.loads(get(name, seconds))
    if "error" in said:
      kind = next(k for k in (UserError, RetryableError, ExitError) if k.exit_code == said["code"] or k is ExitError)
      error = kind(said["error"])
      error.exit_code = said["code"]
      raise error
    return said["value"]
  try:
    value = make()
  except Exception as error:
    what = str(error) if isinstance(error, ExitError) else f"{name_of(0)} failed: {type(error).__name__}: {error}"
    put(name, json.dumps({"error": what, "code": getattr(error, "exit_code", ExitError.exit_code)}))
    raise
  put(name, json.dumps({"value": value}))
  return value


def on_primary(do: Callable[[], T], seconds: float) -> T | None:
  """Lets process 0 do something, for which the others wait. Its result there, None elsewhere; its error everywhere."""
  results: list[T] = []
  from_primary(lambda: results.append(do()), seconds)
  return results[0] if results else None


def together(do: Callable[[], T], name: str) -> T:
  """What every process does, waiting for the others in it: not any longer, when one of them has failed at it.

  Args:
    do: runs on a thread of its own, which is left behind when another process has failed.
    name: of this work, the same in all; never used again.

  Raises:
    RetryableError: another process failed, and why.
    Whatever ``do`` raises.
  """
  if _joined is None:
    return do()
  client, result = _joined.client, _on_thread(do)
  while not result.done():
    concurrent.futures.wait([result], timeout=_LOOK_SECONDS)
    failed = dict(client.key_value_dir_get(f"{_PREFIX}/{name}/"))
    if failed and not result.done():
      raise RetryableError("; ".join(f"{name_of(int(key.rpartition('/')[2]))}: {why}" for key, why in failed.items()))
  try:
    return result.result()
  except Exception as error:
    put(f"{name}/{index()}", " ".join(str(error).split())[:300] or type(error).__name__)
    raise


def put(key: str, value: str) -> None:
  """Gives a value to all processes."""
  assert _joined is not None
  _joined.client.key_value_set(f"{_PREFIX}/{key}", value, allow_overwrite=True)


def get(key: str, seconds: float) -> str:
  """A value that some process gives, or gave.

  Raises:
    RetryableError: it did not come.
  """
  assert _joined is not None
  try:
    return _joined.client.blocking_key_value_get(f"{_PREFIX}/{key}", _milliseconds(seconds))
  except Exception as error:  # of JAX's own kind
    raise RetryableError(f"another process did not say {key!r} in {seconds:.0f} s: {str(error).splitlines()[0]}") from error


def _milliseconds(seconds: float) -> int:
  return int(min(seconds, _JAX_SECONDS) * 1000)


def _within(seconds: float, ask: Callable[[], T]) -> T:
  """What the store answers: it never does while process 0 is frozen, or out of reach, and has no limit of its own.

  Raises:
    TimeoutError: it did not answer.
  """
  return _on_thread(ask).result(seconds)


def _on_thread(do: Callable[[], T]) -> Future[T]:
  """What comes of it, when it is done; the thread keeps nobody."""
  answer: Future[T] = Future()

  def run() -> None:
    try:
      answer.set_result(do())
    except Exception as error:
      answer.set_exception(error)

  threading.Thread(target=run, name="together", daemon=True).start()
  return answer


class Heartbeat(contextlib.AbstractContextManager["Heartbeat"]):
  """Tells the other processes that this one lives, while it is entered, and notices which of them does not.

  Leaving it, processes wait a moment for each other: who holds the store must go last.

  Args:
    seconds: after which a process that nothing was heard of is lost.
    lost: takes a sentence that names it, and the exit code of an error that it ended with; called once, from a thread.
  """

  def __init__(self, seconds: float, lost: Callable[[str, int], None]):
    self._seconds, self._lost = seconds, lost
    self._stop = threading.Event()
    self._verdict = threading.Event()
    self._leaving = False
    self._period = min(2.0, seconds / 5)
    self._thread: threading.Thread | None = None

  def __enter__(self) -> "Heartbeat":
    if _joined is not None:
      self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
      self._thread.start()
      self._outlive_aborts()
    return self

  def leave(self) -> None:
    """What is left to do needs no other process: none of them is missed any more."""
    self._leaving = True

  def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
    if self._thread is None:
      return
    self._stop.set()
    self._thread.join()
    code = getattr(error, "exit_code", 0 if error is None else 1)
    with contextlib.suppress(Exception):  # process 0 may be gone, and with it whoever would read this
      farewell = json.dumps([code, "" if error is None else f"{error}".partition("\n")[0]])
      _within(self._seconds, lambda: put(f"ended/{index()}", farewell))
      if primary():
        self._wait_for_others()
    import jax

    jax.distributed.shutdown()

  def _wait_for_others(self) -> None:
    assert _joined is not None
    # Longer than the others take to notice how this process ended, and to end with its exit code.
    deadline = time.monotonic() + min(self._seconds, _GOODBYE_SECONDS) + 2 * self._period
    numbers = range(count())
    while time.monotonic() < deadline and len(_joined.client.key_value_dir_get(f"{_PREFIX}/ended/")) < count():
      time.sleep(0.05)
    deadline = min(deadline, time.monotonic() + 5.0)
    while time.monotonic() < deadline and len(_joined.client.get_live_nodes(list(numbers))) > 1:
      time.sleep(0.05)

  def wait_for_verdict(self) -> None:
    """For whoever saw a collective fail: waits until the process that is lost has been named, if one is."""
    if self._thread is not None:
      self._verdict.wait(self._seconds + 5)

  def _outlive_aborts(self) -> None:
    """Keeps an aborting process until the one that is lost has been named.

    JAX's client aborts when process 0 is gone, gloo when any peer is. The handler waits on the thread that aborts, while the
    others go on; Python's own handlers run too late for that.
    """

    def handler(_: int) -> None:
      if not self._verdict.wait(self._seconds + 2.0):
        self._tell(f"{name_of(0)}, which holds the others together, is lost: the connection to it broke")
      time.sleep(5.0)  # whoever is told ends the process
      os._exit(128 + signal.SIGABRT)

    self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)  # C has no reference to it
    ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

  def _run(self) -> None:
    assert _joined is not None
    client, before = _joined.client, time.monotonic()
    seen: dict[int, tuple[str, float]] = dict.fromkeys(range(count()), ("", before))

    def exchange(beat: int) -> list[dict[str, str]]:
      put(f"beat/{index()}", str(beat))
      return [dict(client.key_value_dir_get(f"{_PREFIX}/{what}/")) for what in ("beat", "ended")]

    for beat in itertools.count():
      if self._stop.wait(self._period if beat else 0.0):
        return
      if time.monotonic() - before > 4 * self._period:  # this process was stopped, and the others perhaps with it
        seen = {number: (value, time.monotonic()) for number, (value, _) in seen.items()}
      try:
        found, ended = _within(self._seconds, functools.partial(exchange, beat))
      except TimeoutError:
        self._tell(f"{name_of(0)}, which holds the others together, is lost: it did not answer for {self._seconds:.0f} s")
        return
      except Exception as error:
        self._tell(f"{name_of(0)}, which holds the others together, is lost: {str(error).splitlines()[0]}")
        return
      now = before = time.monotonic()
      for number, (value, since) in seen.items():
        last = found.get(f"{_PREFIX}/beat/{number}", "")
        if number == index():
          continue
        if farewell := ended.get(f"{_PREFIX}/ended/{number}"):
          code, reason = json.loads(farewell)
          if code == 0:
            continue  # done, as this one soon will be: process 0 writes a report, and waits for the mirror
          # What ends one may end all, each with its own words: they get time for that.
          if not self._stop.wait(min(self._seconds, _GOODBYE_SECONDS)):
            self._tell(f"{name_of(number)} ended{f': {reason}' if reason else ''}", code or RetryableError.exit_code)
          return
        if last != value:
          seen[number] = (last, now)
        elif now - since > self._seconds:
          self._tell(f"{name_of(number)} is lost: nothing was heard of it for {self._seconds:.0f} s")
          return

  def _tell(self, what: str, code: int = RetryableError.exit_code) -> None:
    self._verdict.set()
    if not self._leaving:
      self._lost(what, code)


class Agreement:
  """What some process wishes becomes known to all of them at the same step. They ask about once a second.

  Args:
    seconds: how long a process may be behind the others; beyond that it is stuck.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds
    self._at, self._pause = 0, 1
    self._before: tuple[int, float] | None = None

  def anew(self) -> "Agreement":
    """Another one, of what is counted from 0 again."""
    return Agreement(self._seconds)

  def __call__(self, step: int, wish: str = "") -> list[str]:
    """The wishes of all processes, "" for none; [] at steps at which nothing is asked. Every process calls it every step.

    Raises:
      RetryableError: a process did not come to this step.
    """
    if count() == 1:
      return [wish]
    if step < self._at:
      return []
    now = time.monotonic()
    pause = 1
    if self._before is not None:
      taken = max((now - self._before[1]) / max(1, step - self._before[0]), 1e-4)
      # Between two calls may lie a launch alone, whose step runs on: a pause grows over several of them.
      pause = int(min(max(1.0 / taken, 1), 2 * self._pause, 100))
    self._before = (step, now)
    said = [json.loads(value) for value in everyone(json.dumps([wish, pause]), self._seconds)]
    self._pause = said[0][1]
    self._at = step + self._pause
    return [wish for wish, _ in said]
