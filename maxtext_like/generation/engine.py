"""Generates answers to a batch of prompts of any lengths. ``scheduler`` has the loop, ``slots`` the programs on the device.

B rows, T prompt positions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext_like.errors import UserError
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.scheduler import Request, Scheduler
from maxtext_like.generation.slots import TOKENS_PER_CALL
from maxtext_like.layers.decoder import Decoder

SLOTS = 64
"""Default of the largest number of answers that are generated at the same time."""
LONGEST = 2**30
"""Largest number of tokens of an answer; positions are int32."""


@dataclass(frozen=True)
class Prompts:
  """Token ids of a batch of prompts, and their images.

  Attributes:
    tokens: one sequence of ids for each row; none may be empty.
    token_types: same shape as ``tokens``, 1 at image tokens; None for no images.
    images: "pixel_values" and, for Gemma 4, "image_position_ids", in the order of the rows.
    names: a name of each prompt for errors; None for "prompt 0", "prompt 1", ...
  """

  tokens: Sequence[Sequence[int]]
  token_types: Sequence[Sequence[int]] | None = None
  images: dict[str, np.ndarray] | None = None
  names: Sequence[str] | None = None

  def name(self, i: int) -> str:
    """Return the name of a prompt."""
    return f"prompt {i}" if self.names is None else self.names[i]

  @classmethod
  def from_padded(
    cls,
    input_ids: np.ndarray,
    attention_mask: np.ndarray,
    token_types: np.ndarray | None = None,
    images: dict[str, np.ndarray] | None = None,
  ) -> "Prompts":
    """Makes prompts from a batch in the form of Hugging Face's tokenizers, padded on the left, on the right or on both sides.

    Args:
      input_ids: ids [B, T].
      attention_mask: [B, T], 1 for tokens and 0 for padding. Padding may surround the tokens of a row, but not divide them.
      token_types: [B, T], 1 at image tokens.
      images: see the attribute.

    Raises:
      UserError: the shapes differ, or there is padding between tokens.
    """
    mask = np.asarray(attention_mask) != 0
    shapes = {np.shape(array) for array in (input_ids, mask, token_types) if array is not None}
    if len(shapes) > 1 or mask.ndim != 2:
      raise UserError(
        f"prompts: ids, mask and types have shapes {sorted(shapes)}, expected one shape [rows, positions]",
        fix="pass arrays of one shape",
      )
    if (np.abs(np.diff(mask.astype(int), axis=1, prepend=0, append=0)).sum(axis=1) > 2).any():
      raise UserError("prompts: attention_mask has padding between the tokens of a row\n  fix: pad on the left or right")

    def rows(array: Any) -> list[list[int]]:
      return [row[kept].tolist() for row, kept in zip(np.asarray(array), mask, strict=True)]

    return cls(rows(input_ids), None if token_types is None else rows(token_types), images)


def requests_of(
  prompts: Prompts,
  *,
  max_tokens: int,
  seed: int,
  seeds: Sequence[int] | None = None,
  numbers: Sequence[int] | None = None,
  answers: int = 1,
) -> list[Request]:
  """Return a request for every prompt.

  Args:
    prompts: the prompts.
    max_tokens: largest number of tokens of an answer.
    seed: seed of all prompts, whose draws also depend on the number of the prompt.
    seeds: a seed for each prompt instead; its draws then do not depend on the number.
    numbers: numbers of the prompts; None: 0, 1, 2, ...
    answers: number of answers to each prompt.
  """
  images = _images_of(prompts)
  return [
    Request(
      tokens=tokens,
      token_types=None if prompts.token_types is None else prompts.token_types[i],
      images=images[i],
      limit=max_tokens,
      seed=seed if seeds is None else seeds[i],
      stream=(i if numbers is None else numbers[i]) * answers if seeds is None else 0,
      answers=answers,
      name=prompts.name(i),
    )
    for i, tokens in enumerate(prompts.tokens)
  ]


def _images_of(prompts: Prompts) -> list[dict[str, np.ndarray] | None]:
  """Return the images of every prompt. Each run of image tokens is one image."""
  none: list[dict[str, np.ndarray] | None] = [None] * len(prompts.tokens)
  if prompts.token_types is None or prompts.images is None:
    return none
  at = 0
  for i, types in enumerate(prompts.token_types):
    image = np.asarray(types) > 0
    count = int(np.sum(image & ~np.concatenate([[False], image[:-1]])))
    if count:
      none[i] = {name: array[at : at + count] for name, array in prompts.images.items()}
      at += count
  return none


def generate(
  decoder: Decoder,
  params: Any,
  prompts: Prompts,
  *,
  max_tokens: int,
  stop: frozenset[int],
  sampling: Sampling,
  on_clamped: Callable[[int], None] | None = None,
  slots: int = SLOTS,
  turn: int = TOKENS_PER_CALL,
) -> Iterator[list[list[int]]]:
  """Continues prompts.

  Args:
    decoder: the model.
    params: its parameters, stacked or rows apart (``Decoder.apart``).
    prompts: the prompts to continue.
    max_tokens: largest number of tokens in an answer.
    stop: ids that end an answer; they are not part of it.
    sampling: how tokens are drawn. The draws of a row depend only on the seed and the index of the row.
    on_clamped: called with the number of values that float16 clamped for some tokens.
    slots: largest number of answers that are generated at the same time, a power of two.
    turn: tokens of each answer between two results, at most ``TOKENS_PER_CALL``.

  Yields:
    New ids of each row, several at a time, until every row has stopped.

  Raises:
    UserError: an empty prompt, or a token of a prompt or an answer without a row in the model's tables.
    NonFiniteError: the logits are not finite; the message names prompt and token.
  """
  check(prompts, decoder, max_tokens)
  requests = requests_of(prompts, max_tokens=max_tokens, seed=sampling.seed)
  scheduler = Scheduler(decoder, params, requests, sampling, stop, largest=slots, turn=turn, on_clamped=on_clamped)
  for pieces in scheduler.run():
    rows: list[list[int]] = [[] for _ in prompts.tokens]
    for piece in pieces:
      rows[piece.request] += piece.tokens
    yield rows


def check(prompts: Prompts, decoder: Decoder, max_tokens: int) -> None:
  """Raises UserError for prompts that ``generate`` does not accept."""
  lookup = decoder.cfg.lookup
  # The image token is never looked up, and some tables have no row for it.
  image = decoder.cfg.image_token_id if prompts.images is not None else None
  if not 1 <= max_tokens <= LONGEST:
    raise UserError(
      f"the number of tokens to generate is {max_tokens}, but it must be from 1 to {LONGEST}",
      fix="write another number of tokens, such as 64",
    )
  for row, ids in enumerate(prompts.tokens):
    if not len(ids):
      raise UserError(
        f"{prompts.name(row)} is empty, and the tokenizer has no token for the beginning of a text", fix="write a text"
      )
    missing = lookup.missing(np.asarray(ids, np.int64))
    if bad := [i for i, wrong in zip(ids, missing, strict=True) if wrong and i != image]:
      raise UserError(
        f"{prompts.name(row)}: token id {bad[0]}: {lookup.why_missing(bad[0])}\n  fix: encode with the model's tokenizer"
      )
