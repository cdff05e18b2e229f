"""The worker process: runs chat templates and tokenizers for the process that started it, with limits of time and memory.

``worker_process.py`` starts it and explains why it exists. This file is the loop inside the worker. It imports nothing heavy,
because it is part of every start. A request is ``(released, handle, method, arguments, seconds, bytes)`` in marshal's format,
preceded by its length. A reply has a status, the processor time used and the result; see ``_reply``.
"""

import array
import importlib
import json
import marshal
import os
import resource
import signal
import struct
import time
import traceback
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("<Q")
HEAD = struct.Struct("<cdQ")  # head of a reply: status, seconds of processor time, length of the result
TEXT, IDS, JSON, REFUSED, OUT_OF_MEMORY, FAILED = b"t", b"i", b"j", b"r", b"m", b"f"
"""Status of a reply: the type of its result, or the reason why it has none."""

KINDS = {
  "template": ("maxtext_like.data.chat.sandbox", "Template"),
  "tokenizer.json": ("maxtext_like.data.tokenization.tokenizer_libraries", "TokenizersLibrary"),
  "sentencepiece": ("maxtext_like.data.tokenization.tokenizer_libraries", "SentencePieceLibrary"),
}
"""The programs that the worker runs: module and class of each kind."""
MOST = 2**31  # largest size of a message in bytes


class RefusedError(Exception):
  """Raised in the worker for an input that it refuses. The message is the reason."""


def main() -> None:
  """Answers requests until the parent process closes its end of the pipe."""
  for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the process group; the worker ends with its parent
    signal.signal(ignored, signal.SIG_IGN)
  signal.signal(signal.SIGPROF, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
  resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # an abort is expected here
  out = os.dup(1)
  quiet = os.open(os.devnull, os.O_WRONLY)
  os.dup2(quiet, 1)  # output that a library prints must not become part of a reply
  os.dup2(quiet, 2)  # hides a library's report of a crash; the parent reports it
  opened: dict[int, Any] = {}
  memory = _Memory()
  _reply(out, JSON, 0.0, json.dumps(memory.limited).encode())
  # Each request opens a program, or calls a method of an open one.
  while (request := _request(0)) is not None:
    released, handle, method, arguments, seconds, size = marshal.loads(request)
    del request
    for gone in released:
      opened.pop(gone, None)
    # SIGPROF ends the worker when the processor time of this request is used up.
    begin = time.process_time()
    memory.limit(size, method == "open")
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
      if method == "open":
        module, name = KINDS[arguments[0]]
        opened[handle] = getattr(importlib.import_module(module), name)(*arguments[1:])
        status, result = JSON, json.dumps(opened[handle].facts()).encode()
      else:
        status, result = _encoded(getattr(opened[handle], method)(*arguments))
    except RefusedError as error:
      status, result = REFUSED, str(error).encode("utf-8", "replace")
    except MemoryError:
      status, result = OUT_OF_MEMORY, b""
    except Exception:
      status, result = FAILED, traceback.format_exc().encode("utf-8", "replace")
    signal.setitimer(signal.ITIMER_PROF, 0)
    _reply(out, status, time.process_time() - begin, result)
    del arguments, result


def _encoded(value: Any) -> tuple[bytes, bytes]:
  if isinstance(value, str):
    return TEXT, value.encode("utf-8", "surrogatepass")
  if isinstance(value, list):
    return IDS, array.array("I", value).tobytes()  # crosses the pipe without becoming text
  return JSON, json.dumps(value).encode()


class _Memory:
  """Limits the address space of this process.

  Attributes:
    limited: True if the system supports the limit. macOS does not; the parent then measures this process while it waits.
  """

  def __init__(self) -> None:
    self.limited = os.path.exists("/proc/self/statm")
    self._extra, self._calls = 0, 0

  def limit(self, extra: int, again: bool) -> None:
    """Allows ``extra`` bytes more than the process had at the last measurement. ``again`` measures now."""
    self._calls += 1
    if not self.limited or (extra == self._extra and not again and self._calls % 1000):  # measuring takes 20 us
      return
    self._extra = extra
    with open("/proc/self/statm", "rb") as file:
      wanted = int(file.read().split()[0]) * resource.getpagesize() + extra
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _request(descriptor: int) -> bytes | None:
  read = read_message(lambda size: os.read(descriptor, size), LENGTH)
  return None if read is None else read[1]


def read_message(read: Callable[[int], bytes], head: struct.Struct) -> tuple[tuple[Any, ...], bytes] | None:
  """Reads the next message from a pipe: the fields of its head, whose last field is the length of the body, and the body.

  Returns None if the pipe is closed. No byte may follow the message: each side waits for the other's answer before it sends
  again.
  """
  parts, size, wanted, fields = [], 0, head.size, None
  while size < wanted:
    part = read(2**16 if fields is None else min(wanted - size, 2**20))
    if not part:
      return None
    parts.append(part)
    size += len(part)
    if fields is None and size >= head.size:
      parts = [b"".join(parts)]
      fields = head.unpack_from(parts[0])
      wanted += fields[-1]
      if fields[-1] > MOST:
        raise ValueError(f"a message of {fields[-1]:,} bytes is too large")
  assert fields is not None
  return fields, b"".join(parts)[head.size :]


def write_all(descriptor: int, data: bytes) -> None:
  """Writes all of ``data`` to a pipe."""
  view = memoryview(data)
  while view:
    view = view[os.write(descriptor, view) :]


def _reply(descriptor: int, status: bytes, seconds: float, result: bytes) -> None:
  write_all(descriptor, HEAD.pack(status, seconds, len(result)) + result)
