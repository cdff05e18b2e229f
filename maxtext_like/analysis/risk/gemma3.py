"""Bounds on the values that a Gemma 3 computes, and on the layers of Gemma 3 and 4, for ``risk``; see ``walk``.

D tower width, N heads, H head, F MLP.
"""

import numpy as np

from maxtext_like.analysis.risk import bounds
from maxtext_like.analysis.risk.bounds import Signal
from maxtext_like.analysis.risk.parameters import Parameters
from maxtext_like.analysis.risk.walk import Formula, Sizes
from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.block import Block
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.moe.moe import DenseAndMoEConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.vision.gemma3 import SiglipConfig


def layer_of_gemma(sizes: Sizes, place: str, p: Parameters, layer: Block, x: Signal, per_layer: Signal | None) -> Signal:
  """Bound a layer of Gemma 3 or 4. Both parts are normed before they are added to the residual stream."""
  c, plus_one, u_residual = layer.cfg, layer.cfg.norm.scale_plus_one, sizes.u_residual
  assert isinstance(c.mixer, AttentionConfig)
  assert isinstance(c.ffn, MLPConfig | DenseAndMoEConfig)
  mlp = c.ffn if isinstance(c.ffn, MLPConfig) else c.ffn.mlp

  def post(name: str, *keys: str) -> Signal:
    return bounds.normed(p.scale(*keys, name, plus_one=plus_one), u_residual)

  # The attention part.
  y = sizes.norm(place, p, "pre_attention_norm", c.norm)
  sizes.attention(place, p.part("attention"), c.mixer, y)
  x = x.added(post("post_attention_norm"), u_residual)
  # The feed-forward part: an MLP, and experts in parallel if there are any.
  y = sizes.norm(place, p, "pre_mlp_norm", c.norm)
  sizes.mlp(f"{place}.mlp", p.part("mlp"), y, mlp.activation)
  if c.ffn.experts:
    y = sizes.norm(place, p, "pre_moe_norm", c.norm)
    sizes.moe(f"{place}.moe", p.part("moe"), c.ffn.experts, y)
    sizes.put(place, "branches", post("post_dense_norm").added(post("post_moe_norm"), u_residual))
  x = x.added(post("post_mlp_norm"), u_residual)
  # The layer's own input (Gemma 4 E2B and E4B).
  if c.per_layer:
    assert per_layer is not None
    u32 = bounds.UNIT_ROUNDOFF["float32"]
    gate = sizes.put(f"{place}.ple", "per-layer gate", bounds.through(x.grown(1 + sizes.u), p.columns("ple", "gate"), sizes.u))
    hidden = bounds.gated(gate, per_layer, c.per_layer.activation, u32).grown((1 + sizes.u) ** 2)
    sizes.put(f"{place}.ple", "per-layer product", hidden)
    sizes.put(f"{place}.ple", "per-layer output", bounds.through(hidden, p.columns("ple", "projection"), sizes.u))
    x = x.added(post("norm", "ple"), u_residual)
  # A layer scalar may make the stream smaller or larger: the larger one counts.
  before = x
  if c.layer_scalar:
    x = x.times(float(p.vector("layer_scalar"))).grown((1 + u_residual) ** 2)
  larger = max((before, x), key=lambda s: float(np.max(s.bounds())))
  sizes.put(place, "residual", larger)
  return x


def pixels(count: int) -> Signal:
  """Return the bounds of pixels as operands: in [-1, 1], at most evenly distributed, so their deviation is 1 / sqrt(3)."""
  return Signal(np.ones(count), np.full(count, 3**-0.5))


def _tower(sizes: Sizes, p: Parameters, c: SiglipConfig, precision: Precision) -> Signal:
  u = sizes.u
  patches = bounds.through(pixels(c.channels * c.patch_size**2), p.columns("patch", "kernel"), u)
  peak, rms = p.row_peaks("positions")
  x = patches.plus(p.vector("patch", "bias"), u).added(Signal(peak, rms), u)
  sizes.put("vision", "embedding", x)
  for number in range(c.num_layers):
    x = _tower_layer(sizes, f"vision.layers.{number}", p.stacked(number, "layers"), c, x)
  last = bounds.normed(p.scale("final_norm"), u, bias=p.vector("final_norm", "bias"))
  sizes.put("vision", "norm", last)
  ones = bounds.normed(p.scale("projector", "norm", plus_one=True), u)
  return sizes.put("vision", "projector", bounds.through(ones, p.columns("projector", "kernel"), u))


def _tower_layer(sizes: Sizes, place: str, p: Parameters, c: SiglipConfig, x: Signal) -> Signal:
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
  x = x.added(sizes.put_biased(place, "attention output", out, a.vector("o_bias")), sizes.u_residual)
  y = norm("pre_mlp_norm")
  up = sizes.put_biased(f"{place}.mlp", "hidden", bounds.through(y, m.columns("up"), u), m.vector("up_bias"))
  down = bounds.through(bounds.activated(up, "gelu", u), m.columns("down"), u)
  x = x.added(sizes.put_biased(f"{place}.mlp", "down", down, m.vector("down_bias")), sizes.u_residual)
  return sizes.put(place, "residual", x)


RISK = Formula(layer_of_gemma, _tower)
