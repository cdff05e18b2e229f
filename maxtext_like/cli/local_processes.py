"""A run of several processes on this machine: a pod job on a laptop, or one process for each GPU.

Each gets the variables that a launcher on a pod would set. What they print is shown with the number of the process before it.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from maxtext_like.errors import UserError
from maxtext_like.typed_command import VARIABLE, typed_words

_TICK_SECONDS = 0.05
# What each process does first, since to be asked before its program begins it would have to be forked, which JAX warns of: it
# asks Linux for SIGTERM, after which a run saves, should the launcher die without a word.
_DIE_WITH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
  ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
  if os.getppid() != LAUNCHER:  # it is dead already
    sys.exit(128 + signal.SIGTERM)
"""
_PROGRAM = "import runpy; runpy.run_module('maxtext_like', run_name='__main__', alter_sys=True)"
_PATIENCE_SECONDS = 120.0  # for the others to end by themselves when one has: they notice, and name it


def take_options(words: Sequence[str]) -> tuple[list[str], int | None, int | None]:
  """Takes ``--processes N`` and ``--devices-per-process M`` out of the words of a command line.

  Returns:
    The other words, N and M; None where they were not given.

  Raises:
    UserError: without a number, or M without N.
  """
  rest, found = [], dict.fromkeys(("--processes", "--devices-per-process"))
  words = list(words)
  while words:
    word = words.pop(0)
    name, equals, value = word.partition("=")
    if name not in found:
      rest.append(word)
      continue
    value = value if equals else (words.pop(0) if words else "")
    if not (value.isascii() and value.isdecimal() and 0 < int(value) <= 4096):
      raise UserError(f"{name} {value}: needs a number from 1\n  fix: {name} 2")
    found[name] = int(value)
  if found["--devices-per-process"] and not found["--processes"]:
    raise UserError("--devices-per-process: counts with --processes\n  fix: --processes 2 --devices-per-process 4")
  return rest, found["--processes"], found["--devices-per-process"]


def run(words: Sequence[str], count: int, devices: int | None) -> int:
  """Runs a verb of the command line in several processes, and returns the exit code of the first that ended badly, or 0.

  Signals are handed on to all of them. When one ends badly and the others do not end within two minutes, they are killed.

  Args:
    words: the command line after the program's name.
    count: of the processes.
    devices: of each: that many of a CPU's virtual devices, or of the GPUs here (of those in CUDA_VISIBLE_DEVICES, where that is
      set); None: as JAX finds them on a CPU.

  Raises:
    UserError: CUDA_VISIBLE_DEVICES names too few.
  """
  gpus = _gpus(count, devices)
  with socket.create_server(("127.0.0.1", 0)) as free:
    address = f"127.0.0.1:{free.getsockname()[1]}"
  ranks: list[subprocess.Popen[bytes]] = []
  readers: list[threading.Thread] = []

  def hand_on(number: int, frame: FrameType | None) -> None:
    for rank in ranks:
      if rank.poll() is None:
        rank.send_signal(number)

  # They are in a session of their own, so that a terminal's Ctrl-C comes once, from here.
  before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
  try:
    for index in range(count):
      ranks.append(_start(words, address, count, index, devices, gpus))
    readers = [threading.Thread(target=_show, args=(i, rank.stdout), daemon=True) for i, rank in enumerate(ranks)]
    for reader in readers:  # no thread before the last fork
      reader.start()
    code, since = 0, None
    while any(rank.poll() is None for rank in ranks):
      bad = [rank.returncode for rank in ranks if rank.returncode not in (None, 0)]
      if bad and since is None:
        code, since = bad[0], time.monotonic()
      if since is not None and time.monotonic() - since > _PATIENCE_SECONDS:
        hand_on(signal.SIGKILL, None)
      time.sleep(_TICK_SECONDS)
    code = code or next((rank.returncode for rank in ranks if rank.returncode), 0)
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
    for rank in ranks:
      rank.kill()
  for reader in readers:
    reader.join(5)
  return 128 - code if code < 0 else code  # as a shell has it


def _gpus(count: int, devices: int | None) -> list[str]:
  """The GPUs that the processes share, as CUDA names them; none where the environment hides all."""
  if devices is None or (own := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
    return [str(i) for i in range(count * (devices or 0))]
  given = [gpu.strip() for gpu in own.split(",") if gpu.strip() and gpu.strip() != "-1"]
  if 0 < len(given) < count * devices:
    raise UserError(
      f"--processes {count} --devices-per-process {devices}: take {count * devices} GPUs, CUDA_VISIBLE_DEVICES={own} has "
      f"{len(given)}\n  fix: name as many there, or none of it"
    )
  return given


def _start(
  words: Sequence[str], address: str, count: int, index: int, devices: int | None, gpus: list[str]
) -> subprocess.Popen[bytes]:
  environment = dict(os.environ)
  environment |= {VARIABLE: shlex.join(typed_words())}
  environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
  environment["PYTHONUNBUFFERED"] = "1"
  if devices is not None:
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    environment["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * devices : (index + 1) * devices])
  return subprocess.Popen(
    [sys.executable, "-c", f"LAUNCHER = {os.getpid()}\n{_DIE_WITH}{_PROGRAM}", *words], env=environment, start_new_session=True,
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip


def _show(index: int, stream: IO[bytes] | None) -> None:
  assert stream is not None
  with stream:
    for line in stream:
      with contextlib.suppress(OSError):  # nobody reads; whoever writes must not wait
        sys.stdout.write(f"[{index}] {line.decode(errors='replace')}")
        sys.stdout.flush()
