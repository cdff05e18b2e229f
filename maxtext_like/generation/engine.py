"""Prefill and decoding for a batch of prompts of any lengths, with caches on the device. Tokens are returned as they are made.

B rows, T prompt positions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.generation.sampling import Sampling, draw
from maxtext_like.layers.context import Step
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.partition import on_every_device

# Prompts are padded to a multiple of this, so that prompts of similar length share a compiled program.
PROMPT_MULTIPLE = 16
# Tokens that one call of the decoding program makes. The host reads them when the call returns.
TOKENS_PER_CALL = 8


@dataclass(frozen=True)
class Prompts:
  """Token ids of a batch of prompts, and their images.

  Attributes:
    tokens: one sequence of ids for each row; none may be empty.
    token_types: same shape as ``tokens``, 1 at image tokens; None for no images.
    images: "pixel_values" and, for Gemma 4, "image_position_ids", in the order of the rows.
  """

  tokens: Sequence[Sequence[int]]
  token_types: Sequence[Sequence[int]] | None = None
  images: dict[str, np.ndarray] | None = None

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


def generate(
  decoder: Decoder,
  params: Any,
  prompts: Prompts,
  *,
  max_tokens: int,
  stop: frozenset[int],
  sampling: Sampling,
  on_clamped: Callable[[int], None] | None = None,
) -> Iterator[list[list[int]]]:
  """Continues prompts.

  Args:
    decoder: the model.
    params: its parameters.
    prompts: the prompts to continue.
    max_tokens: largest number of tokens in an answer.
    stop: ids that end an answer; they are not part of it.
    sampling: how tokens are drawn. The draws of a row depend only on the seed and the index of the row.
    on_clamped: called with the number of values that float16 clamped for the tokens that come next.

  Yields:
    New ids of each row, several at a time, until every row has stopped.

  Raises:
    UserError: an empty prompt, or a token of a prompt or an answer without a row in the model's tables.
    NonFiniteError: the logits are not finite; the message names row and token.
  """
  check(prompts, decoder, max_tokens)
  # Pad the prompts on the left, so that all rows end at the same position.
  lengths = np.array([len(row) for row in prompts.tokens])
  T = -(-int(lengths.max()) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
  B, first = len(lengths), T - lengths
  tokens = _left(prompts.tokens, T)
  batch = {"tokens": tokens, "positions": np.maximum(np.arange(T)[None] - first[:, None], 0).astype(np.int32)}
  if prompts.token_types is not None and prompts.images is not None:
    batch |= {"token_types": _left(prompts.token_types, T), **prompts.images}
  start = jnp.asarray(first, jnp.int32)
  # A constant number of tokens per call gives one compiled program; surplus tokens of the last call are dropped.
  calls = -(-max_tokens // TOKENS_PER_CALL)
  cache = decoder.empty_cache(B, T + calls * TOKENS_PER_CALL)
  stops = np.array(sorted(stop), np.int32)
  lookup = decoder.cfg.lookup
  # The seed is an input of the program, so another seed needs no new compilation.
  key, rule = jax.random.key(sampling.seed), replace(sampling, seed=0)
  state = _prefill(decoder, rule, params, batch, cache, start, stops, key)
  done = np.zeros(B, bool)
  # Decode until every row has stopped, and read the tokens on the host after each call.
  for made in range(0, max_tokens, TOKENS_PER_CALL):
    state, new, finite, clamped = _decode(decoder, rule, params, state, start, stops, key)
    new, finite = np.asarray(new), np.asarray(finite)  # [TOKENS_PER_CALL, B]
    missing = lookup.missing(new)
    if on_clamped:
      on_clamped(int(np.sum(clamped)))
    rows: list[list[int]] = [[] for _ in range(B)]
    for t in range(min(TOKENS_PER_CALL, max_tokens - made)):
      for b in np.flatnonzero(~done):
        if not finite[t, b]:
          raise NonFiniteError(
            f"row {b}, token {made + t} of the answer: the logits are not finite\n"
            "  fix: dtype=bfloat16 or dtype=float32; with float16, see the float32_* keys of the model's file"
          )
        token = int(new[t, b])
        if token in stop:
          done[b] = True
          continue
        rows[b].append(token)
        if made + t + 1 < max_tokens and missing[t, b]:
          raise UserError(
            f"row {b}, token {made + t} of the answer is {token}: {lookup.why_missing(token)}, so no token can follow it\n"
            "  fix: make it end an answer (stop_ids, --stop-id), or use a checkpoint with complete tables"
          )
    yield rows
    if done.all():
      return


def check(prompts: Prompts, decoder: Decoder, max_tokens: int) -> None:
  """Raises UserError for prompts that ``generate`` does not accept."""
  lookup = decoder.cfg.lookup
  # The image token is never looked up, and some tables have no row for it.
  image = decoder.cfg.image_token_id if prompts.images is not None else None
  if max_tokens < 1:
    raise UserError(
      f"the number of tokens to generate is {max_tokens}, but it must be 1 or more",
      fix="write a larger number of tokens, such as 64",
    )
  for row, ids in enumerate(prompts.tokens):
    if not len(ids):
      raise UserError(f"prompt {row} is empty, and the tokenizer has no token for the beginning of a text\n  fix: write a text")
    missing = lookup.missing(np.asarray(ids, np.int64))
    if bad := [i for i, wrong in zip(ids, missing, strict=True) if wrong and i != image]:
      raise UserError(
        f"prompt {row}: token id {bad[0]}: {lookup.why_missing(bad[0])}\n  fix: encode with the model's tokenizer"
      )


def _left(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
  """Pads rows with zeros on the left, int32 [B, length]."""
  out = np.zeros((len(rows), length), np.int32)
  for b, row in enumerate(rows):
    out[b, length - len(row) :] = row
  return out


def _next(decoder: Decoder, sampling: Sampling, params, x_BD, key, index, stops, done):
  """Draws the next token of every row from its last hidden state. Rows that have stopped also draw; the result is ignored."""
  logits = decoder.head(params, x_BD[:, None])[:, 0]
  rows = jnp.arange(x_BD.shape[0])
  key = jax.random.fold_in(key, index)
  token, finite = draw(logits, jax.vmap(lambda row: jax.random.fold_in(key, row))(rows), sampling)
  return token, finite, done | jnp.any(token[:, None] == stops[None], axis=-1)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _prefill(decoder: Decoder, sampling: Sampling, params, batch, cache, first, stops, key):
  """Fills the caches with the prompts, and draws the first token of the answers."""
  x_BTD, cache, clamped = decoder.extend(params, batch, cache, Step(jnp.zeros((), jnp.int32), first))
  T = batch["tokens"].shape[1]
  # Steps are counted from the end of the prompt, so the draws of a row do not depend on the padding before it.
  done = jnp.zeros(x_BTD.shape[0], bool)
  token, finite, done = _next(decoder, sampling, params, x_BTD[:, -1], key, 0, stops, done)
  at = jnp.asarray(T, jnp.int32)
  return {"cache": cache, "token": token, "finite": finite, "done": done, "at": at, "made": 1, "clamped": clamped}


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(decoder: Decoder, sampling: Sampling, params, state, first, stops, key):
  """Makes ``TOKENS_PER_CALL`` tokens. Each step returns the token that the step before it drew, and draws the next one."""

  def one(state, _):
    token, at = state["token"], state["at"]
    batch = {"tokens": token[:, None], "positions": (at - first)[:, None]}
    x_BTD, cache, clamped = decoder.extend(params, batch, state["cache"], Step(at, first))
    new, finite, done = _next(decoder, sampling, params, x_BTD[:, -1], key, state["made"], stops, state["done"])
    after = {"cache": cache, "token": new, "finite": finite, "done": done, "at": at + 1, "made": state["made"] + 1}
    return after | {"clamped": clamped}, (token, state["finite"], state["clamped"])

  state, (tokens, finite, clamped) = jax.lax.scan(one, state, length=TOKENS_PER_CALL)
  return state, *map(on_every_device, (tokens, finite, clamped))
