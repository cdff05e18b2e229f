"""Bounds on the values that a Gemma 4 computes, for ``risk``; see ``walk``.

D width of the vision tower, N heads, H size of a head, F hidden size of the MLP.
"""

import numpy as np

from maxtext_like.analysis.risk import bounds
from maxtext_like.analysis.risk.bounds import Signal
from maxtext_like.analysis.risk.gemma3 import layer_of_gemma, pixels
from maxtext_like.analysis.risk.parameters import Parameters
from maxtext_like.analysis.risk.walk import Formula, Sizes
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.vision.gemma4 import Gemma4VisionConfig


def _tower(sizes: Sizes, p: Parameters, c: Gemma4VisionConfig, precision: Precision) -> Signal:
  u = sizes.u
  patches = bounds.through(pixels(3 * c.patch_size**2), p.columns("patch"), u)
  table = np.abs(p.vector("positions"))
  places = Signal(table.max(axis=1).sum(axis=0), np.sqrt(np.square(table).mean(axis=1).sum(axis=0)))
  x = sizes.put("vision", "embedding", patches.added(places.grown((1 + u) ** 2), u))
  for number in range(c.num_layers):
    x = _tower_layer(sizes, f"vision.layers.{number}", p.stacked(number, "layers"), c, x)
  _pooler(sizes, p, c, precision, x)
  features = bounds.normed(np.ones(c.emb_dim), u)
  return sizes.put("vision", "projector", bounds.through(features, p.columns("projector"), u))


def _pooler(sizes: Sizes, p: Parameters, c: Gemma4VisionConfig, precision: Precision, x: Signal) -> None:
  """Bound the pooler: patches averaged, times sqrt(D), shifted and scaled; see ``Gemma4Vision._standardize``."""
  root = c.emb_dim**0.5
  pooled = x.grown(1 + 2.0**-20)
  if precision.pool_dtype == "float32":
    features = sizes.put("vision", "pooled * sqrt(D)", pooled.times(root).grown(1 + 2.0**-22))
    if not c.standardize:
      return
    bias, scale = p.vector("std_bias"), p.vector("std_scale")
  else:
    # In 16 bits, sqrt(D) is folded into the statistics, or left out without statistics.
    features = sizes.put("vision", "pooled", pooled.grown(1 + sizes.u))
    if not c.standardize:
      return
    bias, scale = p.vector("std_bias") / root, p.vector("std_scale") * root
    sizes.put("vision", "pooled", Signal(np.abs(bias), np.abs(bias)).grown(1 + sizes.u))
  shifted = features.plus(-bias, sizes.u)
  assert shifted.offset is not None
  size = np.abs(scale)
  out = Signal(shifted.scale * size, shifted.std * size, offset=shifted.offset * scale).grown((1 + sizes.u) ** 2)
  sizes.put("vision", "standardized", out)


def _tower_layer(sizes: Sizes, place: str, p: Parameters, c: Gemma4VisionConfig, x: Signal) -> Signal:
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
      # Clipping to a range that contains 0 makes no channel larger, so the ball bound still holds.
      ball = bounds.through(signal, part.columns(name, inputs=inputs), u)
      out = Signal(np.minimum(out.bounds(), ball.bounds()), np.minimum(out.std, ball.std))
    return out.clipped(out_low, out_high).grown(1 + u)

  def norm(name: str) -> Signal:
    return sizes.put(f"{place}.{name}", "norm", bounds.normed(p.scale(name), u))

  y = norm("pre_attention_norm")
  for name in "qkv":
    sizes.put(place, name, linear(a, name, y))
  quarter = np.arange(c.head_dim // 2).reshape(2, -1).T
  pairs = np.concatenate([quarter, quarter + c.head_dim // 2])  # columns rotate the first half, rows the second
  bound, std = bounds.normed_scores(a.scale("q_norm"), a.scale("k_norm"), u, pairs=pairs)
  sizes.put_scores(place, bound, np.array([std]), 1.0, heads=c.num_heads)
  values = bounds.heads(bounds.normed(np.ones(c.head_dim), u), c.num_heads).grown((1 + u) ** 3)
  sizes.put(place, "attention output", linear(a, "o", values, inputs=2))
  x = x.added(bounds.normed(p.scale("post_attention_norm"), sizes.u_residual), sizes.u_residual)
  y = norm("pre_mlp_norm")
  gate = sizes.put(f"{place}.mlp", "gate", linear(m, "gate", y))
  up = sizes.put(f"{place}.mlp", "up", linear(m, "up", y))
  hidden = bounds.gated(gate, up, "gelu", u)
  sizes.put_product(f"{place}.mlp", gate, up, hidden)
  sizes.put(f"{place}.mlp", "down", linear(m, "down", hidden))
  x = x.added(bounds.normed(p.scale("post_mlp_norm"), sizes.u_residual), sizes.u_residual)
  return sizes.put(place, "residual", x)


RISK = Formula(layer_of_gemma, _tower)
