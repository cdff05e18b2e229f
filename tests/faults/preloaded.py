"""A process that has imported everything. tests/faults forks its programs from it, which saves two seconds for each program.

A program is ``driver.py`` or ``train.py``. This process reads one JSON line per program from stdin (program, arguments,
environment, log file) and prints the process ID. The exit code goes to ``LOG.code``. The variable FAULT holds Python code
that the program runs first, to inject a fault. This process computes nothing, so JAX has no device and no thread when it
forks. The child ends through the normal shutdown of the interpreter, because some tests check programs that close nothing.
"""

import json
import os
import runpy
import select
import sys
import warnings
from pathlib import Path

import driver
import jax  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401

import maxtext_like.training.run.run  # noqa: F401

TRAIN = Path(__file__).parents[2] / "train.py"


def reap(logs: dict[int, str]) -> None:
  """Writes the exit code of each program that has ended to its file. A signal is a negative code, as in ``subprocess``."""
  while logs:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid == 0:
      return
    path = Path(logs.pop(pid) + ".code")
    path.with_suffix(".tmp").write_text(str(os.waitstatus_to_exitcode(status)))
    path.with_suffix(".tmp").rename(path)


def serve() -> dict:
  """Forks a process per request. Returns only in the forked process, with the request."""
  logs: dict[int, str] = {}
  while True:
    reap(logs)
    if not select.select([0], [], [], 0.005)[0]:
      continue
    line = sys.stdin.buffer.readline()  # requests come one at a time, so no other is left in the buffer
    if not line:
      os._exit(0)
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
      return request
    logs[pid] = request["log"]
    print(pid, flush=True)


if __name__ == "__main__":
  # JAX warns about every fork, because a fork is dangerous after the first computation. Nothing was computed here.
  warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
  found = serve()
  log = os.open(found["log"], os.O_WRONLY | os.O_APPEND)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(log, 1)
  os.dup2(log, 2)
  os.environ.update(found["environment"])
  sys.argv = [found["program"], *found["arguments"]]
  exec(os.environ.pop("FAULT", ""))
  if found["program"] == "train.py":
    runpy.run_path(str(TRAIN), run_name="__main__")
  sys.exit(driver.guarded_main())
