"""Tests that programs of self-tests run one at a time, and that their stages are timed."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from maxtext_like.numerics.selfcheck_programs import EVENT, STAGES, compile_together, run_alone


def test_programs_of_tests_run_in_turns():
  running, most = [0], [0]

  def program(x):
    running[0] += 1
    most[0] = max(most[0], running[0])
    time.sleep(0.02)
    running[0] -= 1
    return x + 1

  done: Future[Any] = Future()
  done.set_result(program)
  with ThreadPoolExecutor(4) as pool:
    assert sorted(pool.map(lambda i: run_alone(done, i), range(8))) == list(range(1, 9))
  assert most == [1]


def test_the_stages_of_a_program_are_timed(monkeypatch: pytest.MonkeyPatch):
  stages = []
  monkeypatch.setattr(jax.monitoring, "record_event_duration_secs", lambda event, seconds: stages.append(event))
  given = (np.arange(3, dtype=np.float32),)
  np.testing.assert_array_equal(run_alone(compile_together({"a": (jax.jit(lambda x: x + 1), given)})["a"], *given), [1, 2, 3])
  assert set(stages) >= {EVENT + stage for stage in STAGES}
