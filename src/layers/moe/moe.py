"""Mixture of experts: two routers (softmax, and DeepSeek's grouped sigmoid) and the experts. No token is dropped.

B batch, T position, D model, E experts, k experts per token, F hidden size of an expert, G groups of experts.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.context import CAPTURES, Aux, Context
from maxtext_like.layers.kernels.grouped_matmul.registry import Name
from maxtext_like.layers.mlp import MLP, Activation, MLPConfig, gated
from maxtext_like.layers.moe import load_balance
from maxtext_like.layers.moe.expert_parallel import Layout, travel
from maxtext_like.layers.moe.load_balance import NAMES
from maxtext_like.layers.moe.router_losses import RouterLosses
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, constant, fan_in
from maxtext_like.layers.partition import as_stored, by_token, in_float32, on_devices, vary
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import RULES, Rules, free_mesh
from maxtext_like.layers.weight import Groups, cast, own_rows, product


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
  """Settings of the router and the experts.

  Attributes:
    emb_dim, mlp_dim: D and F.
    num_experts, num_experts_per_tok: E and k.
    activation: activation of every expert.
    router: "softmax" (Qwen3, Gemma 4) or "sigmoid" (DeepSeek "noaux_tc").
    router_norm: norm of the router's input, followed by a learned scale and D ** -0.5 (Gemma 4); None: no norm.
    per_expert_scale: multiply the weights by a learned number for each expert (Gemma 4).
    norm_topk_prob: divide the weights of the chosen experts by their sum.
    routed_scaling_factor: factor on the sigmoid router's weights.
    n_groups, topk_groups: choose experts from the best groups only (sigmoid router); 1, 1 is no limit.
    selection_bias: the sigmoid router adds a bias to the scores when it chooses experts.
    shared_experts: number of experts that every token passes, computed as one MLP with this many times F.
    losses: auxiliary losses of the router.
    branch_gain: factor on the initial size of every expert's output (``models/initial_values.py``).
  """

  emb_dim: int
  mlp_dim: int
  num_experts: int
  num_experts_per_tok: int
  activation: Activation = "gelu"
  router: Literal["softmax", "sigmoid"] = "softmax"
  router_norm: NormConfig | None = None
  per_expert_scale: bool = False
  norm_topk_prob: bool = True
  routed_scaling_factor: float = 1.0
  n_groups: int = 1
  topk_groups: int = 1
  selection_bias: bool = True
  shared_experts: int = 0
  losses: RouterLosses = RouterLosses()
  branch_gain: float = 1.0

  def __post_init__(self):
    if not 1 <= self.num_experts_per_tok <= self.num_experts:
      raise ValueError(
        f"MoE: num_experts_per_tok={self.num_experts_per_tok} is not between 1 and num_experts={self.num_experts}"
      )
    # Groups: a token selects groups first, and then experts inside them.
    if self.num_experts % self.n_groups or not 1 <= self.topk_groups <= self.n_groups:
      raise ValueError(
        f"MoE: {self.num_experts} experts cannot be split into n_groups={self.n_groups} with topk_groups={self.topk_groups}\n"
        "  fix: n_groups must divide the number of experts, and topk_groups must be between 1 and n_groups"
      )
    if self.num_experts_per_tok > self.topk_groups * self.num_experts // self.n_groups:
      raise ValueError(
        f"MoE: topk_groups={self.topk_groups} groups hold {self.topk_groups * self.num_experts // self.n_groups} experts, "
        f"fewer than num_experts_per_tok={self.num_experts_per_tok}\n  fix: increase topk_groups"
      )
    # Options of one router that the other one does not have.
    if self.router == "sigmoid" and (self.router_norm or self.per_expert_scale):
      raise ValueError("MoE: router_norm and per_expert_scale apply to the softmax router only, but router is sigmoid")
    if self.router_norm and (self.router_norm.dim != self.emb_dim or self.router_norm.with_scale):
      raise ValueError(
        f"MoE: router_norm must norm emb_dim={self.emb_dim} numbers without a scale, because the router has its own scale"
      )

  def layer(self, precision: Precision) -> "MoE":
    """Return the layer with this configuration."""
    return MoE(self, precision)

  @property
  def experts(self) -> "MoEConfig":
    """The configuration of the experts. Every feed-forward configuration has this property."""
    return self


@dataclass(frozen=True)
class Router:
  """Chooses the experts of each token and their weights.

  "softmax": probabilities over all experts; the k largest are chosen, and renormalized with ``norm_topk_prob``. "sigmoid":
  scores in (0, 1). A bias, which gradients never change, is added to choose experts but not to weight them (Wang et al. 2024).
  Experts are chosen from the groups with the highest sum of their two best biased scores (DeepSeek-V3, 2.1.2).
  """

  cfg: MoEConfig
  precision: Precision

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    spec = {"kernel": Param((c.emb_dim, c.num_experts), ("embed", "expert"), dtype)}
    if c.router_norm:
      spec["scale"] = Param((c.emb_dim,), (None,), dtype, constant(1.0))
    if c.per_expert_scale:
      spec["per_expert_scale"] = Param((c.num_experts,), (None,), dtype, constant(1.0))
    if c.router == "sigmoid" and c.selection_bias:
      # Always float32: an update of 0.001 per step is below the spacing of bfloat16.
      spec["bias"] = Param((c.num_experts,), (None,), "float32", constant(0.0), trainable=False)
    return spec

  def _logits(self, p: dict, x: jax.Array) -> jax.Array:
    return product(self.precision.for_router, "...D,DE->...E", x, p["kernel"])

  @jax.named_scope("router")
  def __call__(self, p: dict, x: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
    """Choose experts.

    Args:
      p: parameters.
      x: [B, T, D], normed; the residual stream if the router has its own norm.

    Returns:
      weights [B, T, k] float32, experts [B, T, k] int32, and aux: "scores" [B, T, E] (softmax probabilities, or raw
      logits) and "probs" [B, T, E], which sum to one over experts. With a load-balancing loss also "balanced", the
      probabilities [B, T, E] and the choices [B, T, k] of its definition; with a z-loss "logits" [B, T, E].
    """
    c = self.cfg
    # Softmax router.
    if c.router == "softmax":
      if c.router_norm:
        x = RMSNorm(c.router_norm, self.precision)({}, x, self.precision.for_router.dtype)
        x = x * in_float32(p["scale"]).astype(x.dtype) * jnp.asarray(c.emb_dim**-0.5, x.dtype)
      logits = self._logits(p, x)
      probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
      # Choose the k most probable experts.
      weights, experts = jax.lax.top_k(probs, c.num_experts_per_tok)
      if c.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
      if c.per_expert_scale:
        weights = weights * in_float32(p["per_expert_scale"])[experts]
      return weights, experts, {"scores": probs, "probs": probs} | self._for_losses(logits, probs, experts)
    # Sigmoid router. The bias is used to choose experts only.
    logits = self._logits(p, x)
    # Scores of all experts, and the experts with the best biased scores.
    scores = jax.nn.sigmoid(logits)
    experts = self._choose(scores + p["bias"].astype(scores.dtype) if c.selection_bias else scores)
    scores = scores.astype(jnp.float32)
    # Weights are the unbiased scores of the chosen experts.
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if c.norm_topk_prob:
      weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    # Probabilities for the auxiliary losses.
    probs = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    balanced = self._balanced(p, logits, scores, probs, experts) if c.losses.weight else (probs, experts)
    return weights * c.routed_scaling_factor, experts, {"scores": logits, "probs": probs} | self._for_losses(logits, *balanced)

  def _for_losses(self, logits: jax.Array, probs: jax.Array, experts: jax.Array) -> dict:
    """Return the entries of aux for the losses of the router."""
    losses = self.cfg.losses
    return ({"balanced": (probs, experts)} if losses.weight else {}) | ({"logits": logits} if losses.z_weight else {})

  def _balanced(
    self, p: dict, logits: jax.Array, scores: jax.Array, probs: jax.Array, experts: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Return the probabilities and choices that the load-balancing loss of the sigmoid router uses.

    Args:
      p: parameters.
      logits, scores, probs: [B, T, E]; scores are sigmoids, probabilities are scores divided by their sum.
      experts: [B, T, k], the router's choices.
    """
    definition = self.cfg.losses.definition
    if definition == "switch":
      return probs, experts
    if definition == "maxtext":  # MaxText applies its softmax to the biased scores that it chooses by
      bias = p["bias"].astype(jnp.float32) if self.cfg.selection_bias else 0
      return jax.nn.softmax(scores + bias, axis=-1), experts
    if definition == "huggingface":
      probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    # Both definitions count the largest values, independent of the router's bias and groups.
    return probs, jax.lax.top_k(jax.lax.stop_gradient(probs), self.cfg.num_experts_per_tok)[1]

  def _choose(self, biased: jax.Array) -> jax.Array:
    """Return the k best biased scores [B, T, E] within the best groups. Of equal scores, the lower index is chosen."""
    c = self.cfg
    biased = jax.lax.stop_gradient(biased)
    if c.n_groups > 1:
      # Score each group by its two best experts, and mask the experts of all other groups.
      grouped = biased.reshape(*biased.shape[:-1], c.n_groups, -1)
      best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
      groups = jax.lax.top_k(best_two, c.topk_groups)[1]
      kept = jnp.any(groups[..., None] == jnp.arange(c.n_groups), axis=-2)
      lowest = jnp.asarray(jnp.finfo(biased.dtype).min, biased.dtype)
      biased = jnp.where(kept[..., None], grouped, lowest).reshape(biased.shape)
    return jax.lax.top_k(biased, c.num_experts_per_tok)[1]


@dataclass(frozen=True)
class Experts:
  """E gated MLPs. Tokens are sorted by expert, and a grouped product applies to each token the k experts that it chose."""

  cfg: MoEConfig
  precision: Precision

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    D, E, F = c.emb_dim, c.num_experts, c.mlp_dim
    scaled = fan_in(1, gain=c.branch_gain**0.5)
    return {
      "gate": Param((E, D, F), ("expert", "embed", "mlp"), dtype, fan_in(1)),
      "up": Param((E, D, F), ("expert", "embed", "mlp"), dtype, scaled),
      "down": Param((E, F, D), ("expert", "mlp", "embed"), dtype, scaled),
    }

  @jax.named_scope("experts")
  def __call__(
    self, p: dict, x_BTD: jax.Array, weights: jax.Array, experts: jax.Array, rules: Rules = RULES, by: Name = "ragged_dot"
  ) -> tuple[jax.Array, jax.Array]:
    """Compute the weighted sum of the chosen experts' outputs.

    Args:
      p: parameters.
      x_BTD: normed input.
      weights, experts: [B, T, k], results of the router.
      rules: sharding of tokens and experts on the current mesh.
      by: name of the grouped kernel.

    Returns:
      [B, T, D] (float32 with ``float32_weight_sum`` or float16 operands, else ``dtype``), and the number of clamped values.
    """
    # Cast weights before they are gathered, so that fewer bytes are sent.
    p = {name: cast(self.precision, w) for name, w in p.items()}
    mesh = free_mesh()
    layout = None if mesh is None else Layout.of(self.params(), p, x_BTD.shape[:2], rules, mesh)
    if mesh is None or layout is None or not layout.every:
      return self._on_device({name: as_stored(w) for name, w in p.items()}, x_BTD, weights, experts, by)
    # Each device sorts its own tokens. A global sort would send every token over the network.

    def on_device(p, x, w, e):
      p = {name: layout.weights[name].gather(w) for name, w in p.items()}
      p, x, w, e = jax.tree.map(lambda a: vary(a, layout.every), (p, x, w, e))
      out, clamped = self._on_device(p, x, w, e, by, layout)
      return out, jax.lax.psum(clamped, layout.every)

    tokens = layout.tokens
    specs = ({name: held.spec for name, held in layout.weights.items()}, tokens, tokens, tokens)
    return on_devices(on_device, mesh, specs, (tokens, PartitionSpec()))(own_rows(p), x_BTD, weights, experts)

  def _on_device(self, p, x_BTD, weights, experts, by, layout: Layout | None = None):
    """Compute the weighted sum for the tokens of one device, which has all experts or those that the layout assigns to it."""
    # Flatten tokens to rows.
    B, T, D = x_BTD.shape
    k, E = self.cfg.num_experts_per_tok, self.cfg.num_experts
    x_ND, chosen_Nk = self.precision.cast(x_BTD).reshape(B * T, D), experts.reshape(B * T, k)
    run = functools.partial(self._run, by)
    # All experts are on this device; or tokens are sent to the devices of their experts; or every device has all tokens and
    # computes the outputs of the experts that it stores.
    if layout is None or not layout.experts:
      out_MD, clamped = run(p, x_ND, chosen_Nk.reshape(-1), E)
    elif layout.travel:
      out_MD, clamped = travel(run, p, x_ND, chosen_Nk, E, layout.experts, layout.every)
    else:
      # Each device computes its own experts for all tokens. Choices of other experts get the number after the last group.
      own = E // jax.lax.axis_size(layout.experts)
      number = chosen_Nk.reshape(-1) - jax.lax.axis_index(layout.experts) * own
      out_MD, clamped = run(p, x_ND, jnp.where((number >= 0) & (number < own), number, own), own, some=True)
    out = self._combine(out_MD.reshape(B, T, k, D), weights)
    return jax.lax.psum(out, layout.partial) if layout and layout.partial else out, clamped

  def _run(self, by, p, x_ND, expert_M, count: int, *, some: bool = False):
    """Apply experts to rows.

    Args:
      by: name of the grouped kernel.
      p: parameters of ``count`` experts.
      x_ND: rows in ``dtype``.
      expert_M: int32, M / N experts for each row.
      some: some choices have no expert on this device. They have the number ``count``.

    Returns:
      [M, D] in the order of choices, zeros for choices without an expert; and the number of clamped values.
    """
    M, N = expert_M.size, x_ND.shape[0]
    # Sort the choices by expert.
    order = jnp.argsort(expert_M, stable=True)
    groups = Groups(jnp.bincount(expert_M, length=count).astype(jnp.int32), by)
    real_M1 = (jnp.arange(M) < jnp.sum(groups.sizes))[:, None]

    def multiply(x, w):
      y = product(self.precision, "MD,EDF->MF", x, w, groups=groups, out=self.precision.expert_dtype)
      return jnp.where(real_M1, y, 0) if some else y  # a kernel leaves undefined values after the last group

    out, clamped = self._gated(p, x_ND[order // (M // N)], multiply)
    # Restore the order of choices. This is a permutation, because each choice has its own place.
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True), clamped

  def dense(self, p: dict, x_BTD: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
    """Compute the same sum by applying every expert to every token: E / k times the work, as a simple reference."""
    B, T, D = x_BTD.shape
    # Cast once instead of once for each product.
    p = {name: cast(self.precision, w) for name, w in p.items()}
    x = self.precision.cast(x_BTD).reshape(1, B * T, D)

    def every(x, w):
      copies = jnp.broadcast_to(x, (self.cfg.num_experts, *x.shape[1:]))
      return product(self.precision, "EXD,EDF->EXF", copies, w, out=self.precision.expert_dtype)

    out_EXD, _ = self._gated(p, x, every)
    # Keep the outputs of the experts that the router selected.
    chosen = jnp.take_along_axis(out_EXD.transpose(1, 0, 2), experts.reshape(B * T, -1, 1), axis=1)
    return self._combine(chosen.reshape(B, T, -1, D), weights)

  def _gated(self, p, rows, multiply):
    """Return down(act(gate(rows)) * up(rows)), with ``multiply`` for the three products."""
    gate, up = multiply(rows, p["gate"]), multiply(rows, p["up"])
    gate, up = (x.astype(self.precision.gate_dtype) for x in (gate, up))
    down = lambda hidden: multiply(self.precision.cast(hidden), p["down"])
    return gated(self.precision, self.cfg.activation, gate, up, down)

  @property
  def sums(self) -> bool:
    """True if the products return float32 sums of 16-bit operands."""
    return self.precision.expert_dtype != self.precision.dtype

  @jax.named_scope("weight_sum")
  def _combine(self, out_BTkD, weights):
    return self.precision.for_weight_sum.einsum("BTkD,BTk->BTD", out_BTkD, weights)


@dataclass(frozen=True)
class MoE:
  """Router, experts and, in DeepSeek, the shared experts that every token passes through."""

  name: ClassVar[str | None] = "moe"

  cfg: MoEConfig
  precision: Precision

  @property
  def _shared(self) -> MLP:
    c = self.cfg
    # The shared experts are one MLP, as wide as all of them together.
    width = c.mlp_dim * c.shared_experts
    cfg = MLPConfig(emb_dim=c.emb_dim, mlp_dim=width, activation=c.activation, branch_gain=c.branch_gain)
    return MLP(cfg, self.precision)

  def params(self) -> dict:
    spec = {
      "router": Router(self.cfg, self.precision).params(),
      "experts": Experts(self.cfg, self.precision).params(),
    }
    if self.cfg.shared_experts:
      spec["shared"] = self._shared.params()
    return spec

  def standalone(
    self, p: dict, x_BTD: jax.Array, router_input: jax.Array | None = None, real: jax.Array | None = None
  ) -> tuple[jax.Array, Aux]:
    """Run the layer outside a decoder, as a module wrapper does. Return the output, all reported values and the router's
    losses.

    Args:
      p, x_BTD, router_input: as in ``__call__``.
      real: bool [B, T], real tokens; None: all of them.
    """
    tokens = Tokens(None if real is None else real.astype(jnp.int32))
    ctx = Context.of(x_BTD, tokens=tokens, capture=frozenset(CAPTURES)).collecting()
    out = self(p, x_BTD, ctx, router_input)
    return out, {name: x for name, x in ctx.aux.items() if name not in NAMES} | self.losses(ctx.aux)

  def losses(self, aux: Aux) -> dict[str, jax.Array]:
    """Return the router's losses by name, for a model without other experts. aux: the values that ``__call__`` reported."""
    statistics = {name: aux[name][None] for name in NAMES if name in aux}
    return load_balance.totals(self.cfg.losses, statistics, self.cfg.num_experts_per_tok)

  @jax.named_scope("moe")
  def __call__(self, p: dict, x_BTD: jax.Array, ctx: Context, router_input: jax.Array | None = None) -> jax.Array:
    """Route each token to its experts and return the weighted sum of their outputs.

    Args:
      p: parameters.
      x_BTD: normed input of the experts.
      ctx: its padding is computed but not counted in loads and losses. Reported statistics: "moe_load" [E], the share of
        choices, ``load_balance.statistics``, and "clamped" int32. Captures: "router.scores", "router.topk_weights" and
        "router.topk_idx".
      router_input: [B, T, D], if the router's input differs from that of the experts (Gemma 4: the residual stream).

    Returns:
      [B, T, D].
    """
    # Route, and run the experts.
    c = self.cfg
    read = x_BTD if router_input is None else router_input
    weights, experts, routing = by_token(ctx.rules, Router(c, self.precision), own_rows(p["router"]), read)
    out, clamped = Experts(c, self.precision)(p["experts"], x_BTD, weights, experts, ctx.rules, ctx.grouped)
    ctx.report("clamped", clamped)
    # Shared experts.
    if c.shared_experts:
      with jax.named_scope("shared_experts"):
        shared = self._shared(p["shared"], x_BTD, ctx)
      out = out + shared.astype(out.dtype)
    # Statistics over real tokens, for the load and the auxiliary losses.
    counts = jnp.ones(experts.shape[:2], jnp.float32) if ctx.real is None else ctx.real.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(counts), 1.0)
    chosen = jnp.sum(jax.nn.one_hot(experts, c.num_experts, dtype=jnp.float32), axis=2)
    ctx.report("moe_load", jnp.einsum("BTE,BT->E", chosen, counts) / (total * c.num_experts_per_tok))
    probs, counted = routing.get("balanced", (routing["probs"], experts))
    for name, value in load_balance.statistics(c.losses, counts, probs, counted, routing.get("logits")).items():
      ctx.report(name, value)
    ctx.tap("router.scores", routing["scores"])
    ctx.tap("router.topk_weights", weights)
    ctx.tap("router.topk_idx", experts)
    return out


@dataclass(frozen=True, kw_only=True)
class DenseAndMoEConfig:
  """Settings of the MLP, of the experts, and of the norms of both outputs and of the experts' input."""

  mlp: MLPConfig
  moe: MoEConfig
  norm: NormConfig

  def layer(self, precision: Precision) -> "DenseAndMoE":
    """Return the layer with this configuration."""
    return DenseAndMoE(self, precision)

  @property
  def experts(self) -> MoEConfig:
    """The configuration of the experts. Every feed-forward configuration has this property."""
    return self.moe


@dataclass(frozen=True)
class DenseAndMoE:
  """norm(mlp(x)) + norm(moe(norm(stream))). The router has its own norm and reads the residual stream."""

  name: ClassVar[str | None] = None  # its parameters are entries of the block's tree

  cfg: DenseAndMoEConfig
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
    """Add the two branches.

    Args:
      p: parameters.
      x_BTD: normed input of the MLP.
      ctx: its ``stream`` is the residual stream from which x was computed.

    Returns:
      [B, T, D] in the residual dtype.
    """
    assert ctx.stream is not None, "a block passes the residual stream to its feed-forward layer"
    norm, residual = RMSNorm(self.cfg.norm, self.precision), self.precision.residual
    dense = MLP(self.cfg.mlp, self.precision)(p["mlp"], x_BTD, ctx)
    sparse = MoE(self.cfg.moe, self.precision)(p["moe"], named(norm, p, "pre_moe_norm", ctx.stream), ctx, ctx.stream)
    dense, sparse = named(norm, p, "post_dense_norm", dense, residual), named(norm, p, "post_moe_norm", sparse, residual)
    with jax.named_scope("residual"):
      return dense + sparse
