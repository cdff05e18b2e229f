"""TensorBoard events and their records against tensorboardX, which uses protobuf."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
from tensorboardX.record_writer import masked_crc32c

from maxtext_like.training.sinks import event_format

TIMES = st.floats(0, 1e12)
STEPS = st.integers(0, 2**62)


@given(TIMES, STEPS, st.lists(st.tuples(st.text(max_size=300), st.floats(allow_nan=False, width=32))))
def test_scalars_are_read_as_they_were_written(wall_time, step, numbers):
  event = Event.FromString(event_format.scalars(wall_time, step, numbers))
  assert (event.wall_time, event.step, event.WhichOneof("what")) == (wall_time, step, "summary")
  assert [(v.tag, v.simple_value) for v in event.summary.value] == numbers


@pytest.mark.parametrize("number", [1e39, -1e304])
def test_a_number_past_float32_is_infinite(number):
  (value,) = Event.FromString(event_format.scalars(0.0, 1, [("loss", number)])).summary.value
  assert value.simple_value == math.copysign(math.inf, number)


@given(TIMES, STEPS)
def test_the_other_events(wall_time, step):
  start = Event.FromString(event_format.session_start(wall_time, step))
  assert (start.wall_time, start.step, start.session_log.status) == (wall_time, step, start.session_log.START)
  assert Event.FromString(event_format.file_version(wall_time)).file_version == "brain.Event:2"


@given(st.binary(max_size=300))
def test_the_checksum(content):
  assert event_format.masked_crc32c(content) == masked_crc32c(content)
