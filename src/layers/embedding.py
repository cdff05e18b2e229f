"""Token embedding and the output head.

B batch, T position, D model, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.param import Param, normal
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.weight import lookup, product


@dataclass(frozen=True, kw_only=True)
class Lookup:
  """The table row of each token, for the embedding and the per-layer embedding.

  Attributes:
    vocab_size: number of tokens of the model.
    per_layer_rows: rows of the per-layer table, which may have fewer; None if there is no such table.
    placeholders: tokens that represent images, video and sound; they are looked up as ``padding`` (Gemma 4).
    padding: id of the padding token.
  """

  vocab_size: int
  per_layer_rows: int | None = None
  placeholders: tuple[int, ...] = ()
  padding: int = 0

  @property
  def rows(self) -> int:
    """Number of rows that every table has."""
    return min(self.vocab_size, self.per_layer_rows or self.vocab_size)

  def __call__(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the rows int32 [B, T], and bool [B, T]: which tokens are placeholders (None: no token can be one)."""
    if not self.placeholders:
      return tokens_BT, None
    # Look up padding instead of placeholders.
    placeholder_BT = jnp.any(tokens_BT[..., None] == jnp.asarray(self.placeholders, jnp.result_type(tokens_BT)), axis=-1)
    return jnp.where(placeholder_BT, self.padding, tokens_BT), placeholder_BT

  def missing(self, tokens: np.ndarray) -> np.ndarray:
    """Return bool in the shape of tokens: which of them lack a row in some table. On a device these ids would be clamped."""
    return ((tokens < 0) | (tokens >= self.rows)) & ~np.isin(tokens, self.placeholders)

  def why_missing(self, token: int) -> str:
    """Return the reason, for an error message, why a token of ``missing`` has no row."""
    if 0 <= token < self.vocab_size:
      return f"the per-layer embedding has rows for ids 0 to {self.rows - 1} (vocab_size_per_layer_input)"
    return f"the vocabulary has ids 0 to {self.vocab_size - 1}"


def constant(rows: jax.Array, placeholder_BT: jax.Array | None) -> jax.Array:
  """Return rows [B, T, ...] that send no gradient to the table at placeholders, as ``padding_idx`` of
  ``torch.nn.Embedding``."""
  if placeholder_BT is None:
    return rows
  # The values stay the same; only the gradient at placeholders is dropped.
  return jnp.where(placeholder_BT.reshape(*placeholder_BT.shape, *(1,) * (rows.ndim - 2)), jax.lax.stop_gradient(rows), rows)


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
  """Sizes and initial values of the embedding.

  Attributes:
    vocab_size, emb_dim: V and D.
    scale_by_sqrt_dim: multiply rows by sqrt(D) (Gemma).
    initial_stddev: standard deviation of the table's elements before training. None means D ** -0.5, which gives the logits
      of a tied head a standard deviation of 1.
  """

  vocab_size: int
  emb_dim: int
  scale_by_sqrt_dim: bool = False
  initial_stddev: float | None = None


@dataclass(frozen=True)
class Embedding:
  """Looks up rows of a table. The tied output head multiplies by the same table."""

  cfg: EmbeddingConfig
  precision: Precision

  def params(self) -> dict:
    c = self.cfg
    shape = (c.vocab_size, c.emb_dim)
    # A tied head multiplies by this table, so its scale decides the scale of the first logits.
    init = normal(c.emb_dim**-0.5 if c.initial_stddev is None else c.initial_stddev)
    return {"table": Param(shape, ("vocab", "embed"), self.precision.weight_dtype, init, contracts=(1,))}

  @jax.named_scope("embedding")
  def __call__(self, p: dict, tokens_BT: jax.Array, placeholder_BT: jax.Array | None = None) -> jax.Array:
    """Embed tokens.

    Args:
      p: parameters.
      tokens_BT: int32, each below V. JAX clamps larger ids without an error; ``Lookup.missing`` checks them on the host.
      placeholder_BT: placeholders, see ``constant``.

    Returns:
      [B, T, D] in the residual dtype.
    """
    rows = constant(lookup(self.precision, p["table"], tokens_BT), placeholder_BT).astype(self.precision.residual)
    if self.cfg.scale_by_sqrt_dim:
      # Gemma was trained with sqrt(D) rounded to the dtype of activations: 73.5 in bfloat16 for D = 5376.
      rows = rows * jnp.asarray(self.cfg.emb_dim**0.5, self.precision.dtype).astype(rows.dtype)
    return rows

  def attend(self, p: dict, x_BTD: jax.Array) -> jax.Array:
    """Compute logits [B, T, V] with the embedding table."""
    return output_product(self.precision, "BTD,VD->BTV", x_BTD, p["table"])


@dataclass(frozen=True)
class Head:
  """The output head of a model whose embedding is not tied."""

  cfg: EmbeddingConfig
  precision: Precision

  def params(self) -> dict:
    c = self.cfg
    # The kernel is stored input-major, unlike the table of a tied head.
    return {"kernel": Param((c.emb_dim, c.vocab_size), ("embed", "vocab"), self.precision.weight_dtype)}

  def __call__(self, p: dict, x_BTD: jax.Array) -> jax.Array:
    """Compute logits [B, T, V]."""
    return output_product(self.precision, "BTD,DV->BTV", x_BTD, p["kernel"])


@jax.named_scope("logits")
def output_product(precision: Precision, spec: str, x: jax.Array, w: Any) -> jax.Array:
  """Compute the last product: float32 operands with ``logits_dot_in_fp32``, a float32 result with ``cast_logits_to_fp32``."""
  # The operands and the result have separate keys.
  operands = precision.for_logits
  out = "float32" if operands.dtype == "float32" else precision.logits_dtype
  return product(operands, spec, x, w, out=out).astype(precision.logits_dtype)
