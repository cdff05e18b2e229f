"""Perplexity of a long text by windows that overlap, as in the documentation of transformers ("Perplexity of fixed-length
models").

The first window counts all its tokens except the first one. Each later window begins ``stride`` tokens after the one before it
and counts only the tokens that are new. The recipe averages the mean losses of the windows, each with the number of its new
tokens minus one as weight. A window that overlaps the one before it has one more scored token than this weight says, so the
average over tokens differs slightly; both are returned.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from maxtext_like import atomic
from maxtext_like.errors import UserError
from maxtext_like.evaluation.scoring import Scorer


class Window(NamedTuple):
  """A part of a text.

  Attributes:
    begin: first token.
    scored: first token that counts.
    end: token after the last one.
    weight: weight of its mean loss in the recipe's average.
  """

  begin: int
  scored: int
  end: int
  weight: int


@dataclass(frozen=True)
class Perplexity:
  """Perplexity of a text.

  Attributes:
    perplexity: exponential of the recipe's average, which weights each window by its new tokens minus one.
    token_perplexity: exponential of the average over all scored tokens.
    loss: logarithm of ``perplexity``.
    tokens: tokens of the text, including the beginning-of-text token if the tokenizer has one.
    scored: scored tokens.
    windows: number of windows.
    max_length: tokens of a window.
    stride: tokens between the beginnings of two windows.
    clamped: values that float16 clamped; None without float16.
  """

  perplexity: float
  token_perplexity: float
  loss: float
  tokens: int
  scored: int
  windows: int
  max_length: int
  stride: int
  clamped: int | None = None

  def __str__(self) -> str:
    return (
      f"perplexity {self.perplexity:.4f} (loss {self.loss:.6f}); over tokens {self.token_perplexity:.4f}\n"
      f"{self.tokens:,} tokens, {self.scored:,} of them scored, in {self.windows:,} windows of {self.max_length} with stride "
      f"{self.stride}"
    )

  def write(self, path: Path) -> None:
    """Write the numbers as JSON. Raises UserError if the file cannot be written."""
    try:
      atomic.write_text(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
    except OSError as error:
      raise UserError(f"{path}: cannot be written: {error.strerror}", fix="choose another output file") from None


def windows(tokens: int, max_length: int, stride: int) -> list[Window]:
  """Return the windows of a text of this many tokens.

  Raises:
    UserError: the sizes are impossible, or the text has fewer than two tokens.
  """
  if max_length < 2:
    raise UserError(f"max_length is {max_length}\n  why: a window needs a token and a token before it\n  fix: pass at least 2")
  if not 1 <= stride <= max_length:
    raise UserError(
      f"stride is {stride} with max_length {max_length}\n  why: with a larger stride, tokens between two windows would be left "
      f"out\n  fix: choose a stride from 1 to {max_length}"
    )
  if tokens < 2:
    raise UserError(f"the text has {tokens} tokens\n  why: the first token is not scored\n  fix: pass a longer text")
  found, previous_end = [], 0
  for begin in range(0, tokens, stride):
    end = min(begin + max_length, tokens)
    found.append(Window(begin, max(previous_end, begin + 1), end, end - previous_end - 1))
    previous_end = end
    if end == tokens:
      break
  return found


def measure(scorer: Scorer, params: Any, tokens: Sequence[int], *, stride: int) -> Perplexity:
  """Compute the perplexity of a text with windows of ``scorer.max_length`` tokens.

  Raises:
    UserError: see ``windows``, and a token has no embedding.
    NonFiniteError: the logits are not finite.
  """
  parts = [part for part in windows(len(tokens), scorer.max_length, stride) if part.scored < part.end]
  scores = scorer(params, [(tokens[part.begin : part.scored], tokens[part.scored : part.end]) for part in parts])
  # Sums of the negative log-probabilities, and of the windows' means with the recipe's weights.
  total = -math.fsum(score.log_probability for score in scores)
  counted = sum(part.end - part.scored for part in parts)
  weighted = math.fsum(
    -score.log_probability / (part.end - part.scored) * part.weight for part, score in zip(parts, scores, strict=True)
  )
  loss = weighted / sum(part.weight for part in parts)
  exp = lambda x: math.exp(x) if x < 700 else math.inf
  return Perplexity(
    exp(loss), exp(total / counted), loss, len(tokens), counted, len(parts), scorer.max_length, stride, scorer.clamped
  )
