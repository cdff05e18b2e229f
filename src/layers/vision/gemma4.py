"""The vision tower of Gemma 4 and its projector: patches of any aspect ratio, 2-D rope, pooling by position.

I images, P patches of one image (padding included), D tower width, N heads, H head, F MLP, S pooled tokens, O decoder width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.rope import RopeConfig, rope_table, rotate
from maxtext_like.layers.context import Context
from maxtext_like.layers.kernels.attention.registry import Choice, Name
from maxtext_like.layers.mlp import FLOAT16_SAFE_MAX, gated
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, constant, fan_in, normal, stack
from maxtext_like.layers.partition import in_float32
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import RULES, Rules
from maxtext_like.layers.vision.attention import attend_patches
from maxtext_like.layers.weight import product

_FLOAT32_MAX = 3.4028234e38
_CLIPPED = {"attention": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig:
  """Sizes of the tower and of its projector.

  Attributes:
    patch_size: side of a patch, in pixels; a patch is 3 * patch_size ** 2 numbers, (row, column, channel).
    emb_dim, mlp_dim, num_layers, num_heads, head_dim: D, F, depth, N, H.
    position_table_size: rows of the position table of each axis.
    pooling: patches along one side of a pooled token.
    rope_theta: base wavelength.
    standardize: shift and scale the pooled features by stored statistics (26B, 31B).
    clipped: every linear projection of the layers clips its input and output to stored bounds (E2B, E4B).
    output_dim: O.
    epsilon: epsilon of every norm.
    query_gain, branch_gain: initial scales of the query norm, and of the norms before each residual addition.
    kernel, platform, capability, failed: settings of attention, as in ``vision.attention.TowerConfig``.
  """

  padded: ClassVar[bool] = True

  patch_size: int
  emb_dim: int
  mlp_dim: int
  num_layers: int
  num_heads: int
  head_dim: int
  position_table_size: int
  output_dim: int
  pooling: int = 3
  rope_theta: float = 100.0
  standardize: bool = False
  clipped: bool = False
  epsilon: float = 1e-6
  query_gain: float = 1.0
  branch_gain: float = 1.0
  kernel: Choice = "auto"
  platform: str = "cpu"
  capability: str | None = None
  failed: tuple[Name, ...] = ()

  def __post_init__(self):
    if self.head_dim % 4:
      raise ValueError(f"vision tower: two-dimensional rope needs a head_dim that is a multiple of 4, got {self.head_dim}")

  def depth_scaled(self) -> "Gemma4VisionConfig":
    """Return the same tower with initial scores of standard deviation 1 and branches scaled by depth."""
    return replace(self, query_gain=self.head_dim**-0.5, branch_gain=(2 * self.num_layers) ** -0.5)

  def layer(self, precision: Precision) -> "Gemma4Vision":
    """Return the tower with this configuration."""
    return Gemma4Vision(self, precision)


@dataclass(frozen=True)
class Gemma4VisionLayer:
  """Norm, full attention, norm, add; norm, gated MLP, norm, add. Projections may clip. ``rules``: sharding of images."""

  cfg: Gemma4VisionConfig
  precision: Precision
  rules: Rules = RULES

  def _norm(self, dim: int, *, with_scale: bool = True, initial_scale: float = 1.0) -> RMSNorm:
    cfg = NormConfig(dim=dim, epsilon=self.cfg.epsilon, with_scale=with_scale, initial_scale=initial_scale)
    return RMSNorm(cfg, self.precision)

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    D, N, H, F = c.emb_dim, c.num_heads, c.head_dim, c.mlp_dim
    # The norm after a branch and the norm of queries start with gains, which limit the residual stream and the scores.
    norm, branch_norm = self._norm(D).params(), self._norm(D, initial_scale=c.branch_gain).params()
    q_norm, k_norm = self._norm(H, initial_scale=c.query_gain).params(), self._norm(H).params()
    spec = {
      "pre_attention_norm": norm,
      "attention": {name: Param((D, N, H), ("embed", "vision_heads", "head_dim"), dtype) for name in "qkv"}
      | {"o": Param((N, H, D), ("vision_heads", "head_dim", "embed"), dtype, fan_in(0, 1))}
      | {"q_norm": q_norm, "k_norm": k_norm},
      "post_attention_norm": branch_norm,
      "pre_mlp_norm": norm,
      "mlp": {
        "gate": Param((D, F), ("embed", "vision_mlp"), dtype),
        "up": Param((D, F), ("embed", "vision_mlp"), dtype),
        "down": Param((F, D), ("vision_mlp", "embed"), dtype),
      },
      "post_mlp_norm": branch_norm,
    }
    if c.clipped:
      # float32 for any weight_dtype, because a projection that does not clip has the largest finite float32 as its bound.
      for part, names in _CLIPPED.items():
        spec[part]["clip"] = {
          name: {
            side: Param((), (), "float32", constant(-_FLOAT32_MAX if side.endswith("min") else _FLOAT32_MAX), trainable=False)
            for side in ("input_min", "input_max", "output_min", "output_max")
          }
          for name in names
        }
    return spec

  def _linear(self, p: dict, name: str, spec: str, x: jax.Array, *, out: str | None = None) -> jax.Array:
    if not self.cfg.clipped:
      return product(self.precision, spec, x, p[name], out=out)
    # Clip the input and the output in float32, and round afterwards.
    bounds = p["clip"][name]
    x = jnp.clip(x.astype(jnp.float32), bounds["input_min"], bounds["input_max"])
    y = jnp.clip(
      product(self.precision, spec, x, p[name], out="float32").astype(jnp.float32), bounds["output_min"], bounds["output_max"]
    )
    return y.astype(out or self.precision.dtype)

  def _rotate(self, x, tables):
    """Rotate the first half of each head by the column and the second half by the row."""
    halves = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([rotate(half, table) for half, table in zip(halves, tables, strict=True)], axis=-1)

  def __call__(self, p: dict, x_IPD: jax.Array, tables, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply the layer.

    Args:
      p: parameters.
      x_IPD: [I, P, D] in the residual dtype.
      tables: rope of columns and rows.
      real: int32 [I, P], 1 for a patch, 0 for padding.

    Returns:
      [I, P, D] like x, and the number of clamped values.
    """
    # Attention, with a norm before and after it.
    c, residual, norm = self.cfg, self.precision.residual, self._norm(self.cfg.emb_dim)
    head_norm = self._norm(c.head_dim)
    x_IPD = self.rules.constrain(x_IPD, "batch")
    a, y = p["attention"], named(norm, p, "pre_attention_norm", x_IPD)
    with jax.named_scope("attention"):
      # Queries and keys are normed and rotated, values are normed without a scale.
      q = self._rotate(head_norm(a["q_norm"], self._linear(a, "q", "IPD,DNH->IPNH", y)), tables)
      k = self._rotate(head_norm(a["k_norm"], self._linear(a, "k", "IPD,DNH->IPNH", y)), tables)
      v = self._norm(c.head_dim, with_scale=False)({}, self._linear(a, "v", "IPD,DNH->IPNH", y))
      out = attend_patches(c, self.precision, self.rules, q, k, v, real, scale=1.0)
      out = self._linear(a, "o", "IPNH,NHD->IPD", out, out=self.precision.branch_dtype)
    with jax.named_scope("residual"):
      x_IPD = x_IPD + named(norm, p, "post_attention_norm", out, residual)
    # MLP, with a norm before and after it.
    out, clamped = self._mlp(p["mlp"], named(norm, p, "pre_mlp_norm", x_IPD))
    with jax.named_scope("residual"):
      return x_IPD + named(norm, p, "post_mlp_norm", out, residual), clamped

  @jax.named_scope("mlp")
  def _mlp(self, p, y):
    dtype = self.precision.gate_dtype
    gate = self._linear(p, "gate", "IPD,DF->IPF", y, out=dtype)
    up = self._linear(p, "up", "IPD,DF->IPF", y, out=dtype)
    down = lambda hidden: self._linear(p, "down", "IPF,FD->IPD", hidden, out=self.precision.branch_dtype)
    return gated(self.precision, "gelu", gate, up, down, bounded=self.cfg.clipped)


@dataclass(frozen=True)
class Gemma4Vision:
  """Patches with positions, a stack of layers, pooling by position, standardization, a norm and a projection."""

  pixel_rank: ClassVar[int] = 3  # rank of "pixel_values"

  cfg: Gemma4VisionConfig
  precision: Precision

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    D = c.emb_dim
    spec = {
      "patch": Param((3 * c.patch_size**2, D), (None, "embed"), dtype),
      "positions": Param((2, c.position_table_size, D), (None, None, "embed"), dtype, normal(0.02)),
      "layers": stack(Gemma4VisionLayer(c, self.precision).params(), c.num_layers),
      "projector": Param((D, c.output_dim), ("embed", None), dtype),
    }
    if c.standardize:
      # Statistics of the released tower, up to 5e4. They are not trained, and stay float32.
      spec["std_bias"] = Param((D,), (None,), "float32", constant(0.0), trainable=False)
      spec["std_scale"] = Param((D,), (None,), "float32", constant(1.0), trainable=False)
    return spec

  @jax.named_scope("vision")
  def __call__(
    self, p: dict, pixels: jax.Array, positions: jax.Array, ctx: Context, *, wrap: Callable[[Any], Any] = lambda layer: layer
  ) -> tuple[jax.Array, jax.Array]:
    """Compute image tokens.

    Args:
      p: parameters.
      pixels: [I, P, 3 * patch_size ** 2] in [0, 1], padding 0.
      positions: int32 [I, P, 2], (column, row) of each patch, padding (-1, -1).
      ctx: reports "clamped", and captures "vision.pooled" (before standardization), "vision.tower_out" and "vision.projected",
        all [I, S, ...].
      wrap: applied to the call of a layer, such as ``jax.checkpoint``.

    Returns:
      [I, S, O] in ``dtype``, S = P / pooling^2; bool [I, S]: which tokens contain a patch.
    """
    # Embed patches and their positions. Padding has no position.
    c, precision = self.cfg, self.precision
    real = positions[..., 0] >= 0
    x = product(precision, "IPK,KD->IPD", 2 * (pixels.astype(jnp.float32) - 0.5), p["patch"])
    at = jnp.maximum(positions, 0)
    table = in_float32(p["positions"])
    place = table[0][at[..., 0]] + table[1][at[..., 1]]
    x = (x + jnp.where(real[..., None], precision.cast(place), 0)).astype(precision.residual)
    # Run the layers.
    rope = RopeConfig(dim=c.head_dim // 2, theta=c.rope_theta)
    tables = (rope_table(rope, positions[..., 0]), rope_table(rope, positions[..., 1]))
    layer, patches = wrap(Gemma4VisionLayer(c, precision, ctx.rules)), real.astype(jnp.int32)
    x, clamped = jax.lax.scan(lambda x, row: layer(row, x, tables, patches), x, p["layers"])
    # Pool, standardize, norm, and project to the width of the decoder.
    pooled, valid = self._pool(x, positions, real)
    features, clipped = self._standardize(p, pooled)
    normed = RMSNorm(NormConfig(dim=c.emb_dim, epsilon=c.epsilon, with_scale=False), precision)({}, features)
    out = product(precision, "ISD,DO->ISO", normed, p["projector"])
    ctx.tap("vision.pooled", pooled.astype(jnp.float32) * c.emb_dim**0.5)
    ctx.tap("vision.tower_out", features)
    ctx.report("clamped", jnp.sum(clamped) + clipped)
    return ctx.tap("vision.projected", out), valid

  @jax.named_scope("vision_pool")
  def _pool(self, x, positions, real):
    """Average over squares of pooling x pooling patches. Return float32 [I, S, D], and which squares contain a patch."""
    c = self.cfg
    # Number the squares of patches row by row. Padding belongs to none.
    columns = jnp.max(jnp.where(real, positions[..., 0], 0), axis=1) + 1
    square = positions[..., 0] // c.pooling + (columns // c.pooling)[:, None] * (positions[..., 1] // c.pooling)
    square = jnp.where(real, square, -1)
    # Average the patches of each square with one product.
    member = jax.nn.one_hot(square, x.shape[1] // c.pooling**2, dtype=jnp.float32)
    pooled = jnp.einsum("IPS,IPD->ISD", member, x.astype(jnp.float32), precision="highest") / c.pooling**2
    return pooled, jnp.any(member > 0, axis=1)

  @jax.named_scope("vision_pool")
  def _standardize(self, p, pooled):
    """Multiply by sqrt(D), then shift and scale. Return the features, and the number of values that were clamped.

    With ``float32_vision_pool``, and if ``dtype`` is float32, the computation is in float32, because pooled * sqrt(D) reaches
    7.9e4. Otherwise sqrt(D) is folded into the statistics, (h - bias / root) * (scale * root), so that no large number appears
    in 16 bits. ``float16_clamp`` clips numbers that still exceed float16. Without statistics the factor is left out, because
    the norm that follows removes it.
    """
    root, precision = self.cfg.emb_dim**0.5, self.precision
    none = jnp.zeros((), jnp.int32)
    if precision.pool_dtype == "float32":
      features = pooled * root
      return (features - p["std_bias"]) * p["std_scale"] if self.cfg.standardize else features, none

    def held(x, before=none):
      if precision.dtype != "float16" or not precision.float16_clamp:
        return precision.cast(x), none
      clipped = jnp.clip(x, -FLOAT16_SAFE_MAX, FLOAT16_SAFE_MAX)
      return precision.cast(clipped), before + jnp.sum(jnp.abs(x) > FLOAT16_SAFE_MAX, dtype=jnp.int32)

    # 16 bits: every intermediate value is clipped to float16 and counted.
    features, count = held(pooled)
    if not self.cfg.standardize:
      return features, count
    (bias, count), (scale, more) = held(p["std_bias"] / root, count), held(p["std_scale"] * root)
    features, count = held(features - bias, count + more)
    return held(features * scale, count)
