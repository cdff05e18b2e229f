"""Tests caches: stored entries and visible entries are compared with a list of the entries of each row."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.cache import Step, cache_arrays, cache_slots, extended, grown
from tests.tiers import slow

ROWS, HEADS, WIDTH = 4, 2, 3


def entry(row: int, position: int) -> np.ndarray:
  """Return numbers that differ for each entry, [HEADS, WIDTH]."""
  return 100 * row + position + np.arange(HEADS * WIDTH, dtype=np.float32).reshape(HEADS, WIDTH) / 10


def seen(held: np.ndarray, mask: np.ndarray) -> list[float]:
  """Return the first number of each entry that a query sees, ordered by position."""
  return sorted(held[0, mask, 0].tolist())


@pytest.mark.parametrize(
  ("window", "chunks"), [slow(None, [2, 4, 1, 3, 1]), slow(3, [5, 1, 1, 1, 1]), (3, [2, 4, 1, 3, 1]), (5, [1, 7, 1, 1])]
)
def test_every_token_sees_the_tokens_before_it(window, chunks):
  capacity, rows = 12, np.array([2, 0, 9])  # the last row of the batch has no row in the cache
  cache = jnp.zeros((ROWS, HEADS, cache_slots(window, capacity), WIDTH))
  start = np.zeros(3, np.int32)
  for number, T in enumerate(chunks):
    # In chunks of several tokens, the second row has fewer real tokens.
    count = np.array([T, max(1, T - 1), 0], np.int32)
    new = np.stack([np.stack([entry(int(r), int(s) + t) for t in range(T)]) for r, s in zip(rows, start, strict=True)])
    step = Step(jnp.asarray(start), jnp.asarray(count), jnp.asarray(rows), fresh=number == 0)
    cache, held = step.extended(cache, jnp.asarray(new))
    assert held.shape[2] == step.held(T, cache.shape[2])
    mask = np.asarray(step.mask(T, held.shape[2], window=window))
    for b in range(2):
      for t in range(count[b]):
        last = start[b] + t
        first = 0 if window is None else max(0, last - window + 1)
        want = [float(entry(rows[b], position)[0, 0]) for position in range(first, last + 1)]
        assert seen(np.asarray(held)[b], mask[b, t]) == want, (number, b, t)
    start += count
  assert not np.asarray(cache)[[1, 3]].any(), "rows that are not in the batch are untouched"


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_that_were_taken_back_are_not_seen(window):
  """Tokens are stored one by one or together, and up to three of the last ones are taken back: they have entries that are not
  finite. Every later token sees the others before it."""
  spare, capacity, random = 3, 40, np.random.default_rng(0)
  cache = jnp.zeros((ROWS, HEADS, min(cache_slots(window, capacity) + spare, capacity), WIDTH))
  start = np.array([0, 4, 7, 1])
  kept = [[float(entry(r, p)[0, 0]) for p in range(n)] for r, n in enumerate(start)]
  prompt = jnp.asarray([[entry(r, p) for p in range(7)] for r in range(ROWS)])
  cache, _ = Step(jnp.zeros(ROWS, jnp.int32), jnp.asarray(start), fresh=True).extended(cache, prompt)
  for number in range(9):
    taken_back = random.integers(0, spare + 1, ROWS)
    new = np.stack([[entry(r, int(n) + t) + number / 1000 for t in range(spare + 1)] for r, n in enumerate(start)])
    for r, n in enumerate(taken_back):
      new[r, spare + 1 - n :] = np.nan
    for chunk in [slice(0, spare + 1)] if number % 2 else [slice(t, t + 1) for t in range(spare + 1)]:
      T = chunk.stop - chunk.start
      step = Step(jnp.asarray(start + chunk.start), jnp.full(ROWS, T), spare=spare)
      cache, held = step.extended(cache, jnp.asarray(new[:, chunk]))
      mask = np.asarray(step.mask(T, held.shape[2], window=window))
      for r in range(ROWS):
        for t in range(chunk.start, min(chunk.stop, spare + 1 - taken_back[r])):
          want = (kept[r] + new[r, : t + 1, 0, 0].tolist())[-(window or 99) :]
          assert seen(np.asarray(held)[r], mask[r, t - chunk.start]) == sorted(want), (number, r, t)
          # Entries that a token does not see are multiplied by 0.
          later = [(int(start[r]) + p) % held.shape[2] for p in range(t + 1, chunk.stop)]
          assert np.isfinite(np.delete(np.asarray(held)[r], later, axis=1)).all(), (number, r, t)
    for r in range(ROWS):
      kept[r] += new[r, : spare + 1 - taken_back[r], 0, 0].tolist()
    start = start + spare + 1 - taken_back


def test_images_see_their_later_tokens():
  images = jnp.asarray([[0, 1, 1, 0, 2]])
  step = Step(jnp.zeros(1, jnp.int32), jnp.asarray([5]), fresh=True)
  mask = np.asarray(step.mask(5, 5, window=None, images=images))[0]
  want = np.tril(np.ones((5, 5), bool))
  want[1, 2] = True
  np.testing.assert_array_equal(mask, want)


def test_a_larger_cache_holds_the_same_entries():
  cache = jnp.arange(24.0).reshape(2, 2, 3, 2)
  larger = grown(cache, 5)
  assert larger.shape == (2, 2, 5, 2)
  np.testing.assert_array_equal(larger[:, :, :3], cache)
  assert not larger[:, :, 3:].any()


def test_an_8_bit_cache_returns_rounded_entries():
  draw = np.random.default_rng(0).normal(size=(2, 6, HEADS, WIDTH)).astype(np.float32) * [[[[100]]], [[[1e-4]]]]
  draw[1, 3] = 0
  cache = cache_arrays("k", (2, HEADS, 8, WIDTH), jnp.float32, int8=True)
  assert {name: x.dtype for name, x in cache.items()} == {"k": jnp.int8, "k.scale": jnp.float32}
  for begin, end in ((0, 4), (4, 5), (5, 6)):
    step = Step(jnp.full(2, begin), jnp.full(2, end - begin), fresh=begin == 0)
    new, held = extended(step, cache, "k", jnp.asarray(draw[:, begin:end], jnp.float32))
    assert set(new) == set(cache)
    cache = new
  want = draw.transpose(0, 2, 1, 3)
  half = np.abs(want).max(-1, keepdims=True) / 127 / 2
  assert (np.abs(held[:, :, :6] - want) <= 1.001 * half + 1e-12).all()
  assert not np.asarray(held)[:, :, 6:].any()


def test_slots_that_a_row_uses():
  """A row uses one slot for each earlier token and one for the new token, but never more than the slots of a ring buffer. A row
  without a new token uses none."""
  step = Step(jnp.array([0, 5, 7, 20, 5]), jnp.array([1, 1, 1, 1, 0]))
  assert step.lengths(8).tolist() == [1, 6, 8, 8, 0]
