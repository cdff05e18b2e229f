"""Per-layer inputs (Gemma 3n, Gemma 4 E2B/E4B): a small embedding for every layer, and the gate that adds it to the stream.

B batch, T position, D model, V vocabulary, L layers, P per-layer width.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext_like.layers.context import Context
from maxtext_like.layers.embedding import constant
from maxtext_like.layers.mlp import Activation, gated
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, normal
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.weight import lookup, product


@dataclass(frozen=True, kw_only=True)
class PerLayerInputConfig:
  """Sizes: rows of the table V, layers L, width P, model D; epsilon of the norm."""

  vocab_size: int
  num_layers: int
  width: int
  emb_dim: int
  epsilon: float = 1e-6


@dataclass(frozen=True)
class PerLayerInput:
  """Computes a small input for every layer from the token and from its embedding (Gemma 3n, Gemma 4 E2B/E4B)."""

  cfg: PerLayerInputConfig
  precision: Precision

  @property
  def _norm(self) -> RMSNorm:
    return RMSNorm(NormConfig(dim=self.cfg.width, epsilon=self.cfg.epsilon), self.precision)

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    V, L, P, D = c.vocab_size, c.num_layers, c.width, c.emb_dim
    return {
      # All layers of a token are one row: separate rows of size P would not fill the memory tiles of a TPU.
      "table": Param((V, L * P), ("vocab", "per_layer"), dtype, normal(P**-0.5), contracts=(0,)),  # a lookup
      "projection": Param((D, L, P), ("embed", "layers", "per_layer"), dtype),
      "norm": self._norm.params(),
    }

  @jax.named_scope("per_layer_input")
  def __call__(self, p: dict, tokens_BT: jax.Array, x_BTD: jax.Array, placeholder_BT: jax.Array | None = None) -> jax.Array:
    """Compute the inputs of all layers.

    Args:
      p: parameters.
      tokens_BT: int32.
      x_BTD: embedded input.
      placeholder_BT: placeholders, see ``embedding.constant``.

    Returns:
      [B, T, L, P] in ``dtype``.
    """
    c, precision = self.cfg, self.precision
    # The part that depends on the token.
    rows = constant(lookup(precision, p["table"], tokens_BT), placeholder_BT)
    identity = rows.reshape(*rows.shape[:-1], c.num_layers, c.width) * jnp.asarray(c.width**0.5, precision.dtype)
    # The part that depends on the embedded input, normed in float32.
    context = product(precision, "BTD,DLP->BTLP", x_BTD, p["projection"], out="float32") * c.emb_dim**-0.5
    context = named(self._norm, p, "norm", context, "float32")
    return precision.cast((context + identity.astype(jnp.float32)) * 2.0**-0.5)


@dataclass(frozen=True, kw_only=True)
class PerLayerGateConfig:
  """Sizes D and P, the activation of the gate, and the norm of the value that is added to the residual stream."""

  emb_dim: int
  width: int
  activation: Activation
  norm: NormConfig


@dataclass(frozen=True)
class PerLayerGate:
  """norm(projection(act(gate(x)) * input)): a per-layer input, gated by the residual stream."""

  cfg: PerLayerGateConfig
  precision: Precision

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    return {
      "gate": Param((c.emb_dim, c.width), ("embed", "per_layer"), dtype),
      "projection": Param((c.width, c.emb_dim), ("per_layer", "embed"), dtype),
      "norm": RMSNorm(c.norm, self.precision).params(),
    }

  def __call__(self, p: dict, x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Gate the per-layer input with x, the residual stream. Return [B, T, D] in the dtype of the stream.

    Reports "clamped", and the per-layer input as "ple" if captured."""
    if ctx.per_layer_input is None:
      raise ValueError("per-layer input: the context has none (per_layer_input), but the layer is configured to use it")
    # Gate the input by the residual stream, and norm the result.
    ctx.tap("ple", ctx.per_layer_input)
    out_BTD = self._gated(p, x_BTD, ctx.per_layer_input.astype(jnp.float32), ctx)
    return RMSNorm(self.cfg.norm, self.precision)(p["norm"], out_BTD, self.precision.residual)

  @jax.named_scope("per_layer_input")
  def _gated(self, p: dict, x_BTD: jax.Array, input_BTP: jax.Array, ctx: Context) -> jax.Array:
    """Compute in float32 throughout, because the following norm amplifies the rounding errors of a small product."""
    gate = product(self.precision, "BTD,DP->BTP", x_BTD, p["gate"], out="float32", unbounded=True)
    project = lambda hidden: product(self.precision, "BTP,PD->BTD", hidden, p["projection"], out="float32")
    out_BTD, clamped = gated(self.precision, self.cfg.activation, gate, input_BTP, project)
    ctx.report("clamped", clamped)
    return out_BTD
