"""Several processes as one run: joining, barriers, shared values, shared decisions, and detection of a lost process.

With a single process, the default, nothing here uses a network and every function returns at once. Messages go through the
key-value store of JAX's coordinator, which runs in process 0. Arrays are never sent through it.
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
_LOOK_SECONDS = 0.5  # poll interval: has another process failed in a joint operation?
_GATHER_SECONDS = 0.05  # poll interval: have all processes arrived?
_GOODBYE_SECONDS = 10.0  # longest time between the exit of the first process and of the last
_JAX_SECONDS = 24 * 3600  # JAX's own limits must not end a process before this module has named the lost one
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
  """Returns the index of this process."""
  return _joined.index if _joined else 0


def count() -> int:
  """Returns the number of processes of the run."""
  return len(_joined.hosts) if _joined else 1


def primary() -> bool:
  """Returns True in process 0. Every file except a checkpoint's arrays is written by process 0 only."""
  return index() == 0


def name_of(number: int) -> str:
  """Returns the name of a process in messages: its index and host."""
  return f"process {number} (host {_joined.hosts[number]})" if _joined else "process 0"


def join(facts: Mapping[str, str], seconds: float, environment: Mapping[str, str] = os.environ) -> None:
  """Joins the other processes of the run if a launcher started several. Call it once, before JAX touches a device.

  Args:
    facts: description -> value of everything that must be equal in all processes.
    seconds: how long to wait for the other processes.
    environment: environment variables of this process.

  Raises:
    UserError: the processes do not belong to one run, their port is in use, or this process has joined a run before.
    RetryableError: some processes did not arrive in time.
  """
  global _joined
  place = launchers.position(environment) or launchers.tpu_vm_position(environment)
  if place is None:
    return
  if _joined is not None:
    was = f"this Python process has already been {name_of(index())} of a run, and JAX can join only once"
    raise UserError(f"{was}\n  fix: start a new Python process on every host for each run")
  import jax

  address, total, number = place.address, place.count, place.index
  if address is None or total is None or number is None:
    address, total, number = _found_by_jax(place.launcher, seconds)
  hosts = rendezvous.meet(address, number, total, facts, seconds)
  # This module ends the run when a process is lost, so that the message names it. It also keeps its own SIGTERM handler.
  jax.config.update("jax_enable_recoverability", True)
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    address, total, number, cluster_detection_method="deactivate", initialization_timeout=int(seconds) + 1,
    heartbeat_timeout_seconds=_JAX_SECONDS, shutdown_timeout_seconds=10,
  )  # fmt: skip
  from jax._src import distributed  # JAX has no public name for its key-value store

  _joined = _Joined(number, tuple(hosts), distributed.global_state.client)


def _found_by_jax(launcher: str, seconds: float) -> tuple[str, int, int]:
  from jax._src.clusters import ClusterEnv  # jax.distributed.initialize() uses it too

  reason = "the coordinator's address is unknown"
  try:
    address, total, number, _ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(seconds))
  except Exception as error:  # each cluster type fails in its own way, from a missing variable to a metadata server
    address, total, number, reason = None, None, None, f"{type(error).__name__}: {error}"
  if address is None or total is None or number is None:
    raise UserError(
      f"{launcher}: JAX cannot find the other processes: {reason}\n"
      "  fix: set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID for each process"
    )
  return address, total, number


def barrier(name: str, seconds: float) -> None:
  """Waits until every process has called it.

  Args:
    name: name of the barrier, the same in all processes. It may be reused after the barrier is complete.
    seconds: how long to wait.

  Raises:
    RetryableError: some processes did not arrive in time.
  """
  if _joined is None:
    return
  try:
    _joined.client.wait_at_barrier(f"{_PREFIX}/{name}", _milliseconds(seconds))
  except Exception as error:  # JAX's exception type has no public name
    reason = str(error).splitlines()[0]
    raise RetryableError(f"not all processes reached {name!r} within {seconds:.0f} s: {reason}") from error


def await_compiled(program: str, seconds: float) -> None:
  """Waits until every process has compiled a program. Call it before the program first runs.

  The CPU collectives (gloo) wait 30 s for the other processes to connect and then fail. One process may find its program
  in the compilation cache while another compiles for minutes.
  Args:
    program: name of the program, the same in all processes.
    seconds: time limit of a compilation; 0 for none.

  Raises:
    RetryableError: a process did not finish compiling in time.
  """
  barrier(f"compiled {program}", seconds or math.inf)


def gather(name: str, seconds: float) -> None:
  """Waits like ``barrier``, for code that runs inside ``together``.

  The thread of ``together`` may be abandoned. It must not be inside a call of JAX's client when that client shuts down, so this
  function polls instead of blocking.

  Args:
    name: name of the barrier, the same in all processes; never reused.
    seconds: how long to wait.

  Raises:
    RetryableError: some processes did not arrive in time.
  """
  if _joined is None:
    return
  put(f"{name}/{_joined.index}", "here")
  deadline = time.monotonic() + seconds
  while len(_joined.client.key_value_dir_get(f"{_PREFIX}/{name}/")) < count():
    if time.monotonic() > deadline:
      raise RetryableError(f"not all processes reached {name!r} within {seconds:.0f} s")
    time.sleep(_GATHER_SECONDS)


def everyone(value: str, seconds: float, name: str | None = None) -> list[str]:
  """Gathers one string from every process, in process order. All processes must call it at the same point.

  Args:
    value: the value of this process.
    seconds: how long to wait for the others.
    name: name of the exchange as for ``barrier``; required on threads other than the main thread.
  """
  if _joined is None:
    return [value]
  # Two alternating names keep the store small: a process that reaches the next exchange has read all values of this one.
  name = name or f"meeting-{next(_meetings) % 2}"
  put(f"{name}/{_joined.index}", value)
  barrier(name, seconds)
  said = dict(_joined.client.key_value_dir_get(f"{_PREFIX}/{name}/"))
  return [said[f"{_PREFIX}/{name}/{number}"] for number in range(count())]


def require_same(values: Mapping[str, Any], seconds: float) -> None:
  """Checks that every process found the same values on its host.

  Args:
    values: description -> JSON object, with the same descriptions in all processes.
    seconds: how long to wait for the others.

  Raises:
    UserError: a value differs. Every process raises the same error.
  """
  if _joined is None:
    return
  said = [json.loads(value) for value in everyone(json.dumps(values), seconds)]
  for what, here in said[0].items():
    for number, other in enumerate(said):
      if (there := other[what]) != here:
        names = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        raise UserError(
          f"the {what} of {name_of(number)} differ from those of {name_of(0)}: {', '.join(names)}\n"
          "  fix: use a disk that all hosts share, or copy the same files to each host"
        )


def from_primary(make: Callable[[], T], seconds: float) -> T:
  """Computes a value in process 0 and returns it in every process. An error of process 0 is raised everywhere.

  Args:
    make: called in process 0 only; returns a JSON value.
    seconds: how long the other processes wait.

  Raises:
    ExitError: ``make`` failed; an ``ExitError`` keeps its exit code, any other exception gets exit code 1.
  """
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
  """Runs ``do`` in process 0 while the others wait. Returns its result there, None elsewhere; an error is raised everywhere."""
  results: list[T] = []
  from_primary(lambda: results.append(do()), seconds)
  return results[0] if results else None


def together(do: Callable[[], T], name: str) -> T:
  """Runs an operation in which all processes wait for each other, and stops waiting as soon as one of them has failed.

  Args:
    do: the operation. It runs on its own thread, which is abandoned when another process fails.
    name: name of the operation, the same in all processes; never reused.

  Raises:
    RetryableError: another process failed; says why.
    Exception: whatever ``do`` raises.
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
  """Publishes a value to all processes."""
  assert _joined is not None
  _joined.client.key_value_set(f"{_PREFIX}/{key}", value, allow_overwrite=True)


def get(key: str, seconds: float) -> str:
  """Waits for a value that some process publishes.

  Raises:
    RetryableError: the value was not published in time.
  """
  assert _joined is not None
  try:
    return _joined.client.blocking_key_value_get(f"{_PREFIX}/{key}", _milliseconds(seconds))
  except Exception as error:  # JAX's exception type has no public name
    raise RetryableError(f"no process sent {key!r} within {seconds:.0f} s: {str(error).splitlines()[0]}") from error


def _milliseconds(seconds: float) -> int:
  return int(min(seconds, _JAX_SECONDS) * 1000)


def _within(seconds: float, ask: Callable[[], T]) -> T:
  """Calls the store with a time limit. Its calls have none, and block forever if process 0 is frozen or unreachable.

  Raises:
    TimeoutError: the store did not answer in time.
  """
  return _on_thread(ask).result(seconds)


def _on_thread(do: Callable[[], T]) -> Future[T]:
  """Runs ``do`` on a daemon thread, which does not delay the exit of the process. Returns a future of the result."""
  answer: Future[T] = Future()

  def run() -> None:
    try:
      answer.set_result(do())
    except Exception as error:
      answer.set_exception(error)

  threading.Thread(target=run, name="together", daemon=True).start()
  return answer


class Heartbeat(contextlib.AbstractContextManager["Heartbeat"]):
  """Sends a heartbeat to the other processes while entered, and detects a process whose heartbeat stops.

  On exit the processes briefly wait for each other, because process 0 holds the store and must be the last to leave.

  Args:
    seconds: a process is lost if it sends no heartbeat for this long.
    lost: called once, from a thread, with a sentence that names the lost process and with an exit code: the one of the error
      that ended the process, or 42.
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
    """From now on this process needs no other one, so the loss of a process is no longer reported."""
    self._leaving = True

  def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
    if self._thread is None:
      return
    self._stop.set()
    self._thread.join()
    code = getattr(error, "exit_code", 0 if error is None else 1)
    with contextlib.suppress(Exception):  # if process 0 is gone, this message has no reader
      farewell = json.dumps([code, "" if error is None else f"{error}".partition("\n")[0]])
      _within(self._seconds, lambda: put(f"ended/{index()}", farewell))
      if primary():
        self._wait_for_others()
    import jax

    jax.distributed.shutdown()

  def _wait_for_others(self) -> None:
    assert _joined is not None
    # The others need this long to notice how this process ended and to exit with its exit code.
    deadline = time.monotonic() + min(self._seconds, _GOODBYE_SECONDS) + 2 * self._period
    numbers = range(count())
    while time.monotonic() < deadline and len(_joined.client.key_value_dir_get(f"{_PREFIX}/ended/")) < count():
      time.sleep(0.05)
    deadline = min(deadline, time.monotonic() + 5.0)
    while time.monotonic() < deadline and len(_joined.client.get_live_nodes(list(numbers))) > 1:
      time.sleep(0.05)

  def wait_for_verdict(self) -> None:
    """Waits until a lost process has been named, if there is one. Call it after a collective operation has failed."""
    if self._thread is not None:
      self._verdict.wait(self._seconds + 5)

  def _outlive_aborts(self) -> None:
    """Delays an aborting process until the lost process has been named.

    JAX's client aborts when process 0 is gone, and gloo aborts when any peer is gone. This handler blocks the aborting thread
    while the other threads continue. A Python signal handler would run too late.
    """

    def handler(_: int) -> None:
      if not self._verdict.wait(self._seconds + 2.0):
        self._tell(f"{name_of(0)}, which runs the coordinator, is lost: the connection to it broke")
      time.sleep(5.0)  # the callback that receives the message ends the process
      os._exit(128 + signal.SIGABRT)

    self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)  # keeps a reference, because C holds none
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
      # A long pause means that this process was suspended, and perhaps the others with it: restart all clocks.
      if time.monotonic() - before > 4 * self._period:
        seen = {number: (value, time.monotonic()) for number, (value, _) in seen.items()}
      # Send this heartbeat and read those of the others. Process 0 runs the store: no answer means that it is lost.
      try:
        found, ended = _within(self._seconds, functools.partial(exchange, beat))
      except TimeoutError:
        self._tell(f"{name_of(0)}, which runs the coordinator, is lost: it did not answer for {self._seconds:.0f} s")
        return
      except Exception as error:
        self._tell(f"{name_of(0)}, which runs the coordinator, is lost: {str(error).splitlines()[0]}")
        return
      now = before = time.monotonic()
      # Compare with the previous heartbeats.
      for number, (value, since) in seen.items():
        last = found.get(f"{_PREFIX}/beat/{number}", "")
        if number == index():
          continue
        if farewell := ended.get(f"{_PREFIX}/ended/{number}"):
          code, reason = json.loads(farewell)
          if code == 0:
            continue  # it finished normally; process 0 may still be writing a report or waiting for the mirror
          # The cause may end every process with its own, more precise error. Give them time to report it first.
          if not self._stop.wait(min(self._seconds, _GOODBYE_SECONDS)):
            self._tell(f"{name_of(number)} ended{f': {reason}' if reason else ''}", code or RetryableError.exit_code)
          return
        if last != value:
          seen[number] = (last, now)
        elif now - since > self._seconds:
          self._tell(f"{name_of(number)} is lost: it sent no heartbeat for {self._seconds:.0f} s")
          return

  def _tell(self, what: str, code: int = RetryableError.exit_code) -> None:
    self._verdict.set()
    if not self._leaving:
      self._lost(what, code)


class Agreement:
  """Makes a request of any process known to all processes at the same step. They exchange requests about once a second.

  Args:
    seconds: how long to wait for a process that is behind; a longer delay counts as a hang.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds
    self._at, self._pause = 0, 1
    self._before: tuple[int, float] | None = None

  def restarted(self) -> "Agreement":
    """Returns a new agreement for a step counter that starts at 0 again."""
    return Agreement(self._seconds)

  def __call__(self, step: int, wish: str = "") -> list[str]:
    """Exchanges requests if an exchange is due at this step. Every process must call it at every step.

    Args:
      step: index of the training step.
      wish: the request of this process, "" for none.

    Returns:
      The requests of all processes in process order, or [] if no exchange is due at this step.

    Raises:
      RetryableError: a process did not reach this step in time.
    """
    if count() == 1:
      return [wish]
    if step < self._at:
      return []
    now = time.monotonic()
    pause = 1
    if self._before is not None:
      taken = max((now - self._before[1]) / max(1, step - self._before[0]), 1e-4)
      # The time between two calls may cover only the launch of a step that is still running, so the pause grows gradually.
      pause = int(min(max(1.0 / taken, 1), 2 * self._pause, 100))
    self._before = (step, now)
    said = [json.loads(value) for value in everyone(json.dumps([wish, pause]), self._seconds)]
    self._pause = said[0][1]
    self._at = step + self._pause
    return [wish for wish, _ in said]
