"""Starts a run with several processes on this machine: a pod job on a laptop, or one process per GPU.

Each process gets the environment variables that a launcher on a pod sets. Each output line is prefixed with its process number.
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
# First code of each process: ask Linux to send SIGTERM if the launcher dies, so that the run saves a checkpoint. It runs in the
# process itself, because a preexec_fn needs a fork, and JAX warns about forks.
_DIE_WITH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
  ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
  if os.getppid() != LAUNCHER:  # the launcher is already dead
    sys.exit(128 + signal.SIGTERM)
"""
_PROGRAM = "import runpy; runpy.run_module('maxtext_like', run_name='__main__', alter_sys=True)"
_PATIENCE_SECONDS = 120.0  # after a process failed, the others notice it, report it and exit within this time


def take_options(words: Sequence[str]) -> tuple[list[str], int | None, int | None]:
  """Remove ``--processes N`` and ``--devices-per-process M`` from the words of a command line.

  Returns:
    The other words, N and M; None for an option that is missing.

  Raises:
    UserError: the value is not a number, or M is set without N.
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
      raise UserError(f"{name} {value}: not a number from 1 to 4096\n  fix: {name} 2")
    found[name] = int(value)
  if found["--devices-per-process"] and not found["--processes"]:
    raise UserError("--devices-per-process needs --processes\n  fix: --processes 2 --devices-per-process 4")
  return rest, found["--processes"], found["--devices-per-process"]


def run(words: Sequence[str], count: int, devices: int | None) -> int:
  """Run a verb in several processes, and return the exit code of the first one that failed, or 0.

  Signals are forwarded to all processes. If one fails and the others do not exit within two minutes, they are killed.

  Args:
    words: the command line after the program's name.
    count: number of processes.
    devices: devices per process: virtual devices of the CPU, or GPUs of this machine (those in CUDA_VISIBLE_DEVICES if it is
      set); None: the devices of a CPU that JAX finds.

  Raises:
    UserError: CUDA_VISIBLE_DEVICES has too few GPUs.
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

  # The processes have their own sessions, so that Ctrl-C reaches them only once, from this process.
  before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
  try:
    for index in range(count):
      ranks.append(_start(words, address, count, index, devices, gpus))
    readers = [threading.Thread(target=_show, args=(i, rank.stdout), daemon=True) for i, rank in enumerate(ranks)]
    for reader in readers:  # start threads only after the last fork
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
  return 128 - code if code < 0 else code  # exit code of a shell for a signal


def _gpus(count: int, devices: int | None) -> list[str]:
  """Return the GPUs that the processes share, as CUDA names them; empty if CUDA_VISIBLE_DEVICES hides all."""
  if devices is None or (own := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
    return [str(i) for i in range(count * (devices or 0))]
  given = [gpu.strip() for gpu in own.split(",") if gpu.strip() and gpu.strip() != "-1"]
  if 0 < len(given) < count * devices:
    raise UserError(
      f"--processes {count} --devices-per-process {devices} need {count * devices} GPUs, but CUDA_VISIBLE_DEVICES={own} has "
      f"{len(given)}\n  fix: list {count * devices} GPUs in CUDA_VISIBLE_DEVICES, or unset it"
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
      with contextlib.suppress(OSError):  # without a reader, still drain the pipe, so that the process does not block
        sys.stdout.write(f"[{index}] {line.decode(errors='replace')}")
        sys.stdout.flush()
