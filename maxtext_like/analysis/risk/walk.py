"""Records the sizes of a decoder's quantities: the sites, the walk through the model, and the parts that families share.

Open this to change how attention, an MLP or experts are bounded, or to write the formula of a new family. ``bounds`` has the
mathematics.

D model, N query heads, K key-value heads, H head, F hidden, E experts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxtext_like.analysis.risk import bounds
from maxtext_like.analysis.risk.bounds import Signal
from maxtext_like.analysis.risk.parameters import Parameters
from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.block import Block, BlockConfig
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.moe.moe import MoEConfig
from maxtext_like.layers.norms import NormConfig
from maxtext_like.layers.precision import Precision


@dataclass(frozen=True)
class Site:
  """One quantity at one place.

  Attributes:
    place: such as ``layers.3``, ``layers.3.moe.experts.17``, ``vision.layers.0``; ``model`` outside the layers.
    quantity: one of ``overflow_risk.QUANTITIES``.
    bound: largest possible magnitude, for any tokens.
    expected: the median of the largest magnitude over the tokens, for random normalized inputs.
  """

  place: str
  quantity: str
  bound: float
  expected: float


@dataclass
class Sizes:
  """State of the walk: the sites found so far, and values of earlier layers that later layers need.

  Attributes:
    u, u_residual: unit roundoff of the dtypes of activations and of the residual stream.
    tokens: number of draws that an expected maximum is taken over.
    sites: the sites found so far.
    donors: scales of the key norm and values of the layers that share them, by name.
  """

  u: float
  u_residual: float
  tokens: int
  sites: list[Site] = field(default_factory=list)
  donors: dict[str, tuple[np.ndarray, Signal]] = field(default_factory=dict)

  def add(self, place: str, quantity: str, bound: float, expected: float) -> None:
    self.sites.append(Site(place, quantity, float(bound), float(min(bound, expected))))

  def put(self, place: str, quantity: str, signal: Signal) -> Signal:
    """Record a signal and return it."""
    self.add(place, quantity, np.max(signal.bounds()), bounds.expected_peak(signal.std, self.tokens, signal.offset))
    return signal

  def put_biased(self, place: str, quantity: str, before: Signal, bias: np.ndarray) -> Signal:
    """Record the larger of a product before and after its bias is added; return the product with its bias."""
    after = before.plus(bias, self.u)
    expected = max(bounds.expected_peak(s.std, self.tokens, s.offset) for s in (before, after))
    self.add(place, quantity, max(np.max(s.bounds()) for s in (before, after)), expected)
    return after

  def put_product(self, place: str, gate: Signal, up: Signal, hidden: Signal) -> None:
    expected = bounds.expected_product_peak(gate.moment(), up.moment(), self.tokens)
    self.add(place, "product", np.max(hidden.bounds()), expected)

  def put_scores(
    self, place: str, bound: float, std: np.ndarray, scale: float, *, heads: int = 1, soft_cap: float | None = None
  ) -> None:
    """Record q.k before scaling, and the scores that the softmax sees."""
    expected = bounds.expected_peak(std, float(heads) * self.tokens**2)
    self.add(place, "q.k", bound, expected)
    self.add(place, "scores", *self.capped(bound * abs(scale) * (1 + self.u), expected * abs(scale), soft_cap))

  def capped(self, bound: float, expected: float, cap: float | None) -> tuple[float, float]:
    """Return a bound and an expected size after a soft cap, which rounds three times."""
    return (bound, expected) if cap is None else (min(cap * (1 + self.u) ** 3, bound), cap * math.tanh(expected / cap))

  def norm(self, place: str, p: Parameters, name: str, c: NormConfig) -> Signal:
    """Record a norm of the residual stream."""
    return self.put(f"{place}.{name}", "norm", bounds.normed_by(c, p.scale(name, plus_one=c.scale_plus_one), self.u))

  def mlp(self, place: str, p: Parameters, x: Signal, activation: str, lead: tuple[int, ...] = ()) -> Signal:
    """Record down(act(gate(x)) * up(x))."""
    gate = self.put(place, "gate", bounds.through(x, p.columns("gate", lead=lead), self.u))
    up = self.put(place, "up", bounds.through(x, p.columns("up", lead=lead), self.u))
    hidden = bounds.gated(gate, up, activation, self.u)
    self.put_product(place, gate, up, hidden)
    return self.put(place, "down", bounds.through(hidden, p.columns("down", lead=lead), self.u))

  def moe(self, place: str, p: Parameters, c: MoEConfig, x: Signal) -> Signal:
    """Record router, experts and shared experts. For each quantity only the worst expert is kept."""
    if c.router_norm:
      scale = p.vector("router", "scale") * c.emb_dim**-0.5
      router_in = bounds.normed(scale, self.u, roundings=3)
    else:
      router_in = x
    per_expert = np.full(c.num_experts, c.routed_scaling_factor)
    if c.per_expert_scale:
      per_expert = np.abs(p.vector("router", "per_expert_scale"))
    self.put(place, "router logits", bounds.through(router_in, p.columns("router", "kernel"), self.u))
    outer, self.sites = self.sites, []
    outs = [self.mlp(f"{place}.experts.{e}", p.part("experts"), x, c.activation, (e,)) for e in range(c.num_experts)]
    found, self.sites = self.sites, outer
    for quantity in ("gate", "up", "product", "down"):
      of_all = [site for site in found if site.quantity == quantity]
      worst = max(of_all, key=lambda site: site.expected)
      self.add(worst.place, quantity, max(site.bound for site in of_all), worst.expected)
    out = self._combined(c, outs, per_expert)
    if c.shared_experts:
      out = out.added(self.mlp(f"{place}.shared", p.part("shared"), x, c.activation), self.u)
    return self.put(place, "experts output", out)

  def _combined(self, c: MoEConfig, outs: list[Signal], per_expert: np.ndarray) -> Signal:
    """Return the weighted sum over the chosen experts. The weights sum to at most 1, or each is at most 1."""
    k = c.num_experts_per_tok
    sizes = np.stack([out.bounds() for out in outs]) * per_expert[:, None]
    stds = np.sqrt(np.mean(np.square(np.stack([out.std for out in outs]) * per_expert[:, None]), axis=0))
    if c.router == "softmax" or c.norm_topk_prob:
      size, std = sizes.max(axis=0), stds / math.sqrt(k)
    else:
      size, std = np.sort(sizes, axis=0)[-k:].sum(axis=0), stds * math.sqrt(k) / 2
    return Signal(size * (1 + self.u) ** 3, std)

  def pre_norm_block(
    self, place: str, p: Parameters, c: BlockConfig, x: Signal, mixer: Callable[[Parameters, Signal], Signal]
  ) -> Signal:
    """Record a layer with norms before its parts only. ``mixer`` takes the attention's parameters and input; an MLP or experts
    follow it."""
    y = self.norm(place, p, "pre_attention_norm", c.norm)
    x = x.added(mixer(p.part("attention"), y), self.u_residual)
    y = self.norm(place, p, "pre_mlp_norm", c.norm)
    if isinstance(c.ffn, MLPConfig):
      out = self.mlp(f"{place}.mlp", p.part("mlp"), y, c.ffn.activation)
    else:
      out = self.moe(f"{place}.moe", p.part("moe"), c.ffn.experts, y)
    return self.put(place, "residual", x.added(out, self.u_residual))

  def attention(self, place: str, p: Parameters, c: AttentionConfig, x: Signal) -> Signal:
    """Record grouped-query attention with normalized queries and keys."""
    self.put(place, "q", bounds.through(x, p.columns("q"), self.u))
    assert c.norm is not None, "the bound of the scores is that of normed queries and keys"
    q_scale = p.scale("q_norm", plus_one=c.norm.scale_plus_one)
    if c.reuses_kv_of:
      k_scale, values = self.donors[c.reuses_kv_of]
    else:
      k = self.put(place, "k", bounds.through(x, p.columns("k"), self.u))
      k_scale = p.scale("k_norm", plus_one=c.norm.scale_plus_one)
      values = k if c.value_is_key else self.put(place, "v", bounds.through(x, p.columns("v"), self.u))
      if c.value_norm:
        values = bounds.heads(bounds.normed(np.ones(c.head_dim), self.u), c.num_kv_heads)
      if c.shares_kv_as:
        self.donors[c.shares_kv_as] = (k_scale, values)
    bound, std = bounds.normed_scores(q_scale, k_scale, self.u, roundings=2 if c.norm.round_before_scale else 1)
    self.put_scores(place, bound, np.array([std]), c.scale, heads=c.num_query_heads, soft_cap=c.soft_cap)
    group = c.num_query_heads // c.num_kv_heads
    index = np.repeat(np.arange(c.num_kv_heads * c.head_dim).reshape(c.num_kv_heads, -1), group, axis=0).reshape(-1)
    # The attention probabilities form a convex combination of the keys' values, rounded twice.
    spread = Signal(values.scale[index], values.std[index], values.group, values.radius).grown((1 + self.u) ** 3)
    return self.put(place, "attention output", bounds.through(spread, p.columns("o", inputs=2), self.u))


@dataclass(frozen=True)
class Formula:
  """How large a family's values become.

  Attributes:
    layer: (walk, place, parameters, layer, stream before it, its own input) to the stream after it.
    tower: (walk, parameters, configuration, precision) to the features as they enter the decoder; None without a tower.
  """

  layer: Callable[[Sizes, str, Parameters, Block, Signal, Signal | None], Signal]
  tower: Callable[[Sizes, Parameters, Any, Precision], Signal] | None = None
