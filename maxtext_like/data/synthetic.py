"""Full rows of random tokens from the seed: the input of benchmarks, without files or a tokenizer."""

from typing import Any

import numpy as np

from maxtext_like.data.pack import Row


class SyntheticRows:
  """Row r has tokens [T] drawn uniformly from [0, vocab_size) with the key (seed, split, r), and one segment."""

  def __init__(
    self,
    length: int,
    vocab_size: int,
    seed: int,
    *,
    split: str = "train",
    avoid: int | None = None,
  ):
    """Sets up the generator. ``avoid`` is a token that is never drawn: the image token, because there are no images."""
    self._avoid = avoid
    self._length, self._vocab_size = length, vocab_size
    self._key = (seed, int(split == "eval"))
    self._row = 0

  def __next__(self) -> Row:
    generator = np.random.default_rng((*self._key, self._row))
    tokens = generator.integers(0, self._vocab_size, self._length, dtype=np.int32)
    if self._avoid is not None:
      tokens[tokens == self._avoid] = (self._avoid + 1) % self._vocab_size
    self._row += 1
    row = Row.empty(self._length, pad_id=0)
    row.place(0, tokens, segment=1)
    return row

  def get_state(self) -> dict[str, Any]:
    return {"row": self._row}

  def set_state(self, state: dict[str, Any]) -> None:
    self._row = int(state["row"])

  def returned_counts(self) -> dict[str, float]:
    """Returns the counts."""
    return {**self.counts()}

  def counts(self) -> dict[str, int]:
    return {"rows": self._row}
