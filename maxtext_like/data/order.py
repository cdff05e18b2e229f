"""Which document comes when: the held-out split, and the shuffle of each epoch."""

import hashlib
import sys
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

TABLE_UP_TO = 2**16  # index_shuffle needs no memory, but walks a 16-bit cycle: 2.7 us for a million, 8 ms for two

Split = str  # "train" or "eval"


class Share(Sequence[int]):
  """The documents of one split, ascending, without a list of them.

  Document i is held out when floor((i + 1) f) > floor(i f): spread evenly, floor(documents * f) in all. The rule
  depends on i alone, so documents appended later move none, and the two splits are disjoint by construction.
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
    """How many of them are below a document."""
    if self._held_out:
      return document * self._share // self._of
    return -(-document * self._share // self._of)


def seed_for(*parts: int | str) -> int:
  """A 32-bit seed; nearby parts (seed 0 epoch 1, seed 1 epoch 0) give unrelated ones."""
  text = "/".join(str(part) for part in parts)
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class Order:
  """A sequence of document numbers: position -> document.

  For training it is so many passes, or does not end: epoch after epoch, each with its own permutation when `shuffle_seed` is
  given. For evaluation it is the split, once, in order. When the documents come in `groups` that are cheap to read together
  (parquet row groups), the groups are permuted and the documents inside each, so that reading jumps between groups as rarely
  as possible.
  """

  def __init__(
    self,
    indices: Share,
    *,
    shuffle_seed: int | None,
    passes: int | None,
    groups: Sequence[int] | None = None,
  ):
    """`indices`: documents of the split. `passes`: over them; None: without an end.

    `groups`: first document of each group, ascending, beginning with 0.
    """
    self._indices = indices
    self._seed = shuffle_seed
    self._length = sys.maxsize if passes is None else passes * len(indices)
    edges = [0] if groups is None else [indices.before(group) for group in groups]
    self._edges = np.append(np.asarray(edges, np.int64), len(indices))  # group g: positions edges[g] to edges[g + 1]
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
    place = int(np.searchsorted(stops, position, side="right"))
    group = int(permutation[place])
    start, end = int(self._edges[group]), int(self._edges[group + 1])
    inside = position - (int(stops[place]) - (end - start))
    return self._indices[start + self._shuffled(inside, end - start, epoch, group)]

  def _shuffled(self, position: int, size: int, epoch: int, group: int) -> int:
    """Where the permutation of `size` documents that belongs to (seed, epoch, group) sends `position`."""
    seed = seed_for(self._seed or 0, epoch, group)
    if size <= TABLE_UP_TO:
      return int(self._table(seed, size)[position])
    from grain.experimental import index_shuffle

    return index_shuffle(position, max_index=size - 1, seed=seed, rounds=4)

  def _shuffle_groups(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of the groups in one epoch, and where each ends in it."""
    lengths = np.diff(self._edges)
    permutation = np.random.default_rng(seed_for(self._seed or 0, epoch)).permutation(len(lengths))
    return permutation, np.cumsum(lengths[permutation])
