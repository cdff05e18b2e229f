"""Starts, watches, kills and damages training programs for tests/faults."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.processes import xla_flags

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.py")
MODEL = "configs/models/gemma3-tiny.yml"
TINY = {
  "num_decoder_layers": 2,
  "inhomogeneous_layer_cycle_interval": 2,
  "emb_dim": 16,
  "mlp_dim": 24,
  "head_dim": 8,
  "steps": 80,
  "lr_schedule_steps": 80,  # does not depend on steps, so the runs of all tests share one compiled program
  "checkpoint_interval": 10,
  "per_device_batch_size": 8,
  "max_target_length": 32,
  "dataset": "text",
  "enable_tensorboard": "false",
}


class Forked:
  """A program forked from the process that has imported everything, with the interface of ``subprocess.Popen``."""

  def __init__(self, server, program, arguments, environment, log):
    request = {"program": program, "arguments": arguments, "environment": environment, "log": str(log)}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    self.pid = int(server.stdout.readline())
    self._code = Path(f"{log}.code")

  def poll(self):
    """Returns the exit code, or None while the program runs."""
    return int(self._code.read_text()) if self._code.exists() else None

  def wait(self, timeout=240.0):
    """Waits until the program has ended and returns its exit code."""
    deadline = time.monotonic() + timeout
    while (code := self.poll()) is None:
      if time.monotonic() > deadline:
        raise subprocess.TimeoutExpired("the forked program", timeout)
      time.sleep(0.003)
    return code

  def send_signal(self, number):
    """Sends a signal if the program still runs."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self):
    """Sends SIGKILL if the program still runs."""
    self.send_signal(signal.SIGKILL)


class Runs:
  """An output directory and the runs that a program trains in it."""

  program = "driver.py"

  def __init__(self, output_dir, environment, server):
    self.output_dir = output_dir
    self.environment = environment
    self.server = server
    self.started = []

  def command(self, name, **keys):
    """Returns the command line of a run."""
    return [sys.executable, str(DRIVER), str(self.output_dir), name, *(f"{key}={keys[key]}" for key in keys)]

  def start(self, name, devices=1, variables: dict[str, str] | None = None, **keys):
    """Starts a run. Its output goes to a file, so no line is lost when the program is killed."""
    environment = {**self.environment, "XLA_FLAGS": xla_flags(devices)} | (variables or {})
    self.log = self.output_dir / f"log-{name}-{time.monotonic_ns()}"
    self.log.touch()
    self.started.append(Forked(self.server, self.program, self.command(name, **keys)[2:], environment, self.log))
    return self.started[-1]

  def kill(self):
    """Kills the programs that a failed test left running."""
    for process in self.started:
      if process.poll() is None:
        process.kill()
        process.wait()

  def run(self, name, **keys):
    """Trains to the end. Returns the exit code and everything that the run printed."""
    process = self.start(name, **keys)
    log = self.log
    try:
      return process.wait(timeout=240), log.read_text()
    finally:
      process.kill()
      process.wait()

  def wait_for(self, pattern, process, timeout=240):
    """Waits until the newest run's output matches."""
    deadline = time.monotonic() + timeout
    while not re.search(pattern, text := self.log.read_text()):
      assert process.poll() is None, f"ended with {process.poll()} before {pattern!r}:\n{text}"
      assert time.monotonic() < deadline, f"no {pattern!r} in\n{text}"
      time.sleep(0.005)

  def checkpoints(self, name):
    """Returns the directory of a run's checkpoints."""
    return self.output_dir / name / "checkpoints"

  def complete(self, name):
    """Returns the steps that have a manifest (COMPLETE.json)."""
    names = [path.parent.name for path in self.checkpoints(name).glob("*/COMPLETE.json")]
    return sorted(int(name) for name in names if name.isdigit())  # the directory of an unfinished save has another name

  def state(self, name, step):
    """Returns the arrays of a step by name, after verifying their hashes."""
    return read_state(self.checkpoints(name) / str(step))

  def losses(self, name):
    """Returns the loss of each step. If a step was trained again after a kill, all its losses must be equal."""
    found = {}
    for line in (self.output_dir / name / "metrics.jsonl").read_text().splitlines():
      if not line.endswith("}"):
        continue  # cut short by a kill
      entry = json.loads(line)
      assert found.setdefault(entry["step"], entry["loss"]) == entry["loss"], entry
    return found


class TrainRuns(Runs):
  """Runs of ``train.py`` on a tiny model. ``start`` and ``run`` fork a ready process; ``spawn`` starts a new Python."""

  program = "train.py"

  def __init__(self, output_dir, environment, server, cache, corpus):
    # The runs set compilation_cache_dir. With the variable too, JAX would store its programs in two directories.
    super().__init__(output_dir, {k: v for k, v in environment.items() if k != "JAX_COMPILATION_CACHE_DIR"}, server)
    self.keys: dict[str, object] = {**TINY, "compilation_cache_dir": cache, "dataset_path": corpus}

  def command(self, name, **keys):
    """Returns ``python train.py MODEL key=value ...`` as a list."""
    keys = {**self.keys, "output_dir": self.output_dir, "run_name": name, **keys}
    return [sys.executable, "train.py", MODEL, *(f"{key}={value}" for key, value in keys.items())]

  def spawn(self, name, *, environment: dict[str, str] | None = None, stdout=None, stderr=None, prefix=(), **keys):
    """Starts a run as a user's shell does. Streams that are not passed go to a log file.

    Args:
      name: name of the run.
      environment: additional environment variables.
      stdout, stderr: as for ``subprocess.Popen``; None means the log file.
      prefix: words before the command, such as ``["setsid"]``.
      keys: configuration keys.
    """
    self.log = self.output_dir / f"log-{name}-{time.monotonic_ns()}"
    whole: dict[str, str] = self.environment | {"XLA_FLAGS": xla_flags(1)}  # the same flags as in start
    with open(self.log, "w") as log:
      process = subprocess.Popen(
        [*prefix, *self.command(name, **keys)], cwd=ROOT, env=whole | (environment or {}),
        stdin=subprocess.DEVNULL, stdout=log if stdout is None else stdout, stderr=log if stderr is None else stderr,
      )  # fmt: skip
    self.started.append(process)
    return process


def read_state(step_directory):
  """Reads every array of a step in this process, after verifying the hashes of its files."""
  import jax

  from maxtext_like.checkpoint.store import manifest, stored_state

  stored = manifest.read(step_directory)
  manifest.check_hashes(step_directory, stored)
  like = {name: jax.ShapeDtypeStruct(leaf["shape"], jax.numpy.dtype(leaf["dtype"])) for name, leaf in stored.leaves.items()}
  return {name: np.asarray(array) for name, array in stored_state.read(step_directory, stored, like).items()}


def assert_bitwise_equal(one, other):
  """Asserts that two dictionaries of arrays are bitwise equal."""
  assert one.keys() == other.keys()
  for name in one:
    assert one[name].dtype == other[name].dtype, name
    assert one[name].tobytes() == other[name].tobytes(), name


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
  """Environment variables of the programs. They run on the CPU and share one compilation cache."""
  return {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }


@pytest.fixture(scope="session")
def server(environment):
  """The process that the programs are forked from."""
  command = [sys.executable, str(DRIVER.with_name("preloaded.py"))]
  with subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
    yield p
    p.kill()


@pytest.fixture
def runs(tmp_path, environment, server):
  """A fresh output directory for runs of driver.py."""
  return Runs(tmp_path, environment, server)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
  """The compilation cache and the training text that all runs of train.py share."""
  words = random.Random(3)
  corpus = tmp_path_factory.mktemp("corpus")
  for number in range(60):
    text = " ".join(words.choice(("kill", "save", "step", "byte", "hash", "lock")) for _ in range(words.randint(5, 90)))
    (corpus / f"{number:02}.txt").write_text(text)
  return tmp_path_factory.mktemp("xla"), f"{corpus}/*.txt"


@pytest.fixture
def train(tmp_path, environment, server, shared):
  """A fresh output directory for runs of train.py."""
  runs = TrainRuns(tmp_path, environment, server, *shared)
  yield runs
  runs.kill()


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, environment, server):
  """An undisturbed run of 30 steps for comparison, with checkpoints at steps 20, 25 and 30."""
  runs = Runs(tmp_path_factory.mktemp("unbroken"), environment, server)
  code, text = runs.run("unbroken")
  assert code == 0, text
  assert runs.complete("unbroken") == [20, 25, 30]
  return runs
