"""The order in which documents are read: the held-out split and the shuffle of each epoch.

Open this file to change how documents are divided or shuffled. Both decide what a stored position of a run means.
"""

import hashlib
import sys
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

TABLE_UP_TO = 2**16  # documents: up to here a permutation is a table, which is faster; above, `shuffled_index` needs no memory
UINT32 = 2**32 - 1

Split = str  # "train" or "eval"


class Share(Sequence[int]):
  """The documents of one split in ascending order, computed without a list of them.

  Document i is held out if floor((i + 1) f) > floor(i f), with f the ``eval_fraction``. The held-out documents are spread
  evenly, floor(documents * f) in total. The rule depends only on i, so documents that are appended later do not change the
  split of any earlier one, and no document is in both splits.
  """

  def __init__(self, documents: int, eval_fraction: float = 0.0, split: Split = "train"):
    fraction = Fraction(eval_fraction).limit_denominator(10**6)
    if not 0 <= fraction < 1:
      raise ValueError(f"data.eval_fraction is {eval_fraction}, expected 0 or more and below 1")
    self._held_out = split == "eval"
    self._share, self._of = (
      fraction.numerator if self._held_out else fraction.denominator - fraction.numerator,
      fraction.denominator,
    )
    self._length = self.before(documents)

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> int:
    if not 0 <= index < self._length:
      raise IndexError(f"{index} of {self._length}")
    if self._held_out:
      return -(-(index + 1) * self._of // self._share) - 1
    return index * self._of // self._share

  def before(self, document: int) -> int:
    """Returns how many documents of the split have a number below ``document``."""
    if self._held_out:
      return document * self._share // self._of
    return -(-document * self._share // self._of)


def seed_for(*parts: int | str) -> int:
  """Returns a 32-bit seed. Similar parts (seed 0 with epoch 1, seed 1 with epoch 0) give unrelated seeds."""
  text = "/".join(str(part) for part in parts)
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class Order:
  """A sequence of document numbers, indexed by position.

  Training reads a number of passes over the documents, or reads without an end. With ``shuffle_seed`` each epoch has its own
  permutation. Evaluation reads the split once, in order. If the documents have ``groups`` that are cheap to read together
  (parquet row groups), the order of the groups is permuted, and so are the documents inside each group. Reading then changes
  from one group to another as rarely as possible.
  """

  def __init__(
    self,
    indices: Share,
    *,
    shuffle_seed: int | None,
    passes: int | None,
    groups: Sequence[int] | None = None,
  ):
    """Sets up the order.

    Args:
      indices: the documents of the split.
      shuffle_seed: seed of the permutations; None keeps the order of the files.
      passes: number of passes over the documents; None for no end.
      groups: first document of each group, ascending, beginning with 0.
    """
    self._indices = indices
    self._seed = shuffle_seed
    self._length = sys.maxsize if passes is None else passes * len(indices)
    edges = [0] if groups is None else [indices.before(group) for group in groups]
    # Group g has the positions edges[g] to edges[g + 1]. A group without documents of this split disappears.
    self._edges = np.append(np.asarray(edges, np.int64), len(indices))
    self._edges = np.unique(self._edges)
    self._epoch = lru_cache(maxsize=2)(self._shuffle_groups)
    self._table = lru_cache(maxsize=4)(lambda seed, size: np.random.default_rng(seed).permutation(size))

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> int:
    epoch, position = divmod(int(index), len(self._indices))
    if self._seed is None:
      return self._indices[position]
    permutation, stops = self._epoch(epoch)
    # `stops` are the ends of the groups in this epoch's order: find the group at this position, then the place inside it.
    place = int(np.searchsorted(stops, position, side="right"))
    group = int(permutation[place])
    start, end = int(self._edges[group]), int(self._edges[group + 1])
    inside = position - (int(stops[place]) - (end - start))
    return self._indices[start + self._shuffled(inside, end - start, epoch, group)]

  def _shuffled(self, position: int, size: int, epoch: int, group: int) -> int:
    """Returns the entry at ``position`` of the permutation of ``size`` documents for (seed, epoch, group)."""
    seed = seed_for(self._seed or 0, epoch, group)
    if size <= TABLE_UP_TO:
      return int(self._table(seed, size)[position])
    return shuffled_index(position, size, seed)

  def _shuffle_groups(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order of the groups in one epoch, and the position where each of them ends."""
    lengths = np.diff(self._edges)
    permutation = np.random.default_rng(seed_for(self._seed or 0, epoch)).permutation(len(lengths))
    return permutation, np.cumsum(lengths[permutation])


def shuffled_index(position: int, size: int, seed: int) -> int:
  """Returns the element at ``position`` of the permutation of ``range(size)`` that belongs to ``seed``, without a table.

  The method is cycle walking (Black and Rogaway 2002): four rounds of the SIMON cipher (Beaulieu et al. 2013) permute the
  numbers of an even count of bits, 16 or more, and a result that is not below ``size`` is encrypted again.

  A run stores only its position, so the result must never change. It equals ``grain.experimental.index_shuffle`` with
  ``max_index=size - 1, rounds=4``, which ordered the documents before, except for the sizes 4**k + 1: there grain's function
  returns one element twice and never returns the last one.

  Args:
    position: 0 <= position < size.
    size: number of elements.
    seed: 32 bits.
  """
  half = max(8, -(-(size - 1).bit_length() // 2))  # bits of each half of a number
  mask = (1 << half) - 1
  keys = _round_keys(seed)

  def mixed(word: int) -> int:
    """SIMON's round function, of rotations by 1, 8 and 2 bits."""
    return ((word << 1 | word >> half - 1) & (word << 8 | word >> half - 8) ^ (word << 2 | word >> half - 2)) & mask

  while True:
    left, right = position >> half, position & mask
    for odd, even in (keys[:2], keys[2:]):
      left ^= mixed(right) ^ odd & mask
      right ^= mixed(left) ^ even & mask
    position = left << half | right
    if position < size:
      return position


@lru_cache(maxsize=16)
def _round_keys(seed: int) -> tuple[int, int, int, int]:
  """Returns the four numbers of 32 bits that C++'s ``std::seed_seq`` generates from one seed ([rand.util.seedseq])."""
  state = [0x8B8B8B8B] * 4
  for step in range(8):
    at, ahead, after, behind = (i % 4 for i in (step, step + 1, step + 2, step - 1))
    if step < 4:  # multiply and add; the seed enters in step 1, and its length, 1, in step 0
      mixed = state[at] ^ state[ahead] ^ state[behind]
      mixed = (mixed ^ mixed >> 27) * 1664525 & UINT32
      moved = mixed + (1 if step == 0 else at + seed if step == 1 else at) & UINT32
      state[ahead], state[after] = state[ahead] + mixed & UINT32, state[after] + moved & UINT32
    else:  # multiply and exclusive-or
      mixed = state[at] + state[ahead] + state[behind] & UINT32
      mixed = (mixed ^ mixed >> 27) * 1566083941 & UINT32
      moved = mixed - at & UINT32
      state[ahead], state[after] = state[ahead] ^ mixed, state[after] ^ moved
    state[at] = moved
  first, second, third, fourth = state
  return first, second, third, fourth
