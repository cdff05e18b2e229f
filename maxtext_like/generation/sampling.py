"""Draws a token from logits: penalties, temperature, top-k, top-p and min-p, in float32.

``categorical`` over NaN returns an ordinary index, so ``draw`` also reports whether the logits are finite.

B rows, V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.errors import UserError
from maxtext_like.layers.threshold import count, largest, rank

Values = dict[str, Any]

_DIGIT = 2
"""Bits of a threshold that one pass over the logits finds. More bits read each row from the cache of the chip more often."""
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest float32 that XLA does not round to 0."""
_HOTTEST = 1e37
"""Largest temperature. XLA rounds the reciprocal of a larger one to 0, and -inf * 0 is NaN."""
_LARGEST_INT = 2**31 - 1


@dataclass(frozen=True)
class Rule:
  """The parts of ``Sampling`` that are compiled into a program. Numbers are inputs of the program.

  Attributes:
    greedy: take the most likely token.
    top_k, top_p, min_p: the filter is used.
    bias: biases of logits are used.
    penalties: a penalty of earlier tokens is used, so the tokens of each row are counted.
    vocabulary: as in ``Sampling``.
    logprobs: report log-probabilities.
  """

  greedy: bool = False
  top_k: bool = False
  top_p: bool = False
  min_p: bool = False
  bias: bool = False
  penalties: bool = False
  vocabulary: int = 0
  logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampling:
  """How a token is drawn. The fields are applied in this order: bias, penalties, temperature, top-k, top-p, min-p.

  Attributes:
    logit_bias: numbers added to the logits, by token id; a token with -inf is never drawn.
    repetition_penalty: logits of tokens of the prompt and the answer so far are divided by this if they are positive, and
      multiplied if negative (Keskar et al. 2019); 1 changes nothing.
    presence_penalty: subtracted from the logits of tokens that the answer contains; 0 changes nothing.
    frequency_penalty: subtracted from the logits of tokens of the answer as often as they occur in it; 0 changes nothing.
    min_tokens: tokens that end an answer are not drawn before it has this many tokens.
    temperature: divides the logits; 0 takes the most likely token.
    top_k: keep only the k most likely tokens; 0 keeps all.
    top_p: keep the fewest most likely tokens whose probabilities sum to at least this (Holtzman et al. 2020); 1 keeps all.
    min_p: keep tokens that are at least this likely relative to the most likely one (Nguyen et al. 2024); 0 keeps all.
    vocabulary: keep only ids below this, the size of the tokenizer's vocabulary: a table may have more rows; 0 keeps all.
    seed: seed of the draws, from 0 to 2**32 - 1, because JAX makes its keys from 32 bits.
  """

  logit_bias: Mapping[int, float] = field(default_factory=dict)
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  min_tokens: int = 0
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  vocabulary: int = 0
  seed: int = 0

  def __post_init__(self):
    for name, (fits, words) in _RANGES.items():
      value = getattr(self, name)
      if not fits(value):  # also for NaN
        default, flag = getattr(type(self), name), f"--{name.replace('_', '-')}"
        raise UserError(f"{name}={value}: must be {words}", fix=f"pass {name}={default}, the default ({flag} {default})")
    for token, bias in self.logit_bias.items():
      if not (token >= 0 and bias < np.inf):
        raise UserError(f"logit_bias has {token}: {bias}", fix="use token ids of the vocabulary, and numbers below infinity")
    if not 0 <= self.seed < 2**32:
      raise UserError(f"seed={self.seed}\n  why: a seed has 32 bits\n  fix: choose a seed from 0 to {2**32 - 1}")

  def rule(self, *, logprobs: bool = False) -> Rule:
    """Return the compiled part."""
    greedy = self.temperature == 0
    penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
    return Rule(
      greedy=greedy,
      top_k=self.top_k > 0 and not greedy,
      top_p=self.top_p < 1 and not greedy,
      min_p=self.min_p > 0 and not greedy,
      bias=bool(self.logit_bias),
      penalties=penalties,
      vocabulary=self.vocabulary,
      logprobs=logprobs,
    )

  def values(self, vocab_size: int, stop: Collection[int] = ()) -> Values:
    """Return the numbers that a program reads.

    A number that float32 cannot represent becomes the nearest one that it can: temperature=1e-50 draws as the smallest
    temperature does, the most likely token.

    Args:
      vocab_size: V.
      stop: tokens that end an answer.

    Raises:
      UserError: a bias belongs to a token outside the vocabulary, or no token can be drawn.
    """
    limited = lambda value: np.float32(min(max(value, -_LARGEST), _LARGEST))
    values: Values = {name: limited(max(getattr(self, name), _SMALLEST)) for name in ("top_p", "min_p", "repetition_penalty")}
    values["temperature"] = limited(min(max(self.temperature, _SMALLEST), _HOTTEST))
    values |= {name: limited(getattr(self, name)) for name in ("presence_penalty", "frequency_penalty")}
    values |= {name: np.int32(min(getattr(self, name), _LARGEST_INT)) for name in ("top_k", "min_tokens")}
    drawn = np.ones(min(vocab_size, self.vocabulary or vocab_size), bool)
    if self.logit_bias:
      bias = np.zeros(vocab_size, np.float32)
      for token, number in self.logit_bias.items():
        if token >= vocab_size:
          raise UserError(
            f"logit_bias has the token {token}: the vocabulary has ids 0 to {vocab_size - 1}", fix="remove the token"
          )
        bias[token] = -np.inf if number == -np.inf else limited(number)
      values["bias"] = bias
      drawn &= bias[: len(drawn)] > -np.inf
    if self.min_tokens:
      drawn[[token for token in stop if token < len(drawn)]] = False
    if not drawn.any():
      raise UserError(
        "logit_bias and min_tokens leave no token that can be drawn", fix="allow one token: raise its logit_bias above -inf"
      )
    return values


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
  "repetition_penalty": (lambda x: 0 < x < np.inf, "above 0"),
  "presence_penalty": (lambda x: -np.inf < x < np.inf, "a finite number"),
  "frequency_penalty": (lambda x: -np.inf < x < np.inf, "a finite number"),
  "min_tokens": (lambda x: x >= 0, "0 or more"),
  "temperature": (lambda x: 0 <= x < np.inf, "a finite number of at least 0; 0 takes the most likely token"),
  "top_k": (lambda x: x >= 0, "a finite number of at least 0; 0 keeps all tokens"),
  "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1; 1 keeps all tokens"),
  "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1; 0 keeps all tokens"),
}
"""The numbers that each field accepts, and the words for them."""


def allowed_tokens(logits_BV: jax.Array, rule: Rule, values: Values) -> jax.Array:
  """Return which tokens may be drawn, bool [B, V]. The most likely token is always included, and so are ties at a cut.

  Args:
    logits_BV: float32, divided by the temperature; -inf for tokens that are not drawn.
    rule, values: of ``Sampling``.
  """
  keep = logits_BV > -jnp.inf
  if rule.top_k:
    ranks = rank(logits_BV)
    k = jnp.minimum(values["top_k"], logits_BV.shape[-1])
    keep &= ranks >= largest(lambda cut: count(ranks[:, None] >= cut) >= k, 32, ranks[:, :1], digit=_DIGIT)
  if rule.top_p:
    # Applied to the tokens that top-k kept, in the same order as in Hugging Face.
    probs = jax.nn.softmax(jnp.where(keep, logits_BV, -jnp.inf), axis=-1)
    ranks = rank(probs)
    mass = lambda cut: jnp.sum(jnp.where(ranks[:, None] >= cut, probs[:, None], 0), axis=-1)
    keep &= ranks >= largest(lambda cut: mass(cut) >= values["top_p"], 32, ranks[:, :1], digit=_DIGIT)
  if rule.min_p:
    top = jnp.max(logits_BV, axis=-1, keepdims=True)
    keep &= logits_BV >= top + jnp.log(values["min_p"])
  return keep


@jax.named_scope("sampling")
def draw(
  logits_BV: jax.Array,
  keys_B: jax.Array,
  rule: Rule,
  values: Values,
  *,
  barred: jax.Array | None = None,
  prompt: jax.Array | None = None,
  counts: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """Draw one token for each row.

  Args:
    logits_BV: logits of the next token.
    keys_B: a PRNG key for each row.
    rule, values: of ``Sampling``.
    barred: bool [B, V], tokens that cannot be drawn now; None: there are none.
    prompt, counts: bool and int32 [B, V], tokens of the prompt, and how often the answer so far contains each token. Required
      with ``rule.penalties``.

  Returns:
    "token", int32 [B]; "finite", bool [B]: True if all logits of the row are finite (a token from other logits has no meaning);
    and with ``rule.logprobs`` the natural logarithms of its probability, float32 [B]: "logprob" under the distribution that it
    was drawn from, "model_logprob" under softmax of the model's logits.
  """
  model = logits_BV.astype(jnp.float32)
  finite = jnp.all(jnp.isfinite(model), axis=-1)
  logits = _adjusted(model, rule, values, barred, prompt, counts)
  if rule.greedy:
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    own = jnp.zeros(token.shape, jnp.float32)  # all probability is on this token
  else:
    logits = _filtered(logits, rule, values)
    token = categorical(keys_B, logits)
    own = log_softmax_at(logits, token) if rule.logprobs else None
  found = {"token": token, "finite": finite}
  return found | {"logprob": own, "model_logprob": log_softmax_at(model, token)} if rule.logprobs else found


def log_probabilities(
  logits_BV: jax.Array,
  rule: Rule,
  values: Values,
  *,
  barred: jax.Array | None = None,
  prompt: jax.Array | None = None,
  counts: jax.Array | None = None,
) -> jax.Array:
  """Return the natural logarithms of the probabilities with which ``draw`` draws each token, float32 [B, V].

  V is ``rule.vocabulary`` if that is not 0. The arguments are those of ``draw``.
  """
  logits = _adjusted(logits_BV.astype(jnp.float32), rule, values, barred, prompt, counts)
  if rule.greedy:
    best = jnp.argmax(logits, axis=-1)[:, None] == jnp.arange(logits.shape[-1])
    return jnp.where(best, 0.0, -jnp.inf)
  return jax.nn.log_softmax(_filtered(logits, rule, values), axis=-1)


def _adjusted(logits: jax.Array, rule: Rule, values: Values, barred: Any, prompt: Any, counts: Any) -> jax.Array:
  """Apply biases and penalties, give tokens that cannot be drawn -inf, and drop ids beyond the vocabulary."""
  # Large options may overflow. Without infinities no difference and no product below is NaN.
  limited = lambda x: jnp.clip(x, -_LARGEST, _LARGEST)
  if rule.bias:
    logits = limited(logits + jnp.maximum(values["bias"], -_LARGEST))
  if rule.penalties:
    assert prompt is not None
    assert counts is not None
    penalty = values["repetition_penalty"]
    repeated = limited(jnp.where(logits > 0, logits / penalty, logits * penalty))
    logits = jnp.where(prompt | (counts > 0), repeated, logits)
    logits = limited(logits - values["presence_penalty"] * (counts > 0))
    logits = limited(logits - limited(values["frequency_penalty"] * counts))
  if rule.bias:
    logits = jnp.where(values["bias"] > -jnp.inf, logits, -jnp.inf)
  if barred is not None:
    logits = jnp.where(barred, -jnp.inf, logits)
  return logits[:, : rule.vocabulary or None]


def _filtered(logits: jax.Array, rule: Rule, values: Values) -> jax.Array:
  """Divide by the temperature, and give tokens that the filters remove -inf. The largest result of a row is 0."""
  # Relative to the largest logit, a tiny temperature gives 0 and -inf, as the limit, and not several infinities.
  top = jnp.max(logits, axis=-1, keepdims=True)
  logits = jnp.where(logits == top, 0.0, (logits - top) / values["temperature"])
  return jnp.where(allowed_tokens(logits, rule, values), logits, -jnp.inf)


def categorical(keys_B: jax.Array, logits_BV: jax.Array) -> jax.Array:
  """Draw an index of each row with probabilities in proportion to exp(logits), int32 [B].

  First a block of neighboring indices is drawn, then an index in this block, with about 2 sqrt(V) random numbers together.
  ``jax.random.categorical`` takes one for each of the V logits (0.12 of 4.4 ms of a decode step of gemma3-4b with 64 rows).

  Args:
    keys_B: a PRNG key for each row.
    logits_BV: float32, at most 0, and 0 at the most likely index; -inf for indices that are never drawn.
  """
  B, V = logits_BV.shape
  size = 2 ** math.ceil(math.log2(V) / 2)
  padded = jnp.pad(logits_BV, ((0, 0), (0, -V % size)), constant_values=-jnp.inf)
  blocks = padded.reshape(B, -1, size)
  own = jax.vmap(jax.random.split)(keys_B)
  block = jax.vmap(jax.random.categorical)(own[:, 0], jnp.log(jnp.sum(jnp.exp(blocks), axis=-1)))
  within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return (block * size + jax.vmap(jax.random.categorical)(own[:, 1], within)).astype(jnp.int32)


def log_softmax_at(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
  """Return log softmax of the logits at the tokens, [B]."""
  chosen = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
  return chosen - jax.nn.logsumexp(logits_BV, axis=-1)
