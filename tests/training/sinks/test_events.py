"""TensorBoard events, read back as TensorBoard does."""

import struct

from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
from tensorboardX.record_writer import masked_crc32c

from maxtext_like.training.sinks.events import Events


def events(directory):
  """Return the events of a run, and check every checksum."""
  (path,) = (directory / "tensorboard").iterdir()
  content, found = path.read_bytes(), []
  while content:
    (length,), (check,) = struct.unpack("<Q", content[:8]), struct.unpack("<I", content[8:12])
    assert check == masked_crc32c(content[:8])
    event = content[12 : 12 + length]
    assert struct.unpack("<I", content[12 + length : 16 + length])[0] == masked_crc32c(event)
    found.append(Event.FromString(event))
    content = content[16 + length :]
  return found


def test_a_row_is_one_event_with_a_tag_for_each_number_and_each_layer(tmp_path):
  writer = Events(tmp_path, 0)
  row = {
    "step": 1,
    "loss": 2.0,
    "cross_entropy": 1.0,
    "eval_loss": 0.0,
    "eval_loss/web": 3.5,
    "eval_perplexity": 1.0,
    "eval_perplexity/web": None,
    "mfu": 0.5,
    "memory_gb": 3.0,
    "epoch": 0.25,
  }
  writer.write(row | {"numerics/forward/mlp/max": [1.5, None]})
  writer.write({"step": 2, "loss": None})
  head, one, two = events(tmp_path)
  assert head.file_version == "brain.Event:2"
  assert (one.step, two.step) == (1, 2)
  assert {v.tag: round(v.simple_value, 3) for v in one.summary.value} == {
    "train/loss": 2.0,
    "train/cross_entropy": 1.0,
    "train/perplexity": 2.718,
    "train/epoch": 0.25,
    "eval/loss": 0.0,
    "eval/loss/web": 3.5,
    "eval/perplexity": 1.0,
    "perf/mfu": 0.5,
    "perf/memory_gb": 3.0,
    "numerics/forward/mlp/max/layer_00": 1.5,
  }
  assert not two.summary.value


def test_a_run_that_goes_on_makes_tensorboard_forget_the_later_steps(tmp_path):
  Events(tmp_path, 7).write({"step": 8, "loss": 2.0})
  _, start, row = events(tmp_path)
  assert (start.step, start.session_log.status) == (8, start.session_log.START)
  assert row.step == 8


def test_a_run_that_goes_back_makes_tensorboard_forget_the_steps_since(tmp_path):
  writer = Events(tmp_path, 0)
  writer.forget(0)
  for step in (1, 2, 3):
    writer.write({"step": step, "loss": 2.0})
  writer.forget(1)
  writer.write({"step": 2, "loss": 1.0})
  found = [(event.step, event.session_log.status) for event in events(tmp_path)[1:]]
  assert found == [(1, 0), (2, 0), (3, 0), (2, Event().session_log.START), (2, 0)]
