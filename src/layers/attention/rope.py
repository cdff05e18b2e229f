"""Rotary position embedding (Su et al. 2021): frequency tables (default, linear, proportional, YaRN) and the rotation.

B batch, T position, N heads, H head dimension. Angles are float32, because bfloat16 cannot distinguish positions 1000 and 1001.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """A rotary table.

  Attributes:
    dim: number of dimensions that are rotated in pairs, even.
    theta: base wavelength.
    kind: "default"; "linear" divides every frequency by ``factor``; "proportional" rotates the first ``proportion`` of the
      pairs and leaves the rest unrotated (Gemma 4); "yarn" interpolates low frequencies (Peng et al. 2023).
    factor: context extension of "linear" and "yarn".
    proportion: share of the pairs that rotate, of "proportional".
    beta_fast, beta_slow: rotations at which YaRN's ramp begins and ends.
    original_max_position_embeddings: context before extension, in tokens.
    mscale, mscale_all_dim: YaRN's attention temperature.
    interleave: pairs are (2m, 2m + 1) instead of (m, m + dim / 2).
  """

  dim: int
  theta: float
  kind: Literal["default", "linear", "proportional", "yarn"] = "default"
  factor: float = 1.0
  proportion: float = 1.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  original_max_position_embeddings: int = 4096
  mscale: float = 0.0
  mscale_all_dim: float = 0.0
  interleave: bool = False

  def __post_init__(self):
    if self.dim % 2 or self.dim <= 0:
      raise ValueError(f"rope: the rotary dimension must be even and positive, got {self.dim}")

  @property
  def attention_factor(self) -> float:
    """Factor on cos and sin: YaRN's temperature for the rotated part of q and k."""
    if self.kind != "yarn":
      return 1.0
    if self.mscale and self.mscale_all_dim:
      return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
    return yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
  """Return 0.1 * mscale * ln(factor) + 1, or 1 without extension (YaRN, section 3.4)."""
  return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(cfg: RopeConfig) -> np.ndarray:
  """Return float32 [dim / 2], in radians per token, equal to Hugging Face's tables in every bit.

  The exponent is rounded to float32, and the power is rounded once. An error of one unit in the last place changes logits by
  1e-2 at position 100000.
  """
  # The default frequencies, theta ** (-2m / dim).
  exponent = np.arange(0, cfg.dim, 2, dtype=np.float32) / np.float32(cfg.dim)
  wavelength = (np.float64(cfg.theta) ** exponent.astype(np.float64)).astype(np.float32)
  inv_freq = np.float32(1.0) / wavelength
  # Linear: stretch all positions by the same factor.
  if cfg.kind == "linear":
    return inv_freq / np.float32(cfg.factor)
  # Proportional: the remaining pairs have frequency 0, so they are not rotated.
  if cfg.kind == "proportional":
    rotated = int(cfg.proportion * cfg.dim // 2)
    return np.where(np.arange(cfg.dim // 2) < rotated, inv_freq / np.float32(cfg.factor), np.float32(0.0))
  # YaRN: divide low frequencies by the factor, keep high ones, and blend between them with a ramp.
  if cfg.kind == "yarn":

    def pair_with(rotations: float) -> float:
      """Return the index of the pair that makes this many rotations over the original context."""
      return cfg.dim * math.log(cfg.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(cfg.theta))

    # Fast pairs keep their frequency, slow pairs are divided by the factor, and a ramp connects both.
    low, high = max(math.floor(pair_with(cfg.beta_fast)), 0), min(math.ceil(pair_with(cfg.beta_slow)), cfg.dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(cfg.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    extrapolated = np.float32(1) - ramp
    interpolated = np.float32(1.0) / (np.float32(cfg.factor) * wavelength)
    return (interpolated * (np.float32(1) - extrapolated) + inv_freq * extrapolated).astype(np.float32)
  return inv_freq


def rope_table(cfg: RopeConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return cos and sin, float32 [B, T, dim / 2], for integer positions [B, T] in tokens."""
  angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies(cfg)
  return jnp.cos(angles) * cfg.attention_factor, jnp.sin(angles) * cfg.attention_factor


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array], *, interleave: bool = False) -> jax.Array:
  """Rotate every pair of the last dimension.

  Args:
    x: [B, T, N, H] or [B, T, H].
    table: cos and sin, [B, T, H / 2].
    interleave: pairs are (2m, 2m + 1). The result is always in half-split order, which does not change q.k.

  Returns:
    The same shape and dtype. The rotation is computed in float32, which is fused and rounds once.
  """
  # Heads [B, T, N, H] need an axis of heads in the table.
  cos, sin = (t[:, :, None, :] if x.ndim == 4 else t for t in table)
  x32 = x.astype(jnp.float32)
  # Split into the two elements of each pair, and rotate.
  first, second = (x32[..., 0::2], x32[..., 1::2]) if interleave else jnp.split(x32, 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
