"""Bounds and expected sizes of values computed from normalized inputs, derived from the weights alone.

The bounds follow from one fact: RMSNorm's output is scale * u with ||u||_2 <= sqrt(D) for every input. Output f of a linear map
W of it is at most sqrt(D) * ||scale * W[:, f]||_2 (Cauchy-Schwarz), and this bound is tight.

All bounds hold for computed values too: every rounding to the dtype of activations counts as a factor 1 + u, and a product of n
terms accumulated in float32 as 1 + n * 2^-23 (Higham 2002, section 3.1).

C channels of a signal, F outputs of a product, H head dimension.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from maxtext_like.layers.norms import NormConfig

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Signal:
  """The set of all vectors offset + scale * u, where the channels of u form groups of equal size and each group has a 2-norm of
  at most ``radius``.

  A normalized vector is one group; the normalized heads of a layer are one group each; groups of 1 bound every channel
  separately.

  Attributes:
    scale: float64 [C], not negative.
    std: float64 [C], expected standard deviation around the offset.
    group: channels per group.
    radius: largest 2-norm of a group.
    offset: float64 [C], the center of the vectors; None for 0.
  """

  scale: np.ndarray
  std: np.ndarray
  group: int = 1
  radius: float = 1.0
  offset: np.ndarray | None = None

  def bounds(self) -> np.ndarray:
    """Return float64 [C]: the largest possible magnitude of each channel."""
    spread = self.scale * self.radius
    return spread if self.offset is None else spread + np.abs(self.offset)

  def moment(self) -> np.ndarray:
    """Return float64 [C]: the expected root mean square."""
    return self.std if self.offset is None else np.hypot(self.std, self.offset)

  def channels(self, index: slice | np.ndarray) -> "Signal":
    """Return some of the channels, each bounded separately."""
    offset = None if self.offset is None else self.offset[index]
    return Signal(self.scale[index] * self.radius, self.std[index], offset=offset)

  def grown(self, factor: float) -> "Signal":
    """Return the signal with every magnitude up to ``factor`` > 1 times as large, as after rounding."""
    scale = self.scale * factor
    if self.offset is not None:
      # Rounding moves the offset within a box, which a ball of radius sqrt(group) contains.
      box = (factor - 1) * np.abs(self.offset) * math.sqrt(self.group) / self.radius
      if self.group == 1:
        scale = scale + box
      else:
        # The sum of two ellipsoids is contained in the one with these squared axes, for any t > 0 (here factor - 1).
        scale = np.sqrt(np.square(scale) * factor + np.square(box) * factor / (factor - 1))
    return Signal(scale, self.std, self.group, self.radius, self.offset)

  def times(self, factor: float) -> "Signal":
    """Return the signal multiplied by a number."""
    offset = None if self.offset is None else self.offset * factor
    return Signal(self.scale * abs(factor), self.std * abs(factor), self.group, self.radius, offset)

  def plus(self, bias: np.ndarray, u: float) -> "Signal":
    """Return the signal with a fixed vector added, rounded twice."""
    offset = bias if self.offset is None else self.offset + bias
    return Signal(self.scale, self.std, self.group, self.radius, offset).grown((1 + u) ** 2)

  def added(self, other: "Signal", u: float) -> "Signal":
    """Return the sum of two independent signals, channel by channel, rounded once."""
    offsets = [s.offset for s in (self, other) if s.offset is not None]
    offset = np.sum(offsets, axis=0) if offsets else None
    spread = self.scale * self.radius + other.scale * other.radius
    return Signal(spread, np.hypot(self.std, other.std), offset=offset).grown(1 + u)

  def clipped(self, low: float, high: float) -> "Signal":
    """Return the signal with every channel limited to [low, high]."""
    bounds = self.bounds()
    if low <= -np.max(bounds) and np.max(bounds) <= high:
      return self
    # The offset is dropped: only the limits matter. If both limits have the same sign, small numbers become larger.
    limited = np.maximum(np.abs(np.clip(bounds, low, high)), np.abs(np.clip(-bounds, low, high)))
    return Signal(limited, np.minimum(self.moment(), limited))


def normed(scale: np.ndarray, u: float, *, roundings: int = 1, bias: np.ndarray | None = None) -> Signal:
  """Return the output of RMSNorm or LayerNorm: a ball of radius sqrt(D), stretched by the scale.

  Args:
    scale: [D], any sign (for Gemma 3 the stored scale plus one).
    u: unit roundoff of the output.
    roundings: number of roundings to the output's dtype; 2 if the norm rounds before it multiplies.
    bias: bias of a LayerNorm.
  """
  dim = scale.shape[-1]
  size = np.abs(scale).astype(np.float64)
  radius = math.sqrt(dim) * (1 + (dim + 16) * 2.0**-24)  # rounding of the norm, which is computed in float32
  ball = Signal(size, size, dim, radius)
  if bias is None:
    return ball.grown((1 + u) ** roundings)
  return Signal(size, size, dim, radius, bias.astype(np.float64)).grown((1 + u) ** roundings)


def normed_by(c: NormConfig, scale: np.ndarray, u: float) -> Signal:
  """Return the output of a decoder's RMSNorm with this scale."""
  return normed(scale, u, roundings=2 if c.round_before_scale else 1)


def heads(one: Signal, count: int) -> Signal:
  """Return ``count`` heads side by side, each a separate signal like ``one``."""
  offset = None if one.offset is None else np.tile(one.offset, count)
  return Signal(np.tile(one.scale, count), np.tile(one.std, count), one.group, one.radius, offset)


def through(signal: Signal, chunks: Iterable[np.ndarray], u: float) -> Signal:
  """Return the signal times a matrix, each output bounded separately.

  Args:
    signal: the input; C channels.
    chunks: the matrix [C, F] in chunks of outputs, float32.
    u: unit roundoff of the weights and of the result.
  """
  growth = (1 + u) ** 2 * (1 + signal.scale.size * 2.0**-23)
  spreads, stds, centers = [], [], []
  # Squares in float32; their rounding is covered by the factor of the accumulation.
  squares = np.square(signal.scale * signal.radius).astype(np.float32)
  variance = np.square(signal.std).astype(np.float32)
  for w in chunks:
    if signal.group == 1:
      spread = (signal.scale * signal.radius).astype(np.float32) @ np.abs(w)
      stds.append(np.sqrt(variance @ np.square(w)))
    else:
      w2 = np.square(w)
      groups = squares.reshape(-1, 1, signal.group) @ w2.reshape(-1, signal.group, w.shape[1])
      spread = np.sqrt(groups[:, 0]).sum(axis=0)
      stds.append(np.sqrt(variance @ w2))
    spread = spread.astype(np.float64) * growth
    if signal.offset is not None:
      offset = signal.offset.astype(np.float32)
      centers.append((offset @ w).astype(np.float64))
      # Terms of the center may cancel, but their rounding errors do not.
      spread += (growth - 1) * (np.abs(offset) @ np.abs(w))
    spreads.append(spread)
  center = np.concatenate(centers) if signal.offset is not None else None
  return Signal(np.concatenate(spreads), np.concatenate(stds).astype(np.float64), offset=center)


def activated_moment(std: np.ndarray, activation: str, offset: np.ndarray | None = None) -> np.ndarray:
  """Return sqrt(E[act(x)^2]) of x ~ N(offset, std^2), by Gauss-Hermite quadrature with 41 nodes."""
  nodes, weights = np.polynomial.hermite_e.hermegauss(41)
  x = std[..., None] * nodes + (0 if offset is None else offset[..., None])
  with np.errstate(over="ignore"):
    v = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) if activation == "gelu" else x
    value = x / (1 + np.exp(-v))
  return np.sqrt(np.square(value) @ (weights / weights.sum()))


def activated(signal: Signal, activation: str, u: float) -> Signal:
  """Return GELU or SiLU of a signal: |act(x)| <= |x|."""
  return Signal(signal.bounds() * (1 + u), activated_moment(signal.std, activation, signal.offset))


def gated(gate: Signal, up: Signal, activation: str, u: float) -> Signal:
  """Return act(gate) * up, channel by channel. For the expected size, gate and up are treated as independent."""
  bounds = gate.bounds() * up.bounds() * (1 + u) ** 2
  return Signal(bounds, activated_moment(gate.std, activation, gate.offset) * up.moment())


def expected_peak(std: np.ndarray, count: float, offset: np.ndarray | None = None) -> float:
  """Return the median of max |x| over ``count`` draws of every channel, x ~ N(offset, std^2).

  It is the level that ln 2 draws exceed on average: then no draw exceeds it with a probability of one half.
  """
  from scipy.special import ndtr

  std = np.maximum(np.ravel(std), 1e-300)
  center = np.zeros_like(std) if offset is None else np.abs(np.ravel(offset))

  def above(level: float) -> float:
    return count * float(np.sum(ndtr((center - level) / std) + ndtr((-center - level) / std)))

  return _solve(above, float(np.max(center + 45 * std)))


def expected_product_peak(gate: np.ndarray, up: np.ndarray, count: float) -> float:
  """Return the median of max |act(g) * h| over ``count`` draws of every channel, g and h independent normal numbers.

  Beyond a few units act(g) is g for half of the draws and 0 for the others; |g * h| / (std * std) has the density 2 K0 / pi
  (Craig 1936), whose tail is sqrt(2 / (pi t)) * exp(-t) * (1 - 5 / (8 t)) for t > 3.
  """
  size = np.maximum(np.ravel(gate) * np.ravel(up), 1e-300)

  def above(level: float) -> float:
    t = np.maximum(level / size, 3.0)
    return 0.5 * count * float(np.sum(np.sqrt(2 / (np.pi * t)) * np.exp(-t) * (1 - 5 / (8 * t))))

  return _solve(above, 60.0 * float(np.max(size)))


def _solve(above, high: float) -> float:
  low = 0.0
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if above(middle) > math.log(2) else (low, middle)
  return high


def rotary_pairs(size: np.ndarray, *, interleave: bool = False) -> np.ndarray:
  """Reshape [H] to [H / 2, 2]: pairs of channels that RoPE rotates into each other."""
  return size.reshape(-1, 2) if interleave else size.reshape(2, -1).T


def normed_scores(
  q: np.ndarray, k: np.ndarray, u: float, *, roundings: int = 1, pairs: np.ndarray | None = None
) -> tuple[float, float]:
  """Return (bound, standard deviation) of |q . k| for normalized queries and keys, before any scale.

  RoPE rotates q and k within pairs of channels, so |q . k| <= sum over pairs of |q_pair| |k_pair|, which is at most H * max
  over pairs of max|scale_q| * max|scale_k|.

  Args:
    q, k: scales of the two norms, [H].
    u: unit roundoff of q, k and the product.
    roundings: number of roundings in each norm; 2 if it rounds before it multiplies.
    pairs: indices [H / 2, 2] of the channels of each pair; None for half-split pairs.
  """
  q, k = np.abs(q).astype(np.float64), np.abs(k).astype(np.float64)
  dim = q.size
  pairs = rotary_pairs(np.arange(dim)) if pairs is None else pairs
  largest = float(np.max(q[pairs].max(axis=1) * k[pairs].max(axis=1)))
  bound = dim * (1 + (dim + 16) * 2.0**-23) * (1 + u) ** (3 + 2 * roundings) * (1 + dim * 2.0**-23) * largest
  turned_q, turned_k = (np.sqrt(np.mean(np.square(x[pairs]), axis=1)) for x in (q, k))
  return bound, math.sqrt(2 * float(np.sum(np.square(turned_q * turned_k))))


def gram(w: np.ndarray, signal: Signal) -> np.ndarray:
  """Return [N, H, H], for each head G = A A^T, where the head is offset + A u with ||u||_2 <= 1.

  Args:
    w: [C, N, H].
    signal: the input, one group without an offset, C channels.
  """
  assert signal.group == signal.scale.size, "one ball"
  a = (np.moveaxis(w, 0, -1) * (signal.scale * signal.radius).astype(np.float32)).astype(np.float64)  # [N, H, C]
  return a @ a.swapaxes(-1, -2)


def bilinear_bound(left: np.ndarray, right: np.ndarray) -> np.ndarray:
  """Return max |a . b| over a = A u, b = B v with ||u||, ||v|| <= 1, that is ||A^T B||_2, from Gram matrices [..., H, H]:
  [...].

  ||A^T B||_2^2 is the largest eigenvalue of A A^T B B^T, which is similar to sqrt(G) B B^T sqrt(G).
  """
  values, vectors = np.linalg.eigh(left)
  root = (vectors * np.sqrt(np.maximum(values, 0))[..., None, :]) @ vectors.swapaxes(-1, -2)
  return np.sqrt(np.maximum(np.linalg.eigvalsh(root @ right @ root)[..., -1], 0))
