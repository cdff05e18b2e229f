"""Log-probabilities of token sequences, in batches of few shapes. Tasks and perplexity are computed from them.

B rows, T positions, D model, V vocabulary, K last tokens that share the tokens before them, C positions of a chunk.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.errors import UserError
from maxtext_like.generation.slots import not_finite
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.partition import on_every_device
from maxtext_like.models.model import Model
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.targets import IGNORED
from maxtext_like.training.objectives.language_modeling import automatic_chunks, token_losses

SHORTEST = 32  # positions of the shortest compiled row
# Positions of one batch, unless the number of rows is set.
BATCH_TOKENS = 8192
# Continuations of one row that differ only in their last token, as the letters of a multiple choice.
LAST_TOKENS = 8

Tokens = Sequence[int]


class Score(NamedTuple):
  """The result for one continuation.

  Attributes:
    log_probability: sum over its tokens, natural logarithm.
    greedy: True if every token is the most likely one at its position.
  """

  log_probability: float
  greedy: bool


def padded_length(length: int, divisor: int = 1) -> int:
  """Return the number of positions that a row is padded to: 32, 48, 64, 96, 128, ..., rounded up to a multiple of ``divisor``.

  A row is padded by at most half of its length, and rows of up to 8192 tokens have 17 shapes.
  """
  size = SHORTEST
  while size < length:
    size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
  return -(-size // divisor) * divisor


class Scorer:
  """Computes log-probabilities of continuations.

  The shape in which a row is computed follows from its length alone, and rows of a batch do not depend on each other. The score
  of a row is therefore the same whatever else is in its batch.

  Attributes:
    max_length: positions of the longest row. Longer rows lose their first tokens, as in the harness.
    clamped: number of values that overflowed in float16 and were clamped, over all rows and their padding.
  """

  def __init__(
    self,
    model: Model,
    decoder: Decoder,
    *,
    max_length: int,
    batch_size: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    on_batch: Callable[[int, int], None] | None = None,
  ):
    """Prepares a scorer; nothing is compiled yet.

    Args:
      model: has the mesh of the weights.
      decoder: the decoder that is run, with kernels for complete rows.
      max_length: see the attribute.
      batch_size: rows of a batch, rounded up to what the mesh divides; None: as many as have
        ``batch_tokens`` positions together, at least one.
      batch_tokens: see ``batch_size``.
      on_batch: called before every batch with the numbers of finished rows and of all rows.
    """
    self._model, self._decoder = model, decoder
    self._batch_size, self._batch_tokens, self._on_batch = batch_size, batch_tokens, on_batch
    self.max_length, self.clamped = max_length, 0

  def __call__(self, params: Any, requests: Sequence[tuple[Tokens, Tokens]]) -> list[Score]:
    """Score continuations.

    Args:
      params: weights of the decoder, on the model's mesh.
      requests: (context, continuation), neither of them empty. Only tokens of the continuation are scored.

    Returns:
      Scores in the order of the requests.

    Raises:
      UserError: a continuation is longer than ``max_length``, or the model has no embedding for a token.
      NonFiniteError: the logits of a scored token are not finite.
    """
    # Requests whose inputs are equal share a row: they differ only in the last token, which is not an input.
    shared: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
      if len(continuation) > self.max_length:
        raise UserError(
          f"request {index}: the continuation has {len(continuation)} tokens, more than max_length = {self.max_length}\n"
          "  fix: increase max_length"
        )
      assert len(context), "an empty context"
      assert len(continuation), "an empty continuation"
      inputs = (*context, *continuation)[-(self.max_length + 1) : -1]
      shared.setdefault(tuple(map(int, inputs)), []).append(index)
    self._require_embeddings(shared)
    rows = [
      (inputs, indices[at : at + LAST_TOKENS])
      for inputs, indices in shared.items()
      for at in range(0, len(indices), LAST_TOKENS)
    ]
    by_length: dict[int, list[tuple[tuple[int, ...], list[int]]]] = {}
    for row in rows:
      by_length.setdefault(padded_length(len(row[0]), self._model.ways("sequence")), []).append(row)
    # The longest rows first: a batch that does not fit in memory fails at once.
    scores: list[Score | None] = [None] * len(requests)
    finished = 0
    for length in sorted(by_length, reverse=True):
      size = self.rows_of(length)
      for at in range(0, len(by_length[length]), size):
        if self._on_batch is not None:
          self._on_batch(finished, len(rows))
        batch = by_length[length][at : at + size]
        self._score(params, batch, requests, (size, length), scores)
        finished += len(batch)
    return [score for score in scores if score is not None]

  def rows_of(self, length: int) -> int:
    """Return the number of rows of a batch of this padded length."""
    rows, ways = self._batch_size or max(1, self._batch_tokens // length), self._model.ways("batch")
    return -(-rows // ways) * ways

  def _require_embeddings(self, rows: dict[tuple[int, ...], list[int]]) -> None:
    lookup = self._decoder.cfg.lookup
    for inputs, indices in rows.items():
      missing = lookup.missing(np.asarray(inputs, np.int64))
      if missing.any():
        token = inputs[int(missing.argmax())]
        raise UserError(f"request {indices[0]}: token id {token}: {lookup.why_missing(token)}\n  fix: remove it from the text")

  def _score(self, params, batch, requests, shape: tuple[int, int], scores: list[Score | None]) -> None:
    """Fill in the scores of the requests of one batch."""
    B, T = shape
    tokens, lengths = np.zeros((B, T), np.int32), np.ones(B, np.int32)
    last = np.zeros((B, LAST_TOKENS), np.int32)
    for b, (inputs, indices) in enumerate(batch):
      tokens[b, : len(inputs)], lengths[b] = inputs, len(inputs)
      last[b, : len(indices)] = [int(requests[index][1][-1]) for index in indices]
    model = self._model
    vocabulary = -(-model.config.model.vocab_size // model.ways("vocab"))
    chunks = automatic_chunks(B // model.ways("batch"), T, vocabulary)
    with use_mesh(model.mesh):
      found = _log_probabilities(self._decoder, chunks, params, tokens, lengths, last)
    log_probs, greedy, last_log_probs, best, finite, clamped = map(np.asarray, found)
    self.clamped += int(clamped)
    for b, (inputs, indices) in enumerate(batch):
      for k, index in enumerate(indices):
        continuation = requests[index][1]
        # The inputs end before the last token of the continuation, and position t predicts token t + 1.
        scored = slice(len(inputs) - len(continuation), len(inputs) - 1)
        total = float(np.sum(log_probs[b, scored], dtype=np.float64)) + float(last_log_probs[b, k])
        if not (finite[b, scored].all() and finite[b, len(inputs) - 1]):
          raise not_finite(f"request {index}", self._decoder)
        scores[index] = Score(total, bool(greedy[b, scored].all() and best[b] == continuation[-1]))


@partial(jax.jit, static_argnums=(0, 1))
def _log_probabilities(decoder: Decoder, chunks: int, params, tokens_BT, lengths_B, last_BK):
  """Return log-probabilities, in float32, and what is needed to judge them.

  Args:
    decoder: the model.
    chunks: number of chunks of the positions whose logits are computed one after the other.
    params: its parameters.
    tokens_BT: rows, padded at the end.
    lengths_B: number of tokens of each row.
    last_BK: tokens that may follow a row.

  Returns:
    [B, T]: log-probability of the next token of the row; [B, T]: True if it is the most likely token; [B, K]: log-probabilities
    of ``last_BK``; [B]: most likely token after the row; [B, T]: True if the logits are finite; the number of clamped values.
    Values at padding, and of the first three at the last token of a row, have no meaning.
  """
  x_BTD, aux = decoder.hidden(params, {"tokens": tokens_BT})
  B, T = tokens_BT.shape
  targets_BT = jnp.roll(tokens_BT, -1, axis=1)
  size = -(-T // chunks)

  def cut(x, fill):  # [B, T, ...] to [chunks, B, C, ...]
    x = jnp.pad(x, [(0, 0), (0, size * chunks - T), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
    return jnp.moveaxis(x.reshape(B, chunks, size, *x.shape[2:]), 1, 0)

  def joined(x):
    return jnp.moveaxis(x, 0, 1).reshape(B, size * chunks, *x.shape[3:])[:, :T]

  def chunk(xs):
    x_BCD, targets_BC = xs
    logits = decoder.head(params, x_BCD).astype(jnp.float32)
    losses, _ = token_losses(logits, targets_BC, 0.0)
    return -losses, jnp.argmax(logits, axis=-1) == targets_BC, jnp.all(jnp.isfinite(logits), axis=-1)

  log_probs, greedy, finite = map(joined, jax.lax.map(chunk, (cut(x_BTD, 0), cut(targets_BT, IGNORED))))
  x_B1D = jnp.take_along_axis(x_BTD, lengths_B[:, None, None] - 1, axis=1)
  logits_BV = decoder.head(params, x_B1D)[:, 0].astype(jnp.float32)
  last = jax.nn.log_softmax(logits_BV, axis=-1)
  last = jnp.take_along_axis(last, last_BK, axis=1)
  best = jnp.argmax(logits_BV, axis=-1)
  return tuple(map(on_every_device, (log_probs, greedy, last, best, finite, aux["clamped"])))
