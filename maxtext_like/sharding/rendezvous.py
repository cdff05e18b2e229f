"""Rendezvous of the processes of a run, before JAX connects them: are all present, and do all run the same configuration?

JAX's own rendezvous ends a process with SIGABRT if a peer does not arrive, and does not compare configurations. The processes
therefore meet here first, at the address where JAX's coordinator will listen. Each process sends one JSON line. Process 0
compares them and sends its verdict to all.
"""

import contextlib
import errno
import json
import os
import platform
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxtext_like import strict_json
from maxtext_like.errors import ExitError, RetryableError, UserError
from maxtext_like.masking import masked

_LONGEST = 4 << 20  # maximum bytes of a line
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class ProcessInfo:
  """The JSON line in which a process describes itself.

  Attributes:
    index, count: index of the process and number of processes.
    host, pid: host name and process id.
    facts: description -> value of everything that must be equal in all processes.
  """

  index: int
  count: int
  facts: Mapping[str, str]
  host: str = ""
  pid: int = 0

  def __str__(self) -> str:
    return f"process {self.index} (host {self.host}, pid {self.pid})"


def meet(address: str, index: int, count: int, facts: Mapping[str, str], seconds: float) -> list[str]:
  """Waits for all processes and compares them.

  Args:
    address: host:port of process 0.
    index, count: index of this process and number of processes.
    facts: as for ``ProcessInfo``.
    seconds: how long to wait.

  Returns:
    The host name of each process, the same list in all processes.

  Raises:
    UserError: the processes do not belong to one run, or the port is in use.
    RetryableError: some processes did not arrive in time.
  """
  host, _, port = address.rpartition(":")
  info = ProcessInfo(index, count, facts, platform.node(), os.getpid())
  deadline = time.monotonic() + seconds
  if index == 0:
    return _collect(info, int(port), deadline, seconds)
  return _report(info, (host.strip("[]"), int(port)), deadline, seconds)


def _collect(info: ProcessInfo, port: int, deadline: float, seconds: float) -> list[str]:
  with _listener(port) as listener:
    came: dict[int, tuple[ProcessInfo, socket.socket]] = {}
    with contextlib.ExitStack() as open_ones:
      # Accept the processes one by one, until all have arrived or one does not belong to this run.
      error: ExitError | None = None
      while len(came) < info.count - 1 and error is None:
        if not select.select([listener], [], [], max(0.0, deadline - time.monotonic()))[0]:
          missing = [str(i) for i in range(1, info.count) if i not in came]
          there = "".join(f"\n  {other} is present" for other, _ in came.values())
          error = RetryableError(
            f"process {', '.join(missing)} of {info.count} did not connect to port {port} of {info.host} in {seconds:.0f} s "
            f"(watchdog_peers_seconds); see the log of that process{there}"
          )
          break
        connection = open_ones.enter_context(listener.accept()[0])
        other = _read_info(connection)
        if other is None:
          continue  # not one of our processes: a port scan or a health check
        error = _differs(info, other, came[other.index][0] if other.index in came else None)
        came[other.index if error is None else -1] = (other, connection)
      # Send the verdict to everyone who connected.
      hosts = [info.host, *(came[i][0].host for i in sorted(came) if i > 0)]
      verdict = {"error": error and str(error), "code": error.exit_code if error else 0, "hosts": hosts}
      for _, connection in came.values():
        with contextlib.suppress(OSError):  # the process is gone and will be reported as missing
          connection.sendall(json.dumps(verdict).encode() + b"\n")
      if error is not None:
        raise error
      return hosts


def _listener(port: int) -> socket.socket:
  try:
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
  except OSError as error:
    reason = "it is in use by another program" if error.errno == errno.EADDRINUSE else error.strerror
    raise UserError(
      f"port {port} of {platform.node()} cannot be opened for a rendezvous: {reason}",
      fix="set another port in the address of process 0",
    ) from error


def _read_info(connection: socket.socket) -> ProcessInfo | None:
  try:
    said = strict_json.loads(_line(connection, time.monotonic() + 10))
    info = ProcessInfo(**said)
  except (OSError, ValueError, TypeError):
    return None
  numbers = (info.index, info.count, info.pid)
  words = (info.host, *info.facts, *info.facts.values()) if isinstance(info.facts, dict) else (None,)
  right = all(type(x) is int for x in numbers) and all(isinstance(x, str) for x in words)
  return info if right else None


def _differs(mine: ProcessInfo, other: ProcessInfo, same_index: ProcessInfo | None) -> ExitError | None:
  """Compares another process with this one. Returns the error to raise if they do not belong to one run, else None."""
  if other.count != mine.count:
    return UserError(
      f"{other} expects {other.count} processes, {mine} expects {mine.count}",
      fix="start all processes with the same number of processes",
    )
  if not 0 < other.index < mine.count or same_index is not None:
    twin = mine if other.index == 0 else same_index
    return UserError(
      f"two processes have the index {other.index}: {other} and {twin}", fix="give every process another index, from 0"
    )
  for what in sorted(mine.facts.keys() | other.facts.keys()):
    here, there = mine.facts.get(what, "(none)"), other.facts.get(what, "(none)")
    if here != there:
      return UserError(
        f"{what} differs: {masked(there)} in {other}, {masked(here)} in {mine}",
        fix="start all processes with the same command, code and packages",
      )
  return None


def _report(info: ProcessInfo, place: tuple[str, int], deadline: float, seconds: float) -> list[str]:
  absent = f"cannot reach process 0 at {place[0]}:{place[1]}"
  while True:
    try:
      with socket.create_connection(place, timeout=max(0.1, min(10.0, deadline - time.monotonic()))) as connection:
        connection.sendall(json.dumps(vars(info) | {"facts": dict(info.facts)}).encode() + b"\n")
        verdict = strict_json.loads(_line(connection, deadline + 10))
        break
    except (OSError, ValueError) as error:
      if time.monotonic() > deadline:
        reason = getattr(error, "strerror", None) or str(error)
        raise RetryableError(f"{info}: {absent} within {seconds:.0f} s (watchdog_peers_seconds): {reason}") from None
      time.sleep(_PAUSE_SECONDS)  # process 0 has not started yet, or the last run still holds the port
  if verdict["error"]:
    raise (UserError if verdict["code"] == UserError.exit_code else RetryableError)(verdict["error"])
  return verdict["hosts"]


def _line(connection: socket.socket, deadline: float) -> bytes:
  """Reads up to a newline. Raises OSError if the line does not arrive in time or is too long."""
  read = b""
  while not read.endswith(b"\n"):
    connection.settimeout(max(0.1, deadline - time.monotonic()))
    part = connection.recv(1 << 16)
    if not part or len(read) > _LONGEST:
      raise ConnectionError("the connection ended early")
    read += part
    if time.monotonic() > deadline:
      raise TimeoutError("no answer")
  return read


def as_facts(text: str, name: str) -> dict[str, str]:
  """Splits YAML text into facts, one for each "key: value" line, so that an error names the key that differs."""
  facts: dict[str, Any] = {}
  for line in text.splitlines():
    key, _, value = line.partition(":")
    value = value.partition("  # ")[0].strip()
    if value and not key.startswith("#"):
      facts[f"{name} {key.strip()}"] = value
  return facts
