"""The vision tower of Gemma 3 (SigLIP) and its projector. It converts pixels to image tokens for the decoder.

I images, P patches of one image, C channels, D tower width, N heads, H head, F MLP, O decoder width, S image tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from maxtext_like.layers.context import Context
from maxtext_like.layers.kernels.attention.registry import Choice, Name
from maxtext_like.layers.mlp import activate
from maxtext_like.layers.norms import LayerNorm, NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, constant, fan_in, normal, stack
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import RULES, Rules
from maxtext_like.layers.vision.attention import attend_patches
from maxtext_like.layers.weight import product


@dataclass(frozen=True, kw_only=True)
class SiglipConfig:
  """Sizes of the tower and of its projector.

  Attributes:
    image_size, patch_size: side of an image and of a patch, in pixels.
    channels: C.
    emb_dim, mlp_dim, num_layers, num_heads: D, F, depth, N.
    tokens_per_image: S, a square number that divides the grid of patches.
    output_dim: O.
    epsilon: epsilon of every norm, including that of the projector.
    output_gain: factor on the initial values of the output projections of attention and MLP.
    kernel, platform, capability, failed: settings of attention, as in ``vision.attention.TowerConfig``.
  """

  padded: ClassVar[bool] = False

  image_size: int
  patch_size: int
  emb_dim: int
  mlp_dim: int
  num_layers: int
  num_heads: int
  tokens_per_image: int
  output_dim: int
  channels: int = 3
  epsilon: float = 1e-6
  output_gain: float = 1.0
  kernel: Choice = "auto"
  platform: str = "cpu"
  capability: str | None = None
  failed: tuple[Name, ...] = ()

  def __post_init__(self):
    # Check that patches and pooled tokens form complete grids.
    if self.image_size % self.patch_size or self.emb_dim % self.num_heads:
      raise ValueError(
        f"vision tower: image_size={self.image_size} must be a multiple of patch_size={self.patch_size}, and "
        f"emb_dim={self.emb_dim} a multiple of num_heads={self.num_heads}"
      )
    # Pooling averages square blocks of patches.
    if self.side_out**2 != self.tokens_per_image or self.side % self.side_out:
      raise ValueError(
        f"vision tower: a grid of {self.side} x {self.side} patches cannot be pooled to tokens_per_image="
        f"{self.tokens_per_image}\n  fix: it must be a square number whose root divides the side of the grid"
      )

  def depth_scaled(self) -> "SiglipConfig":
    """Return the same tower with the initial output projections scaled by depth."""
    return replace(self, output_gain=(2 * self.num_layers) ** -0.5)

  def layer(self, precision: Precision) -> "Siglip":
    """Return the tower with this configuration."""
    return Siglip(self, precision)

  @property
  def head_dim(self) -> int:
    """H."""
    return self.emb_dim // self.num_heads

  @property
  def side(self) -> int:
    """Patches along one side of an image."""
    return self.image_size // self.patch_size

  @property
  def side_out(self) -> int:
    """Image tokens along one side."""
    return int(self.tokens_per_image**0.5)


@dataclass(frozen=True)
class SiglipLayer:
  """Norm, full attention, add; norm, MLP, add; all projections have biases (Zhai et al. 2023).

  ``rules``: sharding of images on the mesh.
  """

  cfg: SiglipConfig
  precision: Precision
  rules: Rules = RULES

  @property
  def _norm(self) -> LayerNorm:
    return LayerNorm(NormConfig(dim=self.cfg.emb_dim, epsilon=self.cfg.epsilon), self.precision)

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    D, N, H, F = c.emb_dim, c.num_heads, c.head_dim, c.mlp_dim

    def bias(*shape):
      return Param(shape, (None,) * len(shape), dtype, constant(0.0))

    # Only the two output projections have the gain, because they write to the residual stream.
    attention = {name: Param((D, N, H), ("embed", "vision_heads", "head_dim"), dtype) for name in "qkv"}
    attention |= {f"{name}_bias": bias(N, H) for name in "qkv"}
    attention |= {"o": Param((N, H, D), ("vision_heads", "head_dim", "embed"), dtype, fan_in(0, 1, gain=c.output_gain))}
    attention["o_bias"] = bias(D)
    mlp = {
      "up": Param((D, F), ("embed", "vision_mlp"), dtype),
      "up_bias": bias(F),
      "down": Param((F, D), ("vision_mlp", "embed"), dtype, fan_in(0, gain=c.output_gain)),
      "down_bias": bias(D),
    }
    return {"pre_attention_norm": self._norm.params(), "attention": attention, "pre_mlp_norm": self._norm.params(), "mlp": mlp}

  def __call__(self, p: dict, x_IPD: jax.Array) -> jax.Array:
    """Apply the layer to x [I, P, D] in the residual dtype. Return the same shape and dtype."""
    c, plus, residual = self.cfg, self.precision.plus, self.precision.residual
    multiply = functools.partial(product, self.precision)
    x_IPD = self.rules.constrain(x_IPD, "batch")
    # Attention over all patches of an image.
    a, y = p["attention"], named(self._norm, p, "pre_attention_norm", x_IPD)
    dtype = self.precision.branch_dtype
    with jax.named_scope("attention"):
      q, k, v = (plus(multiply("IPD,DNH->IPNH", y, a[n]), a[f"{n}_bias"]) for n in "qkv")
      out = attend_patches(c, self.precision, self.rules, q, k, v, None, scale=c.head_dim**-0.5)
      out = plus(multiply("IPNH,NHD->IPD", out, a["o"], out=dtype), a["o_bias"])
    with jax.named_scope("residual"):
      x_IPD = x_IPD + out.astype(residual)
    # MLP without a gate.
    m, y = p["mlp"], named(self._norm, p, "pre_mlp_norm", x_IPD)
    with jax.named_scope("mlp"):
      hidden = activate(plus(multiply("IPD,DF->IPF", y, m["up"]), m["up_bias"]), "gelu")
      out = plus(multiply("IPF,FD->IPD", hidden, m["down"], out=dtype), m["down_bias"])
    with jax.named_scope("residual"):
      return x_IPD + out.astype(residual)


@dataclass(frozen=True)
class Siglip:
  """Patches, learned positions, a stack of layers, a norm; then pooling, a norm and a projection to the decoder's width."""

  pixel_rank: ClassVar[int] = 4  # rank of "pixel_values"

  cfg: SiglipConfig
  precision: Precision

  @property
  def _final_norm(self) -> LayerNorm:
    return LayerNorm(NormConfig(dim=self.cfg.emb_dim, epsilon=self.cfg.epsilon), self.precision)

  @property
  def _projector_norm(self) -> RMSNorm:
    return RMSNorm(NormConfig(dim=self.cfg.emb_dim, epsilon=self.cfg.epsilon, scale_plus_one=True), self.precision)

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    D, inputs = c.emb_dim, c.channels * c.patch_size**2
    return {
      "patch": {"kernel": Param((inputs, D), (None, "embed"), dtype), "bias": Param((D,), (None,), dtype, constant(0.0))},
      "positions": Param((c.side**2, D), (None, "embed"), dtype, normal(0.02)),
      "layers": stack(SiglipLayer(c, self.precision).params(), c.num_layers),
      "final_norm": self._final_norm.params(),
      "projector": {"norm": self._projector_norm.params(), "kernel": Param((D, c.output_dim), ("embed", None), dtype)},
    }

  @jax.named_scope("vision")
  def __call__(
    self,
    p: dict,
    pixels: jax.Array,
    positions: jax.Array | None,
    ctx: Context,
    *,
    wrap: Callable[[Any], Any] = lambda layer: layer,
  ) -> tuple[jax.Array, jax.Array]:
    """Compute image tokens.

    Args:
      p: parameters.
      pixels: [I, C, image_size, image_size] in [-1, 1].
      positions: unused, because every image has the same grid.
      ctx: captures "vision.tower_out" [I, P, D] and "vision.projected".
      wrap: applied to the call of a layer, such as ``jax.checkpoint``.

    Returns:
      [I, S, O] in ``dtype``; bool [I, S], all true.
    """
    # Cut the image into patches, and embed patches and positions.
    c, precision = self.cfg, self.precision
    I, g, s = pixels.shape[0], c.side, c.patch_size
    # [I, C, g, s, g, s] becomes [I, g, g, C, s, s]: one row of numbers for each patch.
    patches = pixels.reshape(I, c.channels, g, s, g, s).transpose(0, 2, 4, 1, 3, 5).reshape(I, g * g, -1)
    x = precision.plus(product(precision, "IPK,KD->IPD", patches, p["patch"]["kernel"]), p["patch"]["bias"])
    x = precision.plus(x, p["positions"]).astype(precision.residual)
    # Run the layers.
    layer = wrap(SiglipLayer(c, precision, ctx.rules))
    x, _ = jax.lax.scan(lambda x, row: (layer(row, x), None), x, p["layers"])
    tower = ctx.tap("vision.tower_out", named(self._final_norm, p, "final_norm", x))
    # Pool to the number of image tokens, and project to the width of the decoder.
    pool = g // c.side_out
    # The mean over each square of patches is computed in float32.
    grid = tower.astype(jnp.float32).reshape(I, c.side_out, pool, c.side_out, pool, c.emb_dim)
    pooled = grid.mean(axis=(2, 4)).reshape(I, c.tokens_per_image, c.emb_dim)
    out = product(precision, "ISD,DO->ISO", self._projector_norm(p["projector"]["norm"], pooled), p["projector"]["kernel"])
    # Every image has the same number of tokens, so all of them are real.
    return ctx.tap("vision.projected", out), jnp.ones((I, c.tokens_per_image), bool)
