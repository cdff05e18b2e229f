"""Draws a token from logits: temperature, top-k, top-p and min-p, in float32.

``jax.random.categorical`` over NaN returns an ordinary index, so ``draw`` also reports whether the logits are finite.

B rows, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext_like.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
  """How a token is drawn.

  Attributes:
    temperature: divides the logits; 0 takes the most likely token.
    top_k: keep only the k most likely tokens; 0 keeps all.
    top_p: keep the fewest most likely tokens whose probabilities sum to at least this (Holtzman et al. 2020); 1 keeps all.
    min_p: keep tokens that are at least this likely relative to the most likely one (Nguyen et al. 2024); 0 keeps all.
    vocabulary: keep only ids below this, the size of the tokenizer's vocabulary: a table may have more rows; 0 keeps all.
    seed: seed of the draws, from 0 to 2**32 - 1, because JAX makes its keys from 32 bits.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  vocabulary: int = 0
  seed: int = 0

  def __post_init__(self):
    if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
      raise UserError(
        f"sampling has temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}, min_p {self.min_p}\n"
        "  fix: temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1"
      )
    if not 0 <= self.seed < 2**32:
      raise UserError(f"sampling has seed {self.seed}\n  why: a seed has 32 bits\n  fix: choose a seed from 0 to {2**32 - 1}")


def allowed_tokens(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
  """Returns which tokens may be drawn, bool [B, V]. The most likely token is always included, and so are ties at a cut."""
  logits = logits_BV.astype(jnp.float32) / (sampling.temperature or 1.0)
  keep = jnp.ones(logits.shape, bool)
  if 0 < sampling.top_k < logits.shape[-1]:
    keep &= logits >= jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
  if sampling.top_p < 1:
    # Applied to the tokens that top-k kept, in the same order as in Hugging Face.
    probs = jax.nn.softmax(jnp.where(keep, logits, -jnp.inf), axis=-1)
    falling = -jnp.sort(-probs, axis=-1)
    before = jnp.cumsum(falling, axis=-1) - falling
    lowest = jnp.min(jnp.where(before < sampling.top_p, falling, jnp.inf), axis=-1, keepdims=True)
    keep &= probs >= lowest
  if sampling.min_p > 0:
    top = jnp.max(logits, axis=-1, keepdims=True)
    keep &= logits >= top + jnp.log(sampling.min_p)
  return keep


def draw(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
  """Draws one token for each row.

  Args:
    logits_BV: logits of the next token.
    keys_B: a PRNG key for each row.
    sampling: how to draw.

  Returns:
    The tokens, int32 [B], and bool [B]: True if all logits of the row are finite. A token from other logits has no meaning.
  """
  logits = logits_BV.astype(jnp.float32)
  finite = jnp.all(jnp.isfinite(logits), axis=-1)
  logits = logits[:, : sampling.vocabulary or None]
  if sampling.temperature == 0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), finite
  allowed = jnp.where(allowed_tokens(logits, sampling), logits / sampling.temperature, -jnp.inf)
  return jax.vmap(jax.random.categorical)(keys_B, allowed).astype(jnp.int32), finite
