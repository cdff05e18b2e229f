"""The sizes of the risky quantities of the vision towers of Gemma 3 and 4; see ``risk_model``.

D tower width, N heads, H head, F MLP.
"""

import numpy as np

from maxtext_like.analysis import risk_bounds as bounds
from maxtext_like.analysis.risk_bounds import Signal
from maxtext_like.analysis.risk_model import Sizes
from maxtext_like.analysis.risk_parameters import Parameters
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.vision_gemma3 import SiglipConfig
from maxtext_like.layers.vision_gemma4 import Gemma4VisionConfig

# Pixels lie in [-1, 1] when they meet the first product, evenly spread at most: that deviation is 1 / sqrt(3).
_PIXEL_STD = 3**-0.5


def measure_tower(sizes: Sizes, p: Parameters, c: SiglipConfig | Gemma4VisionConfig, precision: Precision) -> Signal:
  """Notes the tower's sites and returns its features as they enter the decoder, [O]."""
  u_residual = bounds.UNIT_ROUNDOFF[precision.residual]
  if isinstance(c, SiglipConfig):
    return _siglip(sizes, p, c, u_residual)
  return _gemma4(sizes, p, c, precision, u_residual)


def _pixels(count: int) -> Signal:
  return Signal(np.ones(count), np.full(count, _PIXEL_STD))


def _siglip(sizes: Sizes, p: Parameters, c: SiglipConfig, u_residual: float) -> Signal:
  u = sizes.u
  patches = bounds.through(_pixels(c.channels * c.patch_size**2), p.columns("patch", "kernel"), u)
  peak, rms = p.row_peaks("positions")
  x = patches.plus(p.vector("patch", "bias"), u).added(Signal(peak, rms), u)
  sizes.put("vision", "embedding", x)
  for number in range(c.num_layers):
    x = _siglip_layer(sizes, f"vision.layers.{number}", p.stacked(number, "layers"), c, x, u_residual)
  last = bounds.normed(p.scale("final_norm"), u, bias=p.vector("final_norm", "bias"))
  sizes.put("vision", "norm", last)
  ones = bounds.normed(p.scale("projector", "norm", plus_one=True), u)
  return sizes.put("vision", "projector", bounds.through(ones, p.columns("projector", "kernel"), u))


def _siglip_layer(sizes: Sizes, place: str, p: Parameters, c: SiglipConfig, x: Signal, u_residual: float) -> Signal:
  u, a, m = sizes.u, p.part("attention"), p.part("mlp")
  H = c.emb_dim // c.num_heads

  def norm(name: str) -> Signal:
    signal = bounds.normed(p.scale(name), u, bias=p.vector(name, "bias"))
    return sizes.put(f"{place}.{name}", "norm", signal)

  y = norm("pre_attention_norm")
  q, k, v = (sizes.put_biased(place, n, bounds.through(y, a.columns(n), u), a.vector(f"{n}_bias").reshape(-1)) for n in "qkv")
  bound = np.sum((q.bounds() * k.bounds()).reshape(-1, H), axis=1).max() * (1 + u) * (1 + H * 2.0**-23)
  std = np.sqrt(np.sum(np.square(q.moment() * k.moment()).reshape(-1, H), axis=1))
  sizes.put_scores(place, bound, std, H**-0.5)
  out = bounds.through(v.grown((1 + u) ** 3), a.columns("o", inputs=2), u)
  x = x.added(sizes.put_biased(place, "attention output", out, a.vector("o_bias")), u_residual)
  y = norm("pre_mlp_norm")
  up = sizes.put_biased(f"{place}.mlp", "hidden", bounds.through(y, m.columns("up"), u), m.vector("up_bias"))
  down = bounds.through(bounds.activated(up, "gelu", u), m.columns("down"), u)
  x = x.added(sizes.put_biased(f"{place}.mlp", "down", down, m.vector("down_bias")), u_residual)
  return sizes.put(place, "residual", x)


def _gemma4(sizes: Sizes, p: Parameters, c: Gemma4VisionConfig, precision: Precision, u_residual: float) -> Signal:
  u = sizes.u
  patches = bounds.through(_pixels(3 * c.patch_size**2), p.columns("patch"), u)
  table = np.abs(p.vector("positions"))
  places = Signal(table.max(axis=1).sum(axis=0), np.sqrt(np.square(table).mean(axis=1).sum(axis=0)))
  x = sizes.put("vision", "embedding", patches.added(places.grown((1 + u) ** 2), u))
  for number in range(c.num_layers):
    x = _gemma4_layer(sizes, f"vision.layers.{number}", p.stacked(number, "layers"), c, x, u_residual)
  _pooler(sizes, p, c, precision, x)
  features = bounds.normed(np.ones(c.emb_dim), u)
  return sizes.put("vision", "projector", bounds.through(features, p.columns("projector"), u))


def _pooler(sizes: Sizes, p: Parameters, c: Gemma4VisionConfig, precision: Precision, x: Signal) -> None:
  """What the pooler computes: patches averaged, times sqrt(D), shifted and scaled; see ``Gemma4Vision._standardize``."""
  root = c.emb_dim**0.5
  pooled = x.grown(1 + 2.0**-20)
  if precision.float32_vision_pool or precision.dtype == "float32":
    features = sizes.put("vision", "pooled * sqrt(D)", pooled.times(root).grown(1 + 2.0**-22))
    if not c.standardize:
      return
    bias, scale = p.vector("std_bias"), p.vector("std_scale")
  else:
    # In 16 bits the same numbers with sqrt(D) folded into the statistics, or left out.
    features = sizes.put("vision", "pooled", pooled.grown(1 + sizes.u))
    if not c.standardize:
      return
    bias, scale = p.vector("std_bias") / root, p.vector("std_scale") * root
    sizes.put("vision", "pooled", Signal(np.abs(bias), np.abs(bias)).grown(1 + sizes.u))
  shifted = features.plus(-bias, sizes.u)
  assert shifted.offset is not None
  size = np.abs(scale)
  out = Signal(shifted.scale * size, shifted.std * size, offset=shifted.offset * scale).grown((1 + sizes.u) ** 2)
  sizes.put("vision", "standardised", out)


def _gemma4_layer(sizes: Sizes, place: str, p: Parameters, c: Gemma4VisionConfig, x: Signal, u_residual: float) -> Signal:
  u, a, m = sizes.u, p.part("attention"), p.part("mlp")

  def linear(part: Parameters, name: str, signal: Signal, inputs: int = 1) -> Signal:
    if not c.clipped:
      return bounds.through(signal, part.columns(name, inputs=inputs), u)
    low, high, out_low, out_high = (
      float(part.vector("clip", name, side)) for side in ("input_min", "input_max", "output_min", "output_max")
    )
    boxed = signal.clipped(low, high)
    out = bounds.through(boxed, part.columns(name, inputs=inputs), u)
    if boxed is not signal and low <= 0 <= high:
      # Clipping around 0 makes no channel larger, so that the ball still holds.
      ball = bounds.through(signal, part.columns(name, inputs=inputs), u)
      out = Signal(np.minimum(out.bounds(), ball.bounds()), np.minimum(out.std, ball.std))
    return out.clipped(out_low, out_high).grown(1 + u)

  def norm(name: str) -> Signal:
    return sizes.put(f"{place}.{name}", "norm", bounds.normed(p.scale(name), u))

  y = norm("pre_attention_norm")
  for name in "qkv":
    sizes.put(place, name, linear(a, name, y))
  quarter = np.arange(c.head_dim // 2).reshape(2, -1).T
  pairs = np.concatenate([quarter, quarter + c.head_dim // 2])  # columns turn the first half, rows the second
  bound, std = bounds.normed_scores(a.scale("q_norm"), a.scale("k_norm"), u, pairs=pairs)
  sizes.put_scores(place, bound, np.array([std]), 1.0, heads=c.num_heads)
  values = bounds.heads(bounds.normed(np.ones(c.head_dim), u), c.num_heads).grown((1 + u) ** 3)
  sizes.put(place, "attention output", linear(a, "o", values, inputs=2))
  x = x.added(bounds.normed(p.scale("post_attention_norm"), u_residual), u_residual)
  y = norm("pre_mlp_norm")
  gate = sizes.put(f"{place}.mlp", "gate", linear(m, "gate", y))
  up = sizes.put(f"{place}.mlp", "up", linear(m, "up", y))
  hidden = bounds.gated(gate, up, "gelu", u)
  sizes.put_product(f"{place}.mlp", gate, up, hidden)
  sizes.put(f"{place}.mlp", "down", linear(m, "down", hidden))
  x = x.added(bounds.normed(p.scale("post_mlp_norm"), u_residual), u_residual)
  return sizes.put(place, "residual", x)
