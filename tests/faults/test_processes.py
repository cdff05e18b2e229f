"""A run of several processes over loopback: it trains like one process, and all processes end if one is lost."""

import json
import os
import signal
import socket
import time

import pytest
from conftest import assert_bitwise_equal

KEYS = {"per_device_batch_size": 2, "steps": 12, "lr_schedule_steps": 12, "checkpoint_interval": 5, "log_interval": 1}
QUICK = {"watchdog_heartbeat_seconds": 60, "watchdog_peers_seconds": 120}


def free_port():
  with socket.create_server(("", 0)) as free:
    return free.getsockname()[1]


class Ranks:
  """The processes of one run."""

  def __init__(self, train, name, count=2, port=None, devices=4, each=None, faults=None, told=None, **keys):
    """Starts the processes.

    Args:
      train: the output directory of the run.
      name: name of the run.
      count: number of processes.
      port: port of the coordinator; a free one by default.
      devices: number of devices of all processes together.
      each: by rank, configuration keys of that process only.
      faults: by rank, Python code that the process runs first.
      told: by rank, the number of processes and the process index that the process receives, if they are wrong.
      keys: configuration keys of all processes.
    """
    port = port or free_port()
    self.logs, self.ranks = [], []
    for rank in range(count):
      names = ["JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]
      total, number = (told or {}).get(rank, (count, rank))
      variables: dict[str, str] = dict(zip(names, (f"127.0.0.1:{port}", str(total), str(number)), strict=True))
      variables["FAULT"] = (faults or {}).get(rank, "")
      own = KEYS | QUICK | keys | (each or {}).get(rank, {})
      self.ranks.append(train.start(name, devices=devices // count, variables=variables, **own))
      self.logs.append(train.log)

  def codes(self, timeout=240):
    return [rank.wait(timeout) for rank in self.ranks]

  def texts(self):
    return [log.read_text() for log in self.logs]

  def wait_for_step(self, step, timeout=240):
    deadline = time.monotonic() + timeout
    while f"step {step:>6} of" not in self.logs[0].read_text():
      assert time.monotonic() < deadline, self.texts()
      assert all(rank.poll() is None for rank in self.ranks), self.texts()
      time.sleep(0.02)


def losses(train, name):
  return list(train.losses(name).values())


@pytest.mark.slow
def test_two_processes_train_as_one_and_go_on_as_one(train):
  """Two processes have the same losses as one and write one set of files. Each side resumes the other's checkpoint."""
  code, text = train.run("one", devices=4, **KEYS)
  assert code == 0, text
  wanted = losses(train, "one")
  two = Ranks(train, "two", steps=8, sample_every=8, sample_prompts='["It is"]', sample_tokens=3)
  assert two.codes() == [0, 0], two.texts()
  assert losses(train, "two") == pytest.approx(wanted[:8], abs=1e-5)
  assert train.complete("two") == [5, 8]
  first, other = two.texts()
  assert "finished: 8 steps" in first
  assert "sample  step 8" in first
  assert "step" not in "".join(line for line in other.splitlines() if not line.startswith(("[Gloo]", "W", "E")))
  code, text = train.run("two", devices=4, **KEYS | {"steps": 10})
  assert code == 0, text
  again = Ranks(train, "two")
  assert again.codes() == [0, 0], again.texts()
  assert losses(train, "two") == pytest.approx(wanted, abs=1e-5)
  run = train.output_dir / "two"
  assert json.loads((run / "env.json").read_text())["processes"] == 2
  assert (run / "report.html").exists()
  assert_bitwise_equal({k: v for k, v in train.state("two", 12).items() if v.ndim == 0},
                       {k: v for k, v in train.state("one", 12).items() if v.ndim == 0})  # fmt: skip


def test_sigterm_on_one_stops_all_at_the_same_step(train):
  both = Ranks(train, "a", devices=2, steps=100_000, checkpoint_interval=100_000)
  both.wait_for_step(3)
  both.ranks[1].send_signal(signal.SIGTERM)
  assert both.codes() == [42, 42], both.texts()
  (step,) = train.complete("a")
  assert all(f"stopped by SIGTERM after step {step}, saved in" in text for text in both.texts())


# JAX 0.10 and 0.12 both call this function. 35 s is longer than gloo waits for a process to connect.
COMPILES_FOR_LONG = """
import time
from jax._src import compiler
compile_and_load = compiler.backend_compile_and_load
def slow(backend, computation, *args, **kwargs):
  if "{name}" in str(computation.operation.attributes["sym_name"]):
    time.sleep(35)
  return compile_and_load(backend, computation, *args, **kwargs)
compiler.backend_compile_and_load = slow
"""
COUNTS_CACHE_HITS = """
from jax import monitoring
monitoring.register_event_listener(lambda event, **_: print(event, flush=True) if event.endswith("cache_hits") else None)
"""


@pytest.mark.slow
def test_one_compiles_for_long_while_the_other_waits_and_both_find_their_programs_later(train, tmp_path):
  """If only process 0 had a warm cache, its collectives would start while process 1 still compiles, and would time out."""
  keys = {"devices": 2, "steps": 4, "eval_interval": 2, "eval_steps": 1, "compilation_cache_dir": tmp_path / "xla"}
  for name, program in (("a", "initial_state"), ("b", "evaluate")):
    both = Ranks(train, name, faults={1: COMPILES_FOR_LONG.format(name=program)}, **keys)
    assert both.codes() == [0, 0], both.texts()
  both = Ranks(train, "c", faults=dict.fromkeys((0, 1), COUNTS_CACHE_HITS), **keys)
  assert both.codes() == [0, 0], both.texts()
  hits = [text.count("cache_hits") for text in both.texts()]
  assert min(hits) >= 2, both.texts()  # the cache keeps no program that compiles in under half a second


@pytest.mark.slow
def test_sigterm_on_one_ends_an_evaluation_of_all(train):
  both = Ranks(train, "a", steps=100_000, checkpoint_interval=100_000, eval_interval=4, eval_steps=100_000, eval_fraction=0.1)
  both.wait_for_step(3)
  time.sleep(5)
  both.ranks[1].send_signal(signal.SIGTERM)
  assert both.codes() == [42, 42], both.texts()
  assert train.complete("a") == [4]


AT_STEP = """
from maxtext_like.training.loop.loop import Loop
launch = Loop._launch
def _launch(self, *given):
  if self.finished == {step}:
    {do}
  return launch(self, *given)
Loop._launch = _launch
"""


@pytest.mark.slow
def test_numbers_that_are_not_finite_end_all(train):
  both = Ranks(train, "a", learning_rate=1e30, warmup_steps_fraction=0, replay_failed_step="false")
  assert both.codes() == [3, 3], both.texts()
  errors = [text[text.index("error: step 2") :] for text in both.texts()]
  assert errors[0] == errors[1]


@pytest.mark.slow
def test_an_exception_in_one_is_told_by_all(train):
  both = Ranks(train, "a", steps=100_000, faults={1: AT_STEP.format(step=7, do='raise ValueError("as planned")')})
  assert both.codes() == [1, 1], both.texts()
  first, other = both.texts()
  assert f"error: process 1 (host {socket.gethostname()}) ended: as planned" in first
  assert "ValueError: as planned" in other


@pytest.mark.slow
def test_an_error_of_the_first_alone_is_told_by_all(train):
  """An error in process 0 that no collective reports, here an unreadable file of an earlier start, ends both processes."""
  (train.output_dir / "a" / "samples.jsonl").mkdir(parents=True)
  both = Ranks(train, "a")
  assert both.codes() == [2, 2], both.texts()
  assert all("samples.jsonl is a directory" in text for text in both.texts())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "victim"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])  # process 0 is the coordinator
def test_one_is_lost(train, number, victim):
  """The other process notices the missing heartbeat, names the lost process and exits. The run resumes from a checkpoint."""
  both = Ranks(train, "a", steps=100_000, watchdog_heartbeat_seconds=4)
  both.wait_for_step(12)
  os.kill(both.ranks[victim].pid, number)
  assert both.ranks[1 - victim].wait(60) == 42, both.texts()
  both.ranks[victim].kill()
  said = both.texts()[1 - victim]
  assert f"error: process {victim} (host {socket.gethostname()})" in said
  assert "is lost" in said
  kept = train.complete("a")[-1]
  code, text = train.run("a", devices=4, **KEYS | {"steps": kept + 2})
  assert code == 0, text
  assert f"from step {kept} in" in text


OTHER_CODE = """
import maxtext_like.training.run.provenance as provenance
same = provenance.same_everywhere
provenance.same_everywhere = lambda: same() | {"code of maxtext_like": "another"}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("odd", "said"),
  [
    ({"each": {1: {"learning_rate": 0.5}}}, "key learning_rate differs: 0.5 in process 1 (host "),
    ({"each": {1: {"output_dir": "/tmp/elsewhere-of-maxtext-like"}}}, "key output_dir differs"),
    ({"faults": {1: OTHER_CODE}}, "code of maxtext_like differs: another in process 1 (host "),
    ({"told": {1: (3, 1)}}, ") expects 3 processes, process 0 (host "),
  ],
  ids=["key", "directory", "code", "count"],
)
def test_they_run_different_things(train, odd, said):
  both = Ranks(train, "a", **odd)
  assert both.codes() == [2, 2], both.texts()
  assert all(said in text for text in both.texts())


@pytest.mark.slow
def test_two_have_the_same_number(train):
  three = Ranks(train, "a", count=3, devices=3, told={2: (3, 1)})
  assert three.codes() == [2, 2, 2], three.texts()
  assert all("the index 1: process 1 (host " in text for text in three.texts())


@pytest.mark.slow
def test_one_does_not_come_or_the_port_is_taken(train):
  variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
  process = train.start("a", variables=variables, **KEYS | QUICK | {"watchdog_peers_seconds": 3})
  assert process.wait() == 42
  assert "process 1 of 2 did not connect to port" in train.log.read_text()
  process = train.start("a", variables=variables | {"JAX_PROCESS_ID": "1"}, **KEYS | QUICK | {"watchdog_peers_seconds": 3})
  assert process.wait() == 42
  assert f"process 0 at {variables['JAX_COORDINATOR_ADDRESS']} within 3 s" in train.log.read_text()
  with socket.create_server(("", 0)) as other:
    port = other.getsockname()[1]
    process = train.start("a", variables=variables | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}, **KEYS)
    assert process.wait() == 2
  assert f"port {port} of " in train.log.read_text()


ONE_SAVE_FAILS = """
from maxtext_like.checkpoint.store.array_writer import ArrayWriter
times = iter(range(1, 100))
begin = ArrayWriter.save
def save(self, path, flat, number):
  from orbax.checkpoint._src.serialization import jax_array_handlers
  owner, name = jax_array_handlers{owner}, "{name}"
  if next(times) == 2:
    whole = getattr(owner, name)
    def fails(*_, **__):
      setattr(owner, name, whole)
      raise OSError(28, "No space left on device")
    setattr(owner, name, fails)
  begin(self, path, flat, number)
ArrayWriter.save = save
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("victim", "owner", "name"),
  [(0, ".replica_slices", "transfer_arrays_to_host"), (1, "", "_async_serialize_replica_slices")],
  ids=["at its start", "behind the training"],
)
def test_a_save_that_fails_in_one_is_given_up_by_all_and_the_next_one_stands(train, victim, owner, name):
  both = Ranks(train, "a", faults={victim: ONE_SAVE_FAILS.format(owner=owner, name=name)}, watchdog_save_seconds=600, steps=16)
  assert both.codes() == [0, 0], both.texts()
  for rank, text in enumerate(both.texts()):
    assert f"checkpoint of step 10 failed in process {rank} (host " in text, text
    assert "No space left on device" in text
    assert "step 5 is kept" in text
  assert f"process {victim} (host {socket.gethostname()}): " in both.texts()[1 - victim]
  assert train.complete("a") == [5, 15, 16]


@pytest.mark.slow
def test_f61_one_lives_and_is_stuck(train):
  """One process hangs in a step but still sends heartbeats. Both processes exit with 42; the log shows the hanging frame."""
  stuck = AT_STEP.format(step=7, do="import time; time.sleep(10_000)")
  both = Ranks(train, "a", steps=100_000, faults={1: stuck}, watchdog_step_seconds=20)
  assert both.codes() == [42, 42], both.texts()
  first, other = both.texts()
  assert "error: step 8 takes longer than 20 s (watchdog_step_seconds=20)" in other, other
  assert "in _launch" in other.partition("threads:")[2]
  assert "error: " in first
  assert train.complete("a") == [5]


# The model divides by zero for token 7, which only one process has in its rows. Both processes run the same program.
DIVIDES = """
from maxtext_like.layers.embedding import Embedding
call = Embedding.__call__
Embedding.__call__ = lambda self, p, tokens, *held: call(self, p, tokens, *held) / (tokens != 7)[..., None].astype("float32")
"""
HAS_IT = """
import numpy as np
from maxtext_like.training.step.program import TrainProgram
place, batches = TrainProgram.place, iter(range(1, 100))
def with_token(self, batch):
  tokens = np.full_like(batch["tokens"], 7) if next(batches) == 4 else batch["tokens"]
  return place(self, {**batch, "tokens": tokens})
TrainProgram.place = with_token
"""


@pytest.mark.nightly  # tests/analysis/test_failed_step.py replays the step of one process
def test_numbers_of_the_rows_of_one_end_all_with_the_same_cause(train):
  """Both processes keep and replay the step, because loss and gradients are non-finite in both, and name the same cause."""
  one_layer = {
    "num_decoder_layers": 1,
    "inhomogeneous_layer_cycle_interval": 1,
  }  # the instrumented step of a larger model compiles for minutes
  both = Ranks(train, "a", faults={0: DIVIDES, 1: DIVIDES + HAS_IT}, finite_check_steps=-1, **one_layer)
  assert both.codes(400) == [3, 3], both.texts()
  errors = [text[text.index("error: step 4") :] for text in both.texts()]
  assert errors[0] == errors[1]
  assert "non-finite loss" in errors[0], errors[0]
  assert "first cause: " in errors[0], errors[0]
  assert "div" in errors[0].partition("first cause: ")[2].splitlines()[0], errors[0]
  kept = train.output_dir / "a" / "failed_step"
  assert {"3", "batch.npz", "failure.json", "xray.json"} <= {path.name for path in kept.iterdir()}
