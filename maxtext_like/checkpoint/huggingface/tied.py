"""Checks whether a checkpoint's output head is its embedding table. config.json and the tensors may disagree.

The rules are those of transformers 5: if a file contains both tables and they differ, the head is separate, whatever
config.json says. If it contains only one of them, that one serves as both.
"""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from maxtext_like.checkpoint.huggingface.shards import INDEX, SINGLE, Shards

HEAD = "lm_head.weight"  # with a vision tower, the only tensor outside the prefix of the text model
EMBEDDING = "embed_tokens.weight"
# The prefix of the text model differs between files and between versions of transformers.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_HEAD_PREFIXES = ("", "language_model.", "model.language_model.", "model.")
_CHUNK_BYTES = 16 << 20  # bytes of a tensor compared at a time


def find_head(names: Collection[str]) -> str | None:
  """Returns the head's name among the tensor names of a file, or None."""
  return next((prefix + HEAD for prefix in _HEAD_PREFIXES if prefix + HEAD in names), None)


def prefixes_with(name: str, names: Collection[str]) -> list[str]:
  """Returns the prefixes under which a file contains a tensor of the text model."""
  return [prefix for prefix in PREFIXES if prefix + name in names]


def other_head(directory: Path, block: tuple[int, int]) -> str | None:
  """Returns the name of a head that differs from the embedding; None if they are equal or one of them is missing.

  Args:
    directory: directory of a checkpoint. Without tensors there is nothing to compare.
    block: rows and columns that share a float8 scale.

  Raises:
    UserError: a file is malformed.
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
  """Returns True if two tables contain the same numbers, in any dtypes. Stops reading at the first difference."""
  if a.shape != b.shape:
    return False
  rows = max(1, _CHUNK_BYTES * len(a) // max(a.nbytes, 1))
  chunks = (tuple(x[i : i + rows].astype(np.float32) for x in (a, b)) for i in range(0, len(a), rows))
  return all(np.array_equal(*pair, equal_nan=True) for pair in chunks)  # NaN in both: one damaged table, not two
