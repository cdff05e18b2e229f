"""The feed-forward layer of Gemma 4 26B: the sum of an MLP and of experts, each with its own norms.

B batch, T position, D model.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax

from maxtext_like.layers.context import Context
from maxtext_like.layers.mlp import MLP, MLPConfig
from maxtext_like.layers.moe.moe import MoE, MoEConfig
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.precision import Precision


@dataclass(frozen=True, kw_only=True)
class DenseAndMoEConfig:
  """Settings of the MLP, of the experts, and of the norms of both outputs and of the experts' input."""

  mlp: MLPConfig
  moe: MoEConfig
  norm: NormConfig

  def layer(self, precision: Precision) -> "DenseAndMoE":
    """Return the layer with this configuration."""
    return DenseAndMoE(self, precision)

  @property
  def experts(self) -> MoEConfig:
    """The configuration of the experts. Every feed-forward configuration has this property."""
    return self.moe


@dataclass(frozen=True)
class DenseAndMoE:
  """norm(mlp(x)) + norm(moe(norm(stream))). The router has its own norm and reads the residual stream."""

  name: ClassVar[str | None] = None  # its parameters are entries of the block's tree

  cfg: DenseAndMoEConfig
  precision: Precision

  def params(self) -> dict:
    norm = RMSNorm(self.cfg.norm, self.precision).params()
    return {
      "mlp": MLP(self.cfg.mlp, self.precision).params(),
      "moe": MoE(self.cfg.moe, self.precision).params(),
      "post_dense_norm": norm,
      "pre_moe_norm": norm,
      "post_moe_norm": norm,
    }

  def __call__(self, p: dict, x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Add the two branches.

    Args:
      p: parameters.
      x_BTD: normed input of the MLP.
      ctx: its ``stream`` is the residual stream from which x was computed.

    Returns:
      [B, T, D] in the residual dtype.
    """
    assert ctx.stream is not None, "a block passes the residual stream to its feed-forward layer"
    norm, residual = RMSNorm(self.cfg.norm, self.precision), self.precision.residual
    dense = MLP(self.cfg.mlp, self.precision)(p["mlp"], x_BTD, ctx)
    sparse = MoE(self.cfg.moe, self.precision)(p["moe"], named(norm, p, "pre_moe_norm", ctx.stream), ctx, ctx.stream)
    dense, sparse = named(norm, p, "post_dense_norm", dense, residual), named(norm, p, "post_moe_norm", sparse, residual)
    with jax.named_scope("residual"):
      return dense + sparse
