"""Step times on a simulated device. Work of the host between steps must not count in them."""

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import NonFiniteError
from maxtext_like.training.loop import loop
from maxtext_like.training.loop.divergence import Divergence
from maxtext_like.training.loop.loop import Loop
from maxtext_like.training.step.program import Stepper

STEP, LAUNCH = 0.3, 0.2  # seconds of a step on the device; seconds after its start at which the launch returns


class Clock(threading.local):
  """A clock that advances only when its thread sleeps, so that the load of this machine has no effect."""

  now = 0.0

  def perf_counter(self):
    return self.now

  def sleep(self, seconds):
    self.now += max(0.0, seconds)


clock = Clock()


@pytest.fixture(autouse=True)
def played(monkeypatch):
  monkeypatch.setattr(loop, "time", clock)


class Device:
  """Runs one step after the other. A launch returns only after the device has worked on the step for ``LAUNCH`` seconds."""

  def __init__(self):
    self.free = clock.perf_counter()

  def step(self, state, batch, check):
    begin = max(self.free, clock.perf_counter())
    self.free = begin + STEP
    clock.sleep(begin + LAUNCH - clock.perf_counter())
    names = ("loss", "grad_norm", "param_norm", "learning_rate", "tokens", "skipped")
    finite = {name: Result(self.free) for name in ("state_parameters", "state_optimizer")}
    metrics = {name: Result(self.free) for name in (*names, "decided")} | {"skipped": Result(self.free, 0.0)}
    return state, metrics | {"finite": finite, "magnitude_bound": 1.0}


class Doubtful(Device):
  """A device that cannot prove any step finite, so no step changes the state."""

  def step(self, state, batch, check):
    state, metrics = super().step(state, batch, check)
    return state, metrics | {"decided": Result(self.free, 0.0)}


class Result:
  """A scalar that is available from a given time on."""

  def __init__(self, at: float, value: float = 1.0):
    self._at, self._value = at, value

  def block_until_ready(self):
    clock.sleep(self._at - clock.perf_counter())

  def copy_to_host_async(self):
    pass

  def __bool__(self):
    return bool(self._value)

  def __array__(self, dtype=None, copy=None):
    self.block_until_ready()
    return np.asarray(self._value, dtype)


BUSY = 0.5  # seconds that the host works between two steps while the device is idle


def run(steps: int, *words: str, **parts: Any) -> Any:
  """Run a loop of this many steps, and return the mock that received its rows."""
  program: Any = SimpleNamespace(
    config=load_config("gemma4-tiny", [f"steps={steps}", *words]).config, place=lambda x: x,
    model=SimpleNamespace(mesh=SimpleNamespace(size=1), devices=[SimpleNamespace(device_kind="played", process_index=1)]),
    global_batch=1, checkpoint_state=lambda state: state,
    lower_step=parts.get("lower_step", MagicMock(side_effect=RuntimeError("no memory for the checked form"))),
  )  # fmt: skip
  guard = MagicMock(may_end_the_run=False, checking=False, changed=False)
  guard.observe.return_value = ([], None)
  guard.before_save.return_value = None
  stop = MagicMock()
  stop.should_stop.return_value = False
  stop.interruptible = lambda work: work()
  files: Any = MagicMock()
  data: Any = MagicMock(progress=dict, __next__=lambda _: {})
  quiet: Any = MagicMock()
  given = {"evaluate": None, "sample": None, "manager": None} | parts
  seen = {"magnitude_bound": 1.0, "param_norm": 1.0, "state_parameters": np.ones(1, bool), "state_optimizer": np.ones(1, bool)}
  look: Any = lambda *_: seen
  stepper = Stepper(program, parts.get("device", Device()).step, look)
  state = {"step": jnp.int32(0), "params": {}, "opt_state": ()}
  Loop(
    program, stepper, state, data, given["evaluate"], given["sample"], given["manager"], files, quiet, stop, guard,
    Divergence(program.config), 1.0, None,
    profile=given.get("profile"), best=given.get("best"), evaluate_tasks=given.get("evaluate_tasks"),
  ).run(0)  # fmt: skip
  return files


def seconds_of(files: Any) -> list[float]:
  return [call.args[0]["step_seconds"] for call in files.row.call_args_list]


def test_a_step_takes_as_long_as_the_device_works_on_it():
  seconds = seconds_of(run(5))
  assert len(seconds) == 5
  np.testing.assert_allclose(seconds, STEP, atol=1e-6)


def busy(result: Any) -> Any:
  clock.sleep(BUSY)
  return result


def test_what_comes_between_two_steps_is_in_none_of_their_times():
  """No step time includes the evaluation after step 1, the save after step 2, the samples after step 3, or the start and end of
  the profile of step 5."""
  manager = MagicMock(
    due=lambda step: step == 2, save=lambda *_, **__: busy(True), save_and_wait=lambda *_, **__: False, complete_steps=list
  )
  profile = MagicMock(
    starts=lambda step: step == 5, ends=lambda step: step == 5, start=lambda: busy(None), stop=lambda: busy(None)
  )
  evaluated = iter([True])
  files = run(
    6, "eval_interval=1", "sample_every=3", "dataset=text", "dataset_path=x",
    evaluate=lambda _: {"eval_loss": busy(1.0) if next(evaluated, False) else 1.0},
    sample=lambda step, _: busy([]) if step == 3 else [], manager=manager, profile=profile,
  )  # fmt: skip
  np.testing.assert_allclose(seconds_of(files), STEP, atol=1e-6)


def test_tasks_are_evaluated_at_their_own_interval():
  """Task metrics and the evaluation loss are at different steps, and an interrupted task evaluation (None) adds nothing to the
  row."""
  found = iter([{"eval_tasks/a/acc": 0.5}, None])
  files = run(
    5, "eval_interval=3", "eval_tasks=[a]", "eval_tasks_interval=2", "dataset=text", "dataset_path=x",
    evaluate=lambda _: {"eval_loss": 1.0}, evaluate_tasks=lambda _: next(found),
  )  # fmt: skip
  rows = [call.args[0] for call in files.row.call_args_list]
  assert [row["step"] for row in rows if "eval_tasks/a/acc" in row] == [2]
  assert [row["step"] for row in rows if "eval_loss" in row] == [3]


def test_a_step_that_did_nothing_and_cannot_be_taken_again_is_not_saved_as_done():
  manager = MagicMock(due=lambda step: False, complete_steps=list)
  with pytest.raises(RuntimeError, match="no memory"):
    run(3, manager=manager, device=Doubtful())
  manager.save_and_wait.assert_not_called()


class Skipping(Device):
  """A device that skips every update."""

  def step(self, state, batch, check):
    state, metrics = super().step(state, batch, check)
    return state, metrics | {"skipped": Result(self.free)}


@pytest.mark.parametrize(("kind", "usual"), [(Device, 3), (Skipping, 6)])
def test_steps_that_no_proof_holds_for_are_not_all_begun_twice(kind, usual):
  """After two repeated steps in a row the loop uses the checked form directly. Skipped steps do not count, because the step
  after a skipped one may have a proof again."""
  begun, taken = MagicMock(side_effect=Doubtful().step), MagicMock(side_effect=kind().step)
  parts: dict[str, Any] = {
    "device": SimpleNamespace(step=begun),
    "lower_step": lambda checked: SimpleNamespace(compile=lambda: taken),
  }
  if kind is Skipping:
    with pytest.raises(NonFiniteError, match=r"the last 6 steps \(1 to 6\) were skipped"):
      run(6, **parts)
    assert taken.call_count == 6
  else:
    run(6, **parts)
    assert taken.call_count == 7  # 6 steps, and one call that measures the loss of the final weights
  assert begun.call_count >= 6 if usual == 6 else begun.call_count == usual
