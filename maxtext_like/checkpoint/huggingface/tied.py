"""Whether a checkpoint's output head is its embedding table: config.json says so, and its tensors may say otherwise.

transformers 5 does the same: a file that holds both, and they differ, has a head of its own, whatever config.json says; of a
file that holds one of them, that one is both.
"""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from maxtext_like.checkpoint.huggingface.shards import INDEX, SINGLE, Shards

HEAD = "lm_head.weight"  # with the vision tower, all that stands outside the text model's prefix
EMBEDDING = "embed_tokens.weight"
# Files, and transformers by version, put the text model below different prefixes.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_HEAD_PREFIXES = ("", "language_model.", "model.language_model.", "model.")
_CHUNK_BYTES = 16 << 20  # of a tensor that are compared at a time


def find_head(names: Collection[str]) -> str | None:
  """The head's tensor among the names of a file, if it is there."""
  return next((prefix + HEAD for prefix in _HEAD_PREFIXES if prefix + HEAD in names), None)


def prefixes_with(name: str, names: Collection[str]) -> list[str]:
  """The prefixes under which a tensor of the text model is among the names of a file."""
  return [prefix for prefix in PREFIXES if prefix + name in names]


def other_head(directory: Path, block: tuple[int, int]) -> str | None:
  """The name of a head that differs from the embedding beside it; None where they are one, or one of them is not there.

  Args:
    directory: of a checkpoint; without tensors there is nothing to compare.
    block: rows and columns that share a float8 scale.

  Raises:
    UserError: malformed files.
  """
  if not any((directory / name).exists() for name in (SINGLE, INDEX)):
    return None
  shards = Shards(directory)
  shards.block = block
  names = set(shards.weights())
  head, prefixes = find_head(names), prefixes_with(EMBEDDING, names)
  if head is None or len(prefixes) != 1:
    return None
  tables = [shards.weight(name) for name in (head, prefixes[0] + EMBEDDING)]
  same = _same(*tables)
  del tables
  shards.release()
  return None if same else head


def _same(a: np.ndarray, b: np.ndarray) -> bool:
  """Whether two tables hold the same numbers, in whatever dtypes; read no further than their first difference."""
  if a.shape != b.shape:
    return False
  rows = max(1, _CHUNK_BYTES * len(a) // max(a.nbytes, 1))
  chunks = (tuple(x[i : i + rows].astype(np.float32) for x in (a, b)) for i in range(0, len(a), rows))
  return all(np.array_equal(*pair, equal_nan=True) for pair in chunks)  # NaN in both is one table that is damaged
