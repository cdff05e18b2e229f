"""The array shapes that generation compiles programs for. They are few, so that prompts of any length need few compilations.

| program | shapes |
|---|---|
| prefill | chunks of 16, 32, ..., 512 tokens (longer for a prompt with images), first or later chunk of a prompt |
| start and decode | one for each number of slots (a power of two) and capacity of the cache |

The capacity is the longest prompt plus its answer, rounded up to a multiple of 128. If that is more than 1,024 tokens, the
capacity starts smaller and doubles when a row becomes longer.
"""

from collections.abc import Sequence

CHUNKS = (16, 32, 64, 128, 256, 512)
"""Tokens of a prompt that one prefill call processes. A longer prompt takes several calls."""

MIN_ROWS = 2
"""Smallest number of rows of a product with the weights.

For a single row in bfloat16, XLA for GPUs multiplies element by element and rounds each number before it adds them. That is
less accurate and not faster. ``slots=1`` saves the memory of a second row.
"""

_PREFILL_TOKENS = 1024
"""Largest number of tokens of several prompts in one prefill call."""
_PREFILL_ROWS = 8
_MULTIPLE = 128
_GROWS_FROM = 1024


def slots_for(requests: int, largest: int) -> int:
  """Return the number of slots for some requests: a power of two from ``MIN_ROWS``, but at most ``largest``."""
  return min(max(MIN_ROWS, 1 << max(requests - 1, 0).bit_length()), largest)


def prefill_rows(chunk: int, slots: int) -> int:
  """Return the number of prompts that a prefill call takes."""
  return max(1, min(slots, _PREFILL_ROWS, _PREFILL_TOKENS // chunk))


def chunks_of(length: int, *, together: bool) -> list[int]:
  """Return the chunks that a prompt is divided into. They depend only on the prompt, and so do the results.

  Args:
    length: tokens of the prompt.
    together: the prompt has images and cannot be divided.
  """
  if together:
    return [max(CHUNKS[0], 1 << (length - 1).bit_length())]
  whole, rest = divmod(length, CHUNKS[-1])
  return [CHUNKS[-1]] * whole + ([next(size for size in CHUNKS if size >= rest)] if rest else [])


def first_capacity(lengths: Sequence[int], longest: int) -> int:
  """Return the capacity of the cache at the start.

  Args:
    lengths: tokens of the prompts.
    longest: tokens of the longest prompt with its answer.
  """
  return grown_capacity(max(lengths) + 1, longest)


def grown_capacity(needed: int, longest: int) -> int:
  """Return a capacity for rows of ``needed`` tokens, if no row can have more than ``longest``."""
  final = -(-longest // _MULTIPLE) * _MULTIPLE
  return final if final <= _GROWS_FROM else min(final, max(_GROWS_FROM, 1 << (needed - 1).bit_length()))
