"""Packing: no token is lost, segments and positions restart, targets follow; the state is exact."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.pack import Document, Packer, Row, ShuffleBuffer
from maxtext_like.errors import UserError
from maxtext_like.targets import IGNORED


class Listed:
  """A source of documents from a list, once or forever, with the state that `DocumentStream` has."""

  def __init__(self, documents, repeat=False):
    self.documents, self.repeat, self.at = documents, repeat, 0

  def __next__(self):
    if self.at >= len(self.documents) and not self.repeat:
      raise StopIteration
    self.at += 1
    ids = self.documents[(self.at - 1) % len(self.documents)]
    number = (self.at - 1) % len(self.documents)
    if isinstance(ids, BadRecordError):
      return Document(number, bad=ids)
    return Document(number, None if ids is None else np.asarray(ids, np.int32))

  def get_state(self):
    return {"next_index": self.at}

  def set_state(self, state):
    self.at = state["next_index"]

  def counts(self):
    return {}


def packer(documents, length=7, packing=True, repeat=False, on_bad_record="error", bad_max=10):
  return Packer(
    Listed(documents, repeat), length=length, pad_id=0, packing=packing, on_bad_record=on_bad_record, bad_max=bad_max,
    epoch_length=len(documents),
  )  # fmt: skip


def drain(rows):
  result = []
  while True:
    try:
      result.append(next(rows))
    except StopIteration:
      return result


def check_row(row: Row):
  """Checks the definitions of segments, positions and targets, token by token."""
  length = len(row.tokens)
  for array in (row.tokens, row.targets, row.positions, row.segments):
    assert array.shape == (length,)
    assert array.dtype == np.int32
  for t in range(length):
    segment, before = row.segments[t], row.segments[t - 1] if t else 0
    if segment == 0:
      assert (row.tokens[t], row.targets[t], row.positions[t]) == (0, IGNORED, 0)
      assert not row.segments[t:].any()
      continue
    assert segment in (before, before + 1)
    assert row.positions[t] == (row.positions[t - 1] + 1 if segment == before else 0)
    follows = t + 1 < length and row.segments[t + 1] == segment
    assert row.targets[t] == (row.tokens[t + 1] if follows else IGNORED)


# Token ids encode their origin: document 1000, token 1 -> 1001.
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=12)


def numbered(sizes) -> list[Any]:
  return [[1000 * (d + 1) + i for i in range(size)] for d, size in enumerate(sizes)]


@settings(deadline=None)
@given(lengths, st.integers(1, 23))
def test_packing_loses_and_repeats_nothing(sizes, length):
  documents = numbered(sizes)
  rows = drain(packer(documents, length))
  for row in rows:
    check_row(row)
  for row in rows[:-1]:
    assert row.segments.all(), "only the last row of a finite source has padding"
  tokens = np.concatenate([row.tokens[row.segments > 0] for row in rows])
  np.testing.assert_array_equal(tokens, np.concatenate(documents))
  for row in rows:  # two documents never share a segment
    for segment in range(1, row.segments.max() + 1):
      assert len({int(token) // 1000 for token in row.tokens[row.segments == segment]}) == 1


@settings(deadline=None)
@given(lengths, st.integers(1, 23))
def test_without_packing_a_row_is_the_head_of_a_document(sizes, length):
  documents = numbered(sizes)
  source = packer(documents, length, packing=False)
  rows = drain(source)
  assert len(rows) == len(documents)
  for row, document in zip(rows, documents, strict=True):
    check_row(row)
    np.testing.assert_array_equal(row.tokens[row.segments == 1], document[:length])
    assert row.segments.max() == 1
  assert source.counts()["dropped_tokens"] == sum(max(0, size - length) for size in sizes)


@settings(deadline=None)
@given(lengths, st.integers(1, 9), st.booleans(), st.integers(0, 6), st.integers(0, 40), st.integers(0, 3))
def test_state_continues_bitwise(sizes, length, packing, buffer, steps, seed):
  documents = numbered(sizes)
  documents.insert(len(documents) // 2, None)

  def build():
    rows = packer(documents, length, packing, repeat=True)
    return ShuffleBuffer(rows, size=buffer, seed=seed) if buffer else rows

  unbroken = build()
  for _ in range(steps):
    next(unbroken)
  state = json.loads(json.dumps(unbroken.get_state()))
  resumed = build()
  next(resumed)  # a state must replace everything before it
  resumed.set_state(state)
  assert resumed.get_state() == state
  for _ in range(25):
    a, b = next(unbroken), next(resumed)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.segments, b.segments)
    assert unbroken.get_state() == resumed.get_state()
  assert unbroken.counts() == resumed.counts()


def test_block_shuffle_permutes_each_block():
  documents = numbered([30, 41, 2, 19])
  plain, shuffled = packer(documents, 5, repeat=True), ShuffleBuffer(packer(documents, 5, repeat=True), size=6, seed=1)
  orders = []
  for _ in range(4):
    expected = [tuple(next(plain).tokens) for _ in range(6)]
    found = [tuple(next(shuffled).tokens) for _ in range(6)]
    assert sorted(found) == sorted(expected)
    orders.append([expected.index(row) for row in found])
  assert any(order != [0, 1, 2, 3, 4, 5] for order in orders)
  assert len({tuple(order) for order in orders}) > 1


def test_bad_records_stop_or_are_skipped_and_counted_once():
  bad = BadRecordError("f.jsonl:3", "not JSON")
  with pytest.raises(UserError, match=r"f\.jsonl:3: not JSON\n  fix: .*on_bad_record=skip"):
    next(packer([[5, 6], bad]))
  documents = [[5, 6, 7], bad, [8, 9]]
  rows = packer(documents, 10, repeat=True, on_bad_record="skip")
  seen = []
  rows.on_skip = seen.append
  assert next(rows).tokens.tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 8, 9]
  assert rows.counts()["bad"] == 1
  assert seen == [bad]
  resumed = packer(documents, 10, repeat=True, on_bad_record="skip")
  resumed.set_state(rows.get_state())
  resumed.on_skip = seen.append
  next(resumed)
  assert resumed.counts()["bad"] == 1, "known from before: not counted or shown again"
  assert seen == [bad]
  with pytest.raises(UserError, match=r"3 bad records, more than on_bad_record=skip accepts \(2"):
    next(packer([[5, 6], bad, bad, bad], on_bad_record="skip", bad_max=2))


def test_a_source_without_tokens_is_an_error_not_an_endless_loop():
  bad = BadRecordError("f:1", "x")
  with pytest.raises(UserError, match="no token to learn in any of the 3 documents: 1 are bad"):
    next(packer([None, bad, None], repeat=True, on_bad_record="skip"))


def test_resuming_on_a_shorter_document_is_refused():
  first = packer([[1, 2, 3, 4, 5, 6, 7, 8, 9]], 4, repeat=True)
  next(first)
  next(first)
  with pytest.raises(UserError, match="the data changed"):
    packer([[1, 2, 3]], 4, repeat=True).set_state(first.get_state())
