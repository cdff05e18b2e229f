"""The feed-forward of Gemma 4 26B: an MLP beside experts, each behind norms of its own.

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
class DenseBesideMoEConfig:
  """The MLP, the experts, and the norm of both outputs and of the experts' input."""

  mlp: MLPConfig
  moe: MoEConfig
  norm: NormConfig

  def layer(self, precision: Precision) -> "DenseBesideMoE":
    """The feed-forward of this configuration."""
    return DenseBesideMoE(self, precision)

  @property
  def experts(self) -> MoEConfig:
    """Of every feed-forward: the configuration of its experts."""
    return self.moe


@dataclass(frozen=True)
class DenseBesideMoE:
  """norm(mlp(x)) + norm(moe(norm(stream))); the router reads the residual stream itself, with its own norm."""

  name: ClassVar[str | None] = None  # its parameters stand in the block's tree, beside the others

  cfg: DenseBesideMoEConfig
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
    """x: the MLP's normed input [B, T, D]; ctx: with the stream it was made of. Returns [B, T, D] in the residual dtype."""
    assert ctx.stream is not None, "a block gives its feed-forward the stream"
    norm, residual = RMSNorm(self.cfg.norm, self.precision), self.precision.residual
    dense = MLP(self.cfg.mlp, self.precision)(p["mlp"], x_BTD, ctx)
    sparse = MoE(self.cfg.moe, self.precision)(p["moe"], named(norm, p, "pre_moe_norm", ctx.stream), ctx, ctx.stream)
    dense, sparse = named(norm, p, "post_dense_norm", dense, residual), named(norm, p, "post_moe_norm", sparse, residual)
    with jax.named_scope("residual"):
      return dense + sparse
