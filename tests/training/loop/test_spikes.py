"""Loss spikes: which step counts as one, how many batches a rollback skips, and the state in a checkpoint."""

import dataclasses
import json

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.errors import NoProgressError, UserError
from maxtext_like.training.loop.spikes import Spike, Spikes


def spikes(*words: str) -> Spikes:
  return Spikes(load_config("gemma4-tiny", ["spike_factor=2", "spike_window=3", *words]).config.training)


def test_a_spike_is_above_the_factor_times_the_median_of_a_full_window():
  s = spikes()
  assert [s.observe(step, loss) for step, loss in enumerate([9.0, 1.0, 3.0])] == [None] * 3  # the window is not full
  assert s.observe(4, 6.0) is None  # exactly twice the median of 9, 1 and 3
  found = s.observe(5, 6.1)  # above twice the median of 1, 3 and 6
  assert found == Spike(5, 6.1, 3.0)
  assert str(found) == "step 5: loss 6.1 is a spike (median of the losses before it: 3)"
  assert s.observe(6, 6.1) == Spike(6, 6.1, 3.0)  # a spike is not in the window of the next
  assert s.observe(7, float("nan")) is None


def test_data_left_out_grow_with_each_return_to_a_checkpoint_until_the_limit():
  s = spikes("max_spike_rollbacks=3")
  for times, more in enumerate([0, 3, 9], start=1):
    assert s.more_batches(Spike(14, 9.0, 1.0), 10) == more
    told = s.add(Spike(14, 9.0, 1.0, 10, 4 + more, (20, 25)))
    assert told == (
      "step 14: loss 9 is a spike (median of the losses before it: 1). Rolled back to step 10; the "
      f"{4 + more} batches since then are skipped: documents 21 to 25 in reading order (rollback {times} of 3 to this step)"
    )
  with pytest.raises(NoProgressError, match=r"back to step 10 3 times \(max_spike_rollbacks=3\)") as error:
    s.more_batches(Spike(15, 9.0, 1.0), 10)
  assert error.value.exit_code == 3
  assert s.more_batches(Spike(25, 9.0, 1.0), 20) == 0
  assert s.rollbacks == 3


def test_without_a_checkpoint_it_is_told_and_the_loss_counts():
  s = spikes()
  for step in range(3):
    s.observe(step, 1.0)
  spike = s.observe(3, 5.0)
  assert spike is not None
  assert "no checkpoint to roll back to yet" in s.add(spike)
  assert s.rollbacks == 0
  assert s.observe(4, 5.0) == Spike(4, 5.0, 1.0)  # the window is now 1, 1, 5
  assert s.get_state()["losses"] == [1.0, 1.0, 5.0]


def test_the_state_goes_through_json_and_comes_back():
  s = spikes()
  for step in range(4):
    s.observe(step, float(step))
  s.add(Spike(14, 9.0, 1.0, 10, 4, (20, 25)))
  s.documents = 31
  again = spikes()
  again.set_state(json.loads(json.dumps(s.get_state())))
  assert (again.get_state(), again.found, again.documents) == (s.get_state(), s.found, 31)
  again.add(dataclasses.replace(s.found[0], step=15))
  again.set_state(s.get_state(), found=False)
  assert len(again.found) == 2
  again.set_state(None)
  assert again.get_state()["losses"] == []


@pytest.mark.parametrize("words", [["spike_factor=0.5"], ["spike_factor=2", "enable_checkpointing=false"], ["spike_window=0"]])
def test_what_cannot_work_is_refused(words):
  with pytest.raises(UserError, match="spike_"):
    load_config("gemma4-tiny", words)
