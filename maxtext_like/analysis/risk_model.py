"""The sizes of every risky quantity of a decoder, from its weights: walks the model and bounds what each product can become.

The equations are those of ``maxtext_like.layers``; ``risk_bounds`` holds the mathematics, ``risk`` the judgement.

D model, N query heads, K key-value heads, H head, F hidden, E experts, X index heads, P rotary or per-layer part.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from maxtext_like.analysis import risk_bounds as bounds
from maxtext_like.analysis.risk_bounds import Signal
from maxtext_like.analysis.risk_parameters import Parameters, Reader
from maxtext_like.layers.attention import AttentionConfig
from maxtext_like.layers.block import Block
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.dense_beside_moe import DenseBesideMoEConfig
from maxtext_like.layers.mla import MLAConfig
from maxtext_like.layers.mlp import MLPConfig
from maxtext_like.layers.moe import MoEConfig


@dataclass(frozen=True)
class Site:
  """One quantity of one place.

  Attributes:
    place: as ``layers.3``, ``layers.3.moe.experts.17``, ``vision.layers.0``; ``model`` outside the layers.
    quantity: one of ``risk.QUANTITIES``.
    bound: what no magnitude exceeds, whatever the tokens are.
    expected: the median of the largest magnitude over the tokens, for random normed inputs.
  """

  place: str
  quantity: str
  bound: float
  expected: float


@dataclass
class Sizes:
  """The walk: what is found, and what later layers need of earlier ones.

  Attributes:
    u: unit roundoff of the dtype of activations.
    tokens: draws that an expected maximum is taken over.
    sites: what was found.
    donors: scales of the key norm and the values of the layers that share theirs, by name.
  """

  u: float
  tokens: int
  sites: list[Site] = field(default_factory=list)
  donors: dict[str, tuple[np.ndarray, Signal]] = field(default_factory=dict)

  def add(self, place: str, quantity: str, bound: float, expected: float) -> None:
    self.sites.append(Site(place, quantity, float(bound), float(min(bound, expected))))

  def put(self, place: str, quantity: str, signal: Signal) -> Signal:
    """Notes a signal and hands it back."""
    self.add(place, quantity, np.max(signal.bounds()), bounds.expected_peak(signal.std, self.tokens, signal.offset))
    return signal

  def put_biased(self, place: str, quantity: str, before: Signal, bias: np.ndarray) -> Signal:
    """Notes a product and what it is with its bias, whichever is larger; hands back the latter."""
    after = before.plus(bias, self.u)
    expected = max(bounds.expected_peak(s.std, self.tokens, s.offset) for s in (before, after))
    self.add(place, quantity, max(np.max(s.bounds()) for s in (before, after)), expected)
    return after

  def put_product(self, place: str, gate: Signal, up: Signal, hidden: Signal) -> None:
    expected = bounds.expected_product_peak(gate.moment(), up.moment(), self.tokens)
    self.add(place, "product", np.max(hidden.bounds()), expected)

  def put_scores(self, place: str, bound: float, std: np.ndarray, scale: float, *, heads: int = 1) -> None:
    """q.k as multiplied, and the scores that the softmax sees."""
    expected = bounds.expected_peak(std, float(heads) * self.tokens**2)
    self.add(place, "q.k", bound, expected)
    self.add(place, "scores", bound * abs(scale) * (1 + self.u), expected * abs(scale))

  def mlp(self, place: str, p: Parameters, x: Signal, activation: str, lead: tuple[int, ...] = ()) -> Signal:
    """down(act(gate(x)) * up(x))."""
    gate = self.put(place, "gate", bounds.through(x, p.columns("gate", lead=lead), self.u))
    up = self.put(place, "up", bounds.through(x, p.columns("up", lead=lead), self.u))
    hidden = bounds.gated(gate, up, activation, self.u)
    self.put_product(place, gate, up, hidden)
    return self.put(place, "down", bounds.through(hidden, p.columns("down", lead=lead), self.u))

  def moe(self, place: str, p: Parameters, c: MoEConfig, x: Signal) -> Signal:
    """Router, experts and shared experts; of the experts the worst of each quantity is kept."""
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
    """The weighted sum over the chosen experts: weights sum to 1 at most, or each is 1 at most."""
    k = c.num_experts_per_tok
    sizes = np.stack([out.bounds() for out in outs]) * per_expert[:, None]
    stds = np.sqrt(np.mean(np.square(np.stack([out.std for out in outs]) * per_expert[:, None]), axis=0))
    if c.router == "softmax" or c.norm_topk_prob:
      size, std = sizes.max(axis=0), stds / math.sqrt(k)
    else:
      size, std = np.sort(sizes, axis=0)[-k:].sum(axis=0), stds * math.sqrt(k) / 2
    return Signal(size * (1 + self.u) ** 3, std)

  def attention(self, place: str, p: Parameters, c: AttentionConfig, x: Signal) -> Signal:
    """Grouped attention with normed queries and keys."""
    self.put(place, "q", bounds.through(x, p.columns("q"), self.u))
    assert c.norm is not None, "the bound of the scores is that of normed queries and keys"
    q_scale = p.scale("q_norm", plus_one=c.norm.scale_plus_one)
    if c.borrows:
      k_scale, values = self.donors[c.borrows]
    else:
      k = self.put(place, "k", bounds.through(x, p.columns("k"), self.u))
      k_scale = p.scale("k_norm", plus_one=c.norm.scale_plus_one)
      values = k if c.value_is_key else self.put(place, "v", bounds.through(x, p.columns("v"), self.u))
      if c.value_norm:
        values = bounds.heads(bounds.normed(np.ones(c.head_dim), self.u), c.num_kv_heads)
      if c.lends:
        self.donors[c.lends] = (k_scale, values)
    bound, std = bounds.normed_scores(q_scale, k_scale, self.u)
    self.put_scores(place, bound, np.array([std]), c.scale, heads=c.num_query_heads)
    group = c.num_query_heads // c.num_kv_heads
    index = np.repeat(np.arange(c.num_kv_heads * c.head_dim).reshape(c.num_kv_heads, -1), group, axis=0).reshape(-1)
    # Probabilities make a value a convex combination of those of the keys, rounded twice.
    spread = Signal(values.scale[index], values.std[index], values.block, values.radius).grown((1 + self.u) ** 3)
    return self.put(place, "attention output", bounds.through(spread, p.columns("o", inputs=2), self.u))

  def latent_attention(self, place: str, p: Parameters, c: MLAConfig, x: Signal) -> Signal:
    """Multi-head latent attention, with the indexer where there is one."""

    def project(name: str, quantity: str) -> Signal:
      return self._linear(place, quantity, p, name, x, bias=c.bias)

    source, q_name = x, "q"
    if c.q_lora_rank:
      project("q_a", "q latent")
      source, q_name = bounds.normed(p.scale("q_a_norm"), self.u, roundings=2), "q_b"
    kv = project("kv_a", "kv latent")
    k_rope = kv.channels(slice(c.kv_lora_rank, None))
    latent = bounds.normed(p.scale("kv_a_norm"), self.u, roundings=2)
    N, Q = c.num_heads, c.nope_dim

    def expand(name: str, source: Signal, parts: tuple[str, str]) -> tuple[Signal, Signal, np.ndarray]:
      """The two parts of every head, flat over heads, and the Gram matrices [N, Q, Q] of the unrotated one."""
      grams: list[np.ndarray] = []

      def noted(chunks):
        for w in chunks:
          heads = w.reshape(w.shape[0], -1, width)[..., :Q]
          grams.append(bounds.gram(heads, source))
          yield w

      width = Q + (c.rope_dim if parts[1] == "q" else c.value_dim)
      whole = bounds.through(source, noted(p.columns(name)), self.u)
      index = np.arange(N * width).reshape(N, width)
      first, second = (whole.channels(index[:, part].reshape(-1)) for part in (slice(0, Q), slice(Q, None)))
      if parts[0] == parts[1]:
        self.put(place, parts[0], whole)
      else:
        self.put(place, parts[0], first)
        self.put(place, parts[1], second)
      return first, second, np.concatenate(grams)

    q_nope, q_rope, q_gram = expand(q_name, source, ("q", "q"))
    k_nope, v, k_gram = expand("kv_b", latent, ("k", "v"))
    bound, std = self._latent_scores(c, (q_nope, q_rope, q_gram), (k_nope, k_rope, k_gram))
    self.put_scores(place, bound, std, c.scale)
    if c.indexer:
      self._indexer(place, p.part("indexer"), c, x, source)
    values = v.grown((1 + self.u) ** 3)  # convex combinations, by probabilities that were rounded
    return self._linear(place, "attention output", p, "o", values, inputs=2, bias=c.bias)

  def _linear(self, place: str, quantity: str, p: Parameters, name: str, x: Signal, *, inputs: int = 1, bias: bool) -> Signal:
    out = bounds.through(x, p.columns(name, inputs=inputs), self.u)
    return self.put_biased(place, quantity, out, p.vector(f"{name}_bias")) if bias else self.put(place, quantity, out)

  def _latent_scores(self, c: MLAConfig, query: tuple, key: tuple) -> tuple[float, np.ndarray]:
    """Bound over all heads and standard deviation of every head [N] of q.k.

    The unrotated parts are linear in two balls, so that their product's largest value is a matrix norm; the rotated parts
    are bounded pair by pair.
    """
    (q_nope, q_rope, q_gram), (k_nope, k_rope, k_gram) = query, key
    N = c.num_heads
    growth = (1 + self.u) ** 5 * (1 + (c.nope_dim + c.rope_dim) * 2.0**-23)
    separate = np.sum(q_nope.bounds().reshape(N, -1) * k_nope.bounds().reshape(N, -1), axis=1)
    # The norm is that of exact q and k; what rounding adds to them is bounded channel by channel.
    nope = np.minimum(bounds.bilinear_bound(q_gram, k_gram) * (1 + 1e-4) + (growth - 1) * separate, separate) * growth

    def pair(sizes: np.ndarray) -> np.ndarray:
      two = np.stack([bounds.rotary_pairs(s, interleave=c.rope.interleave) for s in sizes.reshape(-1, c.rope_dim)])
      return np.sqrt(np.sum(np.square(two), axis=-1))

    factor = c.rope.attention_factor**2
    rope = np.sum(pair(q_rope.bounds()) * pair(k_rope.bounds()), axis=1) * growth * factor
    variance = np.sum(np.square(q_nope.std * k_nope.std).reshape(N, -1), axis=1)
    variance = variance + factor**2 * np.sum(np.square(pair(q_rope.std) * pair(k_rope.moment())), axis=1) / 2
    return float(np.max(nope + rope)), np.sqrt(variance)

  def _indexer(self, place: str, p: Parameters, c: MLAConfig, x: Signal, latent: Signal) -> None:
    """Index products, and their weighted sum over heads."""
    i = c.indexer
    assert i is not None
    X, H, rotated = i.num_heads, i.head_dim, i.rope.dim
    q = self.put(place, "index q", bounds.through(latent, p.columns("q"), self.u))
    k = bounds.normed(p.scale("k_norm"), self.u, bias=p.vector("k_norm", "bias")).grown(1 + self.u)
    assert k.offset is not None
    # Rope mixes two channels of a pair: both count as the larger of the two.
    pairs = bounds.rotary_pairs(np.arange(rotated))
    scale, bias, factor = k.scale.copy(), np.abs(k.offset), np.ones(H)
    scale[pairs] = scale[pairs].max(axis=1, keepdims=True)
    bias[pairs] = np.sqrt(np.sum(np.square(bias[pairs]), axis=1, keepdims=True) / 2)
    factor[:rotated] = i.rope.attention_factor**2
    size = q.bounds().reshape(X, H).copy()
    size[:, pairs] = np.sqrt(np.sum(np.square(size[:, pairs]), axis=-1, keepdims=True) / 2)
    size = size * factor
    growth = (1 + self.u) ** 4 * (1 + H * 2.0**-23)
    bound = (k.radius * np.sqrt(np.square(size) @ np.square(scale)) + size @ bias) * growth
    moment = np.square(k.moment())
    moment[pairs] = moment[pairs].mean(axis=1, keepdims=True)
    std = np.sqrt((np.square(q.std).reshape(X, H) * factor**2) @ moment)
    self.add(place, "index q.k", bound.max(), bounds.expected_peak(std, float(self.tokens) ** 2))
    weights = bounds.through(x, p.columns("weights"), self.u)
    share = (H * X) ** -0.5
    total = float(np.sum(weights.bounds() * bound)) * share * (1 + self.u) ** 6 * (1 + X * 2.0**-23)
    spread = math.sqrt(float(np.sum(np.square(weights.std * std)) / 2)) * share
    self.add(place, "index scores", total, bounds.expected_peak(np.array([spread]), float(self.tokens) ** 2))


def measure(decoder: Decoder, read: Reader, tokens: int) -> list[Site]:
  """Every site of a decoder, in the order of the model.

  Args:
    decoder: the model in its precision; the dtype of activations decides how much rounding adds to a bound.
    read: its parameters.
    tokens: that an expected maximum is taken over.

  Raises:
    NonFiniteError: a parameter that is not finite.
  """
  from maxtext_like.analysis.risk_vision import measure_tower

  sizes = Sizes(bounds.UNIT_ROUNDOFF[decoder.precision.dtype], tokens)
  p, c = Parameters(decoder, read), decoder.cfg
  u_residual = bounds.UNIT_ROUNDOFF[decoder.precision.residual]
  peak, rms = p.row_peaks("embedding", "table")
  root = c.embedding.emb_dim**0.5 if c.embedding.scale_by_sqrt_dim else 1.0
  x = Signal(peak * root, rms * root).grown((1 + sizes.u) ** 3)
  sizes.put("model", "embedding", x)
  if c.vision is not None:
    image = measure_tower(sizes, p.part("vision"), c.vision, decoder.precision)
    x = Signal(np.maximum(x.bounds(), image.bounds()), np.maximum(x.std, image.std))
  per_layer = _per_layer_inputs(sizes, p.part("ple"), decoder) if c.per_layer_input else None
  for number, layer in enumerate(decoder.layers):
    place, at = f"layers.{number}", p.layer(number)
    if isinstance(layer.cfg.mixer, AttentionConfig):
      own = None if per_layer is None else per_layer.channels(_columns_of(decoder, number))
      x = _gemma_layer(sizes, place, at, layer, x, own, u_residual)
    else:
      y = _norm(sizes, place, at, "pre_attention_norm", roundings=2)
      assert isinstance(layer.cfg.mixer, MLAConfig)
      x = x.added(sizes.latent_attention(place, at.part("attention"), layer.cfg.mixer, y), u_residual)
      y = _norm(sizes, place, at, "pre_mlp_norm", roundings=2)
      if isinstance(layer.cfg.ffn, MLPConfig):
        out = sizes.mlp(f"{place}.mlp", at.part("mlp"), y, layer.cfg.ffn.activation)
      else:
        out = sizes.moe(f"{place}.moe", at.part("moe"), layer.cfg.ffn.experts, y)
      x = sizes.put(place, "residual", x.added(out, u_residual))
  twice = 2 if c.norm.round_before_scale else 1
  last = bounds.normed(p.scale("final_norm", plus_one=c.norm.scale_plus_one), sizes.u, roundings=twice)
  sizes.put("model", "norm", last)
  table = (w.T for w in p.rows("embedding", "table")) if c.tied else p.columns("head", "kernel")
  logits = sizes.put("model", "logits", bounds.through(last, table, sizes.u))
  if c.final_soft_cap is not None:
    capped = min(c.final_soft_cap * (1 + sizes.u) ** 3, float(np.max(logits.bounds())))
    expected = c.final_soft_cap * math.tanh(sizes.sites[-1].expected / c.final_soft_cap)
    sizes.add("model", "capped logits", capped, expected)
  return sizes.sites


def _columns_of(decoder: Decoder, number: int) -> slice:
  assert decoder.cfg.per_layer_input is not None
  width = decoder.cfg.per_layer_input.width
  return slice(number * width, (number + 1) * width)


def _per_layer_inputs(sizes: Sizes, p: Parameters, decoder: Decoder) -> Signal:
  """The inputs of all layers, [L * P] channels: a normed projection of the embedding plus a row of a table."""
  c = decoder.cfg.per_layer_input
  assert c is not None
  peak, rms = p.row_peaks("table")
  identity = Signal(peak * c.width**0.5, rms * c.width**0.5).grown((1 + sizes.u) ** 3)
  context = bounds.heads(bounds.normed(p.scale("norm"), bounds.UNIT_ROUNDOFF["float32"]), c.num_layers)
  both = identity.added(context, bounds.UNIT_ROUNDOFF["float32"]).times(2.0**-0.5)
  # The row alone is held in the dtype of activations too.
  sizes.put("model", "per-layer row", identity)
  return sizes.put("model", "per-layer input", both.grown(1 + sizes.u))


def _norm(sizes: Sizes, place: str, p: Parameters, name: str, *, plus_one: bool = False, roundings: int = 1) -> Signal:
  signal = bounds.normed(p.scale(name, plus_one=plus_one), sizes.u, roundings=roundings)
  return sizes.put(f"{place}.{name}", "norm", signal)


def _gemma_layer(
  sizes: Sizes, place: str, p: Parameters, layer: Block, x: Signal, per_layer: Signal | None, u_residual: float
) -> Signal:
  c, plus_one = layer.cfg, layer.cfg.norm.scale_plus_one
  assert isinstance(c.mixer, AttentionConfig)
  assert isinstance(c.ffn, MLPConfig | DenseBesideMoEConfig)
  mlp = c.ffn if isinstance(c.ffn, MLPConfig) else c.ffn.mlp

  def post(name: str, *keys: str) -> Signal:
    return bounds.normed(p.scale(*keys, name, plus_one=plus_one), u_residual)

  y = _norm(sizes, place, p, "pre_attention_norm", plus_one=plus_one)
  sizes.attention(place, p.part("attention"), c.mixer, y)
  x = x.added(post("post_attention_norm"), u_residual)
  y = _norm(sizes, place, p, "pre_mlp_norm", plus_one=plus_one)
  sizes.mlp(f"{place}.mlp", p.part("mlp"), y, mlp.activation)
  if c.ffn.experts:
    y = _norm(sizes, place, p, "pre_moe_norm", plus_one=plus_one)
    sizes.moe(f"{place}.moe", p.part("moe"), c.ffn.experts, y)
    sizes.put(place, "branches", post("post_dense_norm").added(post("post_moe_norm"), u_residual))
  x = x.added(post("post_mlp_norm"), u_residual)
  if c.per_layer:
    assert per_layer is not None
    u32 = bounds.UNIT_ROUNDOFF["float32"]
    gate = sizes.put(f"{place}.ple", "per-layer gate", bounds.through(x.grown(1 + sizes.u), p.columns("ple", "gate"), sizes.u))
    hidden = bounds.gated(gate, per_layer, c.per_layer.activation, u32).grown((1 + sizes.u) ** 2)
    sizes.put(f"{place}.ple", "per-layer product", hidden)
    sizes.put(f"{place}.ple", "per-layer output", bounds.through(hidden, p.columns("ple", "projection"), sizes.u))
    x = x.added(post("norm", "ple"), u_residual)
  before = x
  if c.layer_scalar:
    x = x.times(float(p.vector("layer_scalar"))).grown((1 + u_residual) ** 2)
  larger = max((before, x), key=lambda s: float(np.max(s.bounds())))
  sizes.put(place, "residual", larger)
  return x
