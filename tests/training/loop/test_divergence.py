"""Divergence: which final states fail a run, which rises of loss and parameter norm are reported, and which remedy comes
first."""

import json
import math

import pytest

from maxtext_like.errors import NonFiniteError
from maxtext_like.training.loop.divergence import EXTRA, Divergence, History
from tests.training.toy import toy_config

NAN = math.nan


def history(*losses: float, final: float | None = None, skipped: tuple[int, ...] = (), overflow: bool = False) -> History:
  """Return the history of steps with these losses. ``skipped`` are numbers of steps, starting at 1."""
  found = History()
  for step, loss in enumerate(losses, start=1):
    found.add(loss, skipped=step in skipped, overflow=overflow)
  found.final = final
  return found


HEALTHY = {
  "no step": history(),
  "one step": history(5.6, final=5.5),
  "falls": history(5.6, 4.0, 3.0, final=2.9),
  "a little above the first": history(1.2, 1.9, 1.4, 2.4, final=2.6),
  "31B from random weights, measured": history(12.98, 13.1, 16.2, 17.0, 16.8, 15.0, final=14.7),
  "one hard batch at the end of a fine-tuning": history(0.05, 0.1, 0.04, 0.06, 6.0, final=5.9),
  "noise of batches with few targets": history(0.02, 3.5, 0.01, 4.4, 3.9, 0.3, 4.4, final=4.1),
  "an old spike": history(2.0, 500.0, *[2.0] * 5, final=1.9),
  "a skipped step, long ago": history(5.0, NAN, 4.9, 4.8, final=4.7, skipped=(2,)),
  "float16 lowers its scale": history(5.0, 4.0, 3.9, 3.8, final=3.8, skipped=(3, 4), overflow=True),
}
FAILED = {
  "the last step skipped": (history(5.0, 4.0, NAN, skipped=(3,)), ["the last step (3) was skipped"]),
  "the last steps skipped": (history(5.0, NAN, NAN, skipped=(2, 3)), ["the last 2 steps (2 to 3) were skipped"]),
  "float16 lowers its scale on and on": (
    history(5.0, 4.0, 4.0, 4.0, skipped=(2, 3, 4), overflow=True), ["the last 3 steps (2 to 4) were skipped"]
  ),
  "no update at all": (history(NAN, NAN, skipped=(1, 2)), ["the last 2 steps (1 to 2) were skipped"]),
  "the last update": (history(5.0, 4.0, final=NAN), ["final weights on the last batch gives loss nan"]),
  "the only update": (history(5.6, final=4.8e9), ["the last finite loss is 4.8e+09, far above 5.6 at the first step"]),
  "infinite": (history(5.6, 5.0, final=math.inf), ["gives loss inf"]),
  "exploded": (history(5.6, 5.0, 4.0, 1e3, final=900.0), ["is 900, far above 5.6"]),
  "stays high": (history(5.6, *[30.0] * 9, final=29.0), ["is 29, far above 5.6"]),
  "a fine-tuning that forgot all": (history(1.2, 2.0, *[8.0] * 6, final=7.9), ["is 7.9, far above 1.2"]),
  "exploded and skipped": (
    history(5.6, 4.8e9, 1.9e12, NAN, NAN, skipped=(4, 5)), ["(4 to 5) were skipped", "is 1.9e+12, far above 5.6"]
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_ordinary_ends_fail_nothing(name):
  assert HEALTHY[name].reasons(10) == []


@pytest.mark.parametrize("name", FAILED)
def test_weights_that_cannot_be_used_fail_a_run_also_after_a_restart(name):
  found, expected = FAILED[name]
  step = {"the last step skipped": 3, "no update at all": 2, "the last steps skipped": 3, "exploded and skipped": 5}.get(
    name, 4
  )
  restored = History.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False)))
  for reasons in (found.reasons(step), restored.reasons(step)):
    assert len(reasons) == len(expected)
    assert all(words in reason for words, reason in zip(expected, reasons, strict=True))


def test_a_parameter_norm_that_exploded_fails_a_run_whose_loss_is_that_of_guesses():
  """Qwen3 at learning_rate=1e4: its normalization layers hide the size of the weights, so that the loss stays near the
  logarithm of the vocabulary size. Only the parameter norm shows that the weights are unusable."""
  watch = Divergence(toy_config())
  steps(watch, (6.76, 7.1e6), (6.24, 5.5e9), (6.24, 1.8e12), before=64.5)
  (reason,) = watch.history.reasons(3)
  assert reason == "the parameter norm is 1.8e+12, far above 64.5 before the first step"
  resumed = Divergence(toy_config())
  resumed.restart({EXTRA: json.loads(json.dumps(watch.get_state()))}, None)
  steps(resumed, (6.24, 1.9e12), before=1.8e12, start=4)
  assert resumed.history.reasons(4) == ["the parameter norm is 1.9e+12, far above 64.5 before the first step"]
  ordinary = Divergence(toy_config())
  steps(ordinary, (6.76, 100.0), (6.24, 900.0), before=64.5)
  assert ordinary.history.reasons(2) == []


def test_a_checkpoint_of_an_earlier_version_fails_nothing():
  assert History.from_json(None).reasons(7) == []


def steps(
  watch: Divergence, *pairs: tuple[float, float], start: int = 1, before: float = 50.0, tokens: int = 8
) -> list[list[str]]:
  found = []
  for step, (loss, norm) in enumerate(pairs, start=start):
    skipped = not math.isfinite(loss)
    metrics = {"loss": loss, "param_norm": norm, "skipped": skipped, "tokens": tokens}
    found.append(watch.observe(step, metrics, before, overflow=False))
  return found


def test_a_rise_is_reported_in_its_step_with_the_learning_rate_first():
  watch = Divergence(toy_config("learning_rate=1e4"))
  (first,), (second,), third = steps(watch, (5.6, 6.8e6), (4.8e9, 7e6), (NAN, NAN))
  assert first.startswith(
    "step 1: the parameter norm rose from 50 to 6.8e+06 in one step\n  what to try: a lower learning_rate ("
  )
  assert "warmup_steps_fraction=0.1; gradient_clipping_threshold=1" in first  # the toy has neither
  assert second.startswith("step 2: the loss rose from 5.6 to 4.8e+09 in one step\n")
  assert third == []


def test_no_rise_is_reported_of_ordinary_steps():
  watch = Divergence(toy_config())
  # Random weights at a high rate, a fine-tuning with easy batches, and norms that grow threefold.
  assert not any(steps(watch, (5.6, 150.0), (12.0, 300.0), (30.0, 600.0), (2.0, 600.0), (0.01, 600.0), (4.0, 601.0)))


def test_rises_are_reported_a_few_times_only():
  said = [lines for lines in steps(Divergence(toy_config()), *[(10.0**n, 50.0) for n in range(0, 24, 2)]) if lines]
  assert len(said) == 5
  assert "further rises are not reported" in said[-1][0]


def test_the_learning_rate_is_tried_first_where_numbers_exploded_before_the_error():
  error = NonFiniteError("step 2: non-finite loss", ["dtype=bfloat16", "a lower learning_rate (now 10000)"], ["note"])
  watch = Divergence(toy_config("learning_rate=1e4"))
  assert watch.explained(error, 2) is error
  steps(watch, (5.6, 6.8e6), (NAN, NAN))
  after = watch.explained(error, 2)
  assert after.remedies == ("a lower learning_rate (now 10000)", "dtype=bfloat16")
  assert after.notes == ("note",)
  assert watch.explained(error, 200) is error  # a rise long before the error does not count
  slow = Divergence(toy_config("learning_rate=1e4"))
  steps(slow, *[(5.6 * 3**n, 50.0) for n in range(6)])  # each step rises by less than an order of magnitude
  assert slow.explained(error, 7).remedies[0].startswith("a lower learning_rate")


def test_the_loss_of_a_batch_without_targets_is_compared_with_nothing():
  watch = Divergence(toy_config())
  steps(watch, (0.0, 50.0), tokens=0)
  steps(watch, *[(6.0, 50.0)] * 6, start=2)
  assert watch.history.first == 6.0
  assert watch.history.reasons(7) == []
  steps(watch, *[(30.0, 50.0)] * 6, start=8)
  steps(watch, (0.0, 50.0), start=14, tokens=0)
  assert watch.history.reasons(14) == ["the last finite loss is 30, far above 6 at the first step"]


def test_other_data_forget_the_losses_and_keep_the_norms():
  watch = Divergence(toy_config())
  steps(watch, (1.0, 60.0), (0.9, 6e6), before=50.0)
  extra = {EXTRA: watch.get_state(), "data": {"identity": {"files": ["a"]}}}
  same, other = Divergence(toy_config()), Divergence(toy_config())
  same.restart(extra, {"files": ["a"]})
  other.restart(extra, {"files": ["b"]})
  for resumed in (same, other):
    steps(resumed, *[(8.0, 6e6)] * 5, start=3, before=6e6)
  norm = "the parameter norm is 6e+06, far above 50 before the first step"
  assert same.history.reasons(7) == ["the last finite loss is 8, far above 1 at the first step", norm]
  assert other.history.reasons(7) == [norm]
