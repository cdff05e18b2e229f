"""A process with everything imported, from which tests/faults forks its programs; spares each of them two seconds.

A program is ``driver.py`` or ``train.py`` itself. Reads one JSON line per program from stdin (program, arguments,
environment, log file) and answers with its process number; the exit code goes to ``LOG.code``. The variable FAULT holds Python
that the program runs first, to break something. Nothing is computed here, so no device and no thread of JAX exists when it
forks, and the child leaves through the ordinary end of the interpreter: what programs that forget to close something need.
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
  """Writes down the exit codes of programs that have ended, negative for a signal as ``subprocess`` has it."""
  while logs:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid == 0:
      return
    path = Path(logs.pop(pid) + ".code")
    path.with_suffix(".tmp").write_text(str(os.waitstatus_to_exitcode(status)))
    path.with_suffix(".tmp").rename(path)


def serve() -> dict:
  """Forks a program per request; returns the request, in the forked process only."""
  logs: dict[int, str] = {}
  while True:
    reap(logs)
    if not select.select([0], [], [], 0.005)[0]:
      continue
    line = sys.stdin.buffer.readline()  # one request at a time is under way, so none hides in the buffer
    if not line:
      os._exit(0)
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
      return request
    logs[pid] = request["log"]
    print(pid, flush=True)


if __name__ == "__main__":
  # JAX warns of every fork, because one after the first computation is dangerous.
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
