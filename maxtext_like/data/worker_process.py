"""Runs chat templates and tokenizers in a second process, with limits of time and memory.

The chat template of a checkpoint is a program, and so are the normalizers and expressions of its tokenizer. They are not
reviewed. They can double a text in every step or never end, inside C code that no check in this process can interrupt.
Therefore one worker process runs all of them. It starts with the first request, lives as long as this process and answers
within 10 us for a small text. A program that exceeds its limits ends the worker and is refused with a UserError; the next
request starts another worker.

Open this file to change the limits or the life of the worker. ``worker_main.py`` is the loop inside the worker.
"""

import array
import atexit
import contextlib
import itertools
import json
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxtext_like.data import worker_main
from maxtext_like.data.worker_main import FAILED, HEAD, IDS, LENGTH, OUT_OF_MEMORY, REFUSED, TEXT, RefusedError
from maxtext_like.errors import RetryableError, UserError

MIB = 2**20
WAIT_SECONDS = 600.0  # limit without an answer, for any processor time: the worker or the machine may be suspended
_POLL_SECONDS = 0.2  # between measurements of the worker's memory where the system cannot limit it
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from maxtext_like.data.worker_main import main; main()"


@dataclass(frozen=True)
class Limits:
  """Limits on the resources of a program. Times are processor time of the worker.

  Attributes:
    open_seconds: time to open the program.
    spare_seconds: time for all calls together, beyond the time that each call may take.
    call_seconds: time for one call.
    call_seconds_per_character: additional time for each character of the input of a call.
    open_bytes: memory to open the program.
    call_bytes: memory of one call beyond the worker's memory before it.
    call_bytes_per_character: additional memory for each character of the input of a call.
  """

  open_seconds: float
  spare_seconds: float
  call_seconds: float
  call_seconds_per_character: float
  open_bytes: int
  call_bytes: int
  call_bytes_per_character: int


class LimitError(UserError):
  """A template or a tokenizer needs more time or memory than it may use."""


class Program:
  """A template or a tokenizer in the worker process. Safe for threads and after a fork: the child starts its own worker."""

  def __init__(self, kind: str, name: str, load: Callable[[], tuple[Any, ...]], limits: Limits, fix: str):
    """Opens the program.

    Args:
      kind: a key of ``worker_main.KINDS``.
      name: name of the program for errors: "x.jinja: the chat template".
      load: returns the arguments of its class. Called again if another worker has to open it.
      limits: limits of time and memory.
      fix: remedy to print if a limit is exceeded.

    Raises:
      RefusedError: the worker refuses it; the message is the reason.
      LimitError: opening it exceeds a limit.
      RetryableError: the worker ended for another reason.
    """
    self._kind, self._name, self._load, self._limits, self._fix = kind, name, load, limits, fix
    self._spare = limits.spare_seconds
    self._handle = next(_handles)
    weakref.finalize(self, _released.append, self._handle).atexit = False
    with _lock:
      self.facts: dict[str, Any] = self._open(_worker())

  def _open(self, worker: "_Worker") -> dict[str, Any]:
    arguments = (self._kind, *self._load())
    limits = self._limits
    limit_in_words = lambda: f"more than {limits.open_seconds:g} s of processor time to open it"
    facts, _ = self._ask(worker, "open", arguments, limits.open_seconds, limits.open_bytes, limit_in_words)
    worker.opened.add(self._handle)
    return facts

  def call(self, method: str, *arguments: Any, size: int) -> Any:
    """Calls a method of the program and returns its result: a text, a list of ids, or JSON.

    Args:
      method: name of the method.
      arguments: plain values.
      size: characters of the input, which determine the limits of time and memory.

    Raises:
      RefusedError, LimitError, RetryableError: as the constructor.
    """
    limits = self._limits
    allowed = limits.call_seconds + limits.call_seconds_per_character * size
    with _lock:
      worker = _worker()
      if self._handle not in worker.opened:
        self._open(worker)
      needed = limits.call_bytes + limits.call_bytes_per_character * (-(-size // MIB) * MIB if size > MIB // 16 else 0)
      limit_in_words = lambda: (
        f"more processor time than {allowed:.2g} s for a text of {size:,} characters and {limits.spare_seconds:g} s in reserve "
        "for all texts together"
      )
      result, used = self._ask(worker, method, arguments, self._spare + allowed, needed, limit_in_words)
      self._spare = min(limits.spare_seconds, self._spare + allowed - used)
    return result

  def _ask(
    self,
    worker: "_Worker",
    method: str,
    arguments: tuple[Any, ...],
    seconds: float,
    size: int,
    limit_in_words: Callable[[], str],
  ) -> tuple[Any, float]:
    """Returns the result of a request and its processor time. ``limit_in_words`` describes the time limit, for the error."""
    released = []
    with contextlib.suppress(IndexError):
      while True:
        released.append(_released.popleft())
    worker.opened.difference_update(released)
    try:
      status, used, result = worker.exchange(marshal.dumps((released, self._handle, method, arguments, seconds, size)), size)
    except BaseException as error:  # a signal handler may raise too; the next reply would then answer this request
      _discard()
      if not isinstance(error, _EndedError):
        raise
      raise self._ended(error, size, limit_in_words) from None
    if status == REFUSED:
      raise RefusedError(result.decode("utf-8"))
    if status == OUT_OF_MEMORY:
      _discard()
      raise self._exceeded(f"more than {size // MIB:,} MiB of memory")
    if status == FAILED:
      raise RuntimeError(f"{self._name} failed in the worker process:\n{result.decode('utf-8')}")
    if status == TEXT:
      return result.decode("utf-8", "surrogatepass"), used
    if status == IDS:
      ids = array.array("I")
      ids.frombytes(result)
      return ids.tolist(), used
    return json.loads(result), used

  def _ended(self, error: "_EndedError", size: int, limit_in_words: Callable[[], str]) -> Exception:
    if error.code == -signal.SIGPROF:
      return self._exceeded(limit_in_words())
    if error.code == -signal.SIGABRT or error.memory:  # Rust and C++ abort when an allocation fails
      return self._exceeded(f"more than {size // MIB:,} MiB of memory")
    return RetryableError(f"{self._name}: the process that runs it {error}\n  fix: run the same command again")

  def _exceeded(self, what: str) -> LimitError:
    return LimitError(
      f"{self._name} takes {what}, so it is refused\n  why: it expands its input without bound, or does not end\n"
      f"  fix: {self._fix}"
    )


class _EndedError(Exception):
  """The worker ended or does not answer."""

  def __init__(self, what: str, code: int | None, memory: bool = False):
    super().__init__(what)
    self.code, self.memory = code, memory


class _Worker:
  """The process and the pipes to it. ``opened`` has the handles of the programs that it has open."""

  def __init__(self) -> None:
    self.opened: set[int] = set()
    if not sys.executable:
      raise UserError(
        "sys.executable is empty, so the worker process of templates and tokenizers cannot start\n"
        "  fix: start Python by the complete path of its executable"
      )
    folders = json.dumps([str(entry) or os.getcwd() for entry in sys.path])  # notebooks append Path objects
    environment = os.environ | {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
    try:
      self._process = subprocess.Popen(
        [sys.executable, "-I", "-c", _START, folders],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment,
      )  # fmt: skip
    except OSError as error:
      raise RetryableError(f"the process for templates and tokenizers cannot start: {error}") from error
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
    self._poll = select.poll()
    self._poll.register(self._out, select.POLLIN)
    self._measured = False
    try:
      _, _, limited = self._reply(None)
    except BaseException as error:
      self.end()
      if isinstance(error, _EndedError):
        raise RetryableError(f"the process for templates and tokenizers {error} as it started") from None
      raise
    self._measured = not json.loads(limited)

  def exchange(self, request: bytes, size: int) -> tuple[bytes, float, bytes]:
    """Sends a request and returns status, processor time and result of its reply. Raises _EndedError."""
    try:
      worker_main.write_all(self._in, LENGTH.pack(len(request)) + request)
    except BrokenPipeError:
      raise self._gone() from None
    return self._reply(size)

  def _reply(self, size: int | None) -> tuple[bytes, float, bytes]:
    base = self._resident() if self._measured else 0
    deadline = time.monotonic() + WAIT_SECONDS

    def read(most: int) -> bytes:
      while not self._poll.poll(1000 * _POLL_SECONDS):
        if time.monotonic() > deadline:
          raise _EndedError(f"did not answer for {WAIT_SECONDS:g} s", None)
        if self._measured and size is not None and self._resident() - base > size:
          raise _EndedError("takes too much memory", None, memory=True)
      return os.read(self._out, most)

    reply = worker_main.read_message(read, HEAD)
    if reply is None:
      raise self._gone()
    (status, used, _), result = reply
    return status, used, result

  def _resident(self) -> int:
    """Returns the memory of the worker in bytes."""
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(self._process.pid)], capture_output=True, text=True, check=False)
    return 1024 * int(found.stdout.strip() or 0)

  def _gone(self) -> _EndedError:
    code = self._process.wait()
    return _EndedError(f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}", code)

  def end(self) -> None:
    """Kills the worker."""
    self._process.kill()
    self._process.wait()
    self.forget()

  def forget(self) -> None:
    """Closes this process's ends of the pipes without waiting for the worker, which belongs to the parent after a fork."""
    self._process.returncode = self._process.returncode or 0
    for pipe in (self._process.stdin, self._process.stdout):
      assert pipe is not None
      pipe.close()


_handles = itertools.count()
_released: deque[int] = deque()
_lock = threading.RLock()
_running: _Worker | None = None


def _worker() -> _Worker:
  """Returns the running worker, and starts it if there is none. The caller holds the lock."""
  global _running
  if _running is None:
    _running = _Worker()
  return _running


def _discard() -> None:
  """Ends the worker. The next request starts another one."""
  global _running
  worker, _running = _running, None
  if worker is not None:
    worker.end()


def _after_fork() -> None:
  global _lock, _running
  _lock = threading.RLock()  # another thread of the parent may have held the old lock
  worker, _running = _running, None
  if worker is not None:
    worker.forget()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_discard)
