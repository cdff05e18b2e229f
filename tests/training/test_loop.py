"""The times of steps, on a device that is played: what the host is busy with must not show in them."""

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from maxtext_like.config.load import load_config
from maxtext_like.training.loop import Loop

STEP, LAUNCH = 0.3, 0.2  # seconds that the device works on a step, and that launching it keeps the host into it


class Device:
  """Works on one step after the other; launching one returns only when the device is some way into it."""

  def __init__(self):
    self.free = time.perf_counter()

  def step(self, state, batch, check):
    begin = max(self.free, time.perf_counter())
    self.free = begin + STEP
    time.sleep(begin + LAUNCH - time.perf_counter())
    names = ("loss", "grad_norm", "param_norm", "learning_rate", "tokens", "skipped")
    finite = {name: Result(self.free) for name in ("state_parameters", "state_optimizer")}
    return state, {name: Result(self.free) for name in names} | {"finite": finite, "known": None}


class Result:
  """A scalar that is there at a time."""

  def __init__(self, at: float):
    self._at = at

  def block_until_ready(self):
    time.sleep(max(0.0, self._at - time.perf_counter()))

  def copy_to_host_async(self):
    pass

  def __array__(self, dtype=None, copy=None):
    self.block_until_ready()
    return np.asarray(1.0, dtype)


def test_a_step_takes_as_long_as_the_device_works_on_it():
  steps = 5
  program: Any = SimpleNamespace(
    config=load_config("gemma4-tiny", [f"steps={steps}"]).config, place=lambda x: x, mesh=SimpleNamespace(size=1), devices=()
  )
  guard = MagicMock(may_end_the_run=False, checking=False, changed=False)
  guard.observe.return_value = ([], None)
  stop = MagicMock()
  stop.should_stop.return_value = False
  files: Any = MagicMock()
  data: Any = MagicMock(epoch=None, __next__=lambda _: {})
  quiet: Any = MagicMock()
  Loop(program, Device().step, {}, data, None, None, None, files, quiet, stop, guard, 1.0, None).run(0)
  seconds = [call.args[0]["step_seconds"] for call in files.row.call_args_list]
  assert len(seconds) == steps
  np.testing.assert_allclose(seconds, STEP, atol=0.08)
