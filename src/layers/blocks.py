"""Decoder layers: what stands between two points of the residual stream, in Gemma 3/4 and in DeepSeek V3/V3.2.

A layer maps (parameters, carry, context, per-layer input) to (carry, aux). The carry holds the residual stream and, in
models that share them across layers, keys and values; aux holds statistics as values.

B batch, T position, D model, P per-layer width.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention import Attention, AttentionConfig
from maxtext_like.layers.cache import Step, capacity, stored
from maxtext_like.layers.masks import Tokens
from maxtext_like.layers.mla import MLA, MLAConfig
from maxtext_like.layers.mlp import MLP, MLPConfig, activate, float16_gated_product, rescue_output
from maxtext_like.layers.moe import MoE, MoEConfig
from maxtext_like.layers.norms import NormConfig, RMSNorm
from maxtext_like.layers.param import Param, constant
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.probe import probe

Carry = dict[str, Any]  # {"x": [B, T, D]} and {"kv": {slot: (k, v)}} where layers share keys and values
Aux = dict[str, Any]

CAPTURES = ("hidden", "router", "indexer", "ple", "vision")
PROBED = ("attention", "mlp", "residual")
"""What a layer's probes look at: the output of attention, of MLP or experts, and the residual stream after the layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
  """What every layer of a forward pass sees.

  Attributes:
    positions: int32 [B, T], in tokens.
    tokens: segments and image blocks.
    step: where the tokens stand after those of the caches, in generation.
    capture: names of ``CAPTURES`` to hand out in aux.
  """

  positions: jax.Array
  tokens: Tokens
  step: Step | None = None
  capture: frozenset[str] = field(default=frozenset(), metadata={"static": True})

  @property
  def live(self) -> jax.Array | None:
    """bool [B, T]: real tokens; None: all of them."""
    return None if self.tokens.segments is None else self.tokens.segments > 0


@jax.named_scope("residual")
def _add(x: jax.Array, branch: jax.Array) -> jax.Array:
  return x + branch


def _probed(slots: dict | None, name: str, x: jax.Array, aux: Aux) -> jax.Array:
  """x; with slots, its statistics go to aux and those of its cotangent to the slot (see ``layers.probe``)."""
  if slots is None:
    return x
  x, aux[f"probe.{name}"] = probe(x, slots[name])
  return x


def _moe_aux(aux: Aux, ctx: Context) -> Aux:
  kept = {"moe_load": aux["load"], "load_balance_loss": aux["load_balance_loss"], "rescued": aux["rescued"]}
  if "router" in ctx.capture:
    kept |= {
      f"router.{new}": aux[old] for new, old in [("scores", "scores"), ("topk_weights", "weights"), ("topk_idx", "experts")]
    }
  return kept


@dataclass(frozen=True, kw_only=True)
class GemmaLayerConfig:
  """One layer of Gemma 3 or 4.

  Attributes:
    attention, mlp: configurations of the parts.
    moe: experts beside the MLP (Gemma 4 26B); None: none.
    per_layer_dim: P, width of the per-layer input (E2B, E4B); 0: none.
    layer_scalar: the residual stream is multiplied by a stored number after the layer (Gemma 4).
    kv_slot: the carry's entry that keys and values are read from or written to; None: nothing is shared.
    epsilon, norm_plus_one: of the norms.
  """

  attention: AttentionConfig
  mlp: MLPConfig
  moe: MoEConfig | None = None
  per_layer_dim: int = 0
  layer_scalar: bool = False
  kv_slot: str | None = None
  epsilon: float = 1e-6
  norm_plus_one: bool = False


@dataclass(frozen=True)
class GemmaLayer:
  """Norm, attention, norm, add; norm, MLP (and experts), norm, add; then the per-layer input and the layer scalar."""

  cfg: GemmaLayerConfig
  precision: Precision

  @property
  def mixer(self) -> Attention:
    """What mixes the positions of a row."""
    return Attention(self.cfg.attention, self.precision)

  def _norm(self) -> RMSNorm:
    c = self.cfg
    norm = NormConfig(dim=c.attention.emb_dim, epsilon=c.epsilon, scale_plus_one=c.norm_plus_one)
    return RMSNorm(norm, self.precision)

  def params(self) -> dict:
    c, dtype, norm = self.cfg, self.precision.weight_dtype, self._norm().params()
    D, P = c.attention.emb_dim, c.per_layer_dim
    spec: dict[str, Any] = {
      "pre_attention_norm": norm,
      "attention": self.mixer.params(),
      "post_attention_norm": norm,
      "pre_mlp_norm": norm,
      "mlp": MLP(c.mlp, self.precision).params(),
      "post_mlp_norm": norm,
    }
    if c.moe:
      spec |= {"post_dense_norm": norm, "pre_moe_norm": norm, "post_moe_norm": norm}
      spec["moe"] = MoE(c.moe, self.precision).params()
    if P:
      spec["ple"] = {
        "gate": Param((D, P), ("embed", "per_layer"), dtype),
        "projection": Param((P, D), ("per_layer", "embed"), dtype),
        "norm": norm,
      }
    if c.layer_scalar:
      spec["layer_scalar"] = Param((), (), dtype, constant(1.0), trainable=False)
    return spec

  def cache_slots(self, length: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Slots of this layer's cache in rows of ``length`` tokens, and its arrays' shapes without batch and slots."""
    attention = self.mixer
    return capacity(self.cfg.attention.window, length), attention.cache_shapes()

  def __call__(
    self,
    p: dict,
    carry: Carry,
    ctx: Context,
    per_layer_input: jax.Array | None = None,
    cache: dict | None = None,
    slots: dict | None = None,
  ) -> tuple[Carry, Aux]:
    """carry["x"]: [B, T, D] in the residual dtype; per_layer_input: [B, T, P] or None; cache: of earlier tokens, or None;
    slots: float32 [2] for each of ``PROBED``, or None."""
    aux: Aux = {}
    c, norm, residual = self.cfg, self._norm(), self.precision.residual
    x = carry["x"]
    kv = carry["kv"][c.kv_slot] if c.attention.shared_kv else None
    out, kv = self.mixer(p["attention"], norm(p["pre_attention_norm"], x), ctx.positions, ctx.tokens, kv, cache, ctx.step)
    out = _probed(slots, "attention", out, aux)
    x = _add(x, norm(p["post_attention_norm"], out, residual))
    out, rescued = MLP(c.mlp, self.precision).forward(p["mlp"], norm(p["pre_mlp_norm"], x))
    aux["rescued"] = rescued
    if c.moe:
      # Both branches hang on the same residual; the router reads it with its own norm.
      moe = MoE(c.moe, self.precision)
      sparse, moe_aux = moe(p["moe"], norm(p["pre_moe_norm"], x), x, ctx.live)
      out = _add(norm(p["post_dense_norm"], out, residual), norm(p["post_moe_norm"], sparse, residual))
      aux |= _moe_aux(moe_aux, ctx) | {"rescued": rescued + moe_aux["rescued"]}
    out = _probed(slots, "mlp", out, aux)
    x = _add(x, norm(p["post_mlp_norm"], out, residual))
    if c.per_layer_dim:
      out, rescued = self._per_layer(p["ple"], x, per_layer_input)
      x = _add(x, norm(p["ple"]["norm"], out, residual))
      aux["rescued"] = aux["rescued"] + rescued
    if c.layer_scalar:
      with jax.named_scope("residual"):
        x = x * p["layer_scalar"].astype(residual)
    x = _probed(slots, "residual", x, aux)
    new_carry = carry | {"x": x}
    if c.kv_slot and not c.attention.shared_kv:
      new_carry["kv"] = carry["kv"] | {c.kv_slot: kv}
    if "hidden" in ctx.capture:
      aux["hidden"] = x
    if ctx.step is not None and cache is not None:
      T = x.shape[1]
      aux["cache"] = {
        name: stored(cache[name], new[:, -T:], ctx.step) for name, new in zip(("k", "v"), kv, strict=True) if name in cache
      }
    if "ple" in ctx.capture and per_layer_input is not None:
      aux["ple"] = per_layer_input
    return new_carry, aux

  @jax.named_scope("per_layer_input")
  def _per_layer(self, p, x, per_layer_input):
    """projection(gelu(gate(x)) * input), float32: a norm follows, and amplifies what rounding leaves of a small product.

    Returns [B, T, D] and the number of rescued values.
    """
    gate = self.precision.einsum("BTD,DP->BTP", x, p["gate"], float32=True, unbounded=True)
    per_layer_input = per_layer_input.astype(jnp.float32)
    if self.precision.dtype == "float16":
      hidden, unit, rescued = float16_gated_product(gate, per_layer_input, self.cfg.mlp.activation, self.precision)
      out = self.precision.einsum("BTP,PD->BTD", hidden, p["projection"], float32=True) * unit
      return rescue_output(out, rescued, self.precision)
    with jax.named_scope("gate_product"):
      hidden = activate(gate, self.cfg.mlp.activation) * per_layer_input
    return self.precision.einsum("BTP,PD->BTD", hidden, p["projection"], float32=True), jnp.zeros((), jnp.int32)


@dataclass(frozen=True, kw_only=True)
class DeepSeekLayerConfig:
  """One layer of DeepSeek V3 or V3.2: latent attention and either an MLP or experts."""

  attention: MLAConfig
  mlp: MLPConfig | None = None
  moe: MoEConfig | None = None
  epsilon: float = 1e-6

  def __post_init__(self):
    if (self.mlp is None) == (self.moe is None):
      raise ValueError("a layer has either an MLP or experts")


@dataclass(frozen=True)
class DeepSeekLayer:
  """Norm, latent attention, add; norm, MLP or experts, add."""

  cfg: DeepSeekLayerConfig
  precision: Precision

  @property
  def mixer(self) -> MLA:
    """What mixes the positions of a row."""
    return MLA(self.cfg.attention, self.precision)

  def _norm(self) -> RMSNorm:
    c = self.cfg
    norm = NormConfig(dim=c.attention.emb_dim, epsilon=c.epsilon, round_before_scale=True)
    return RMSNorm(norm, self.precision)

  def params(self) -> dict:
    c = self.cfg
    spec = {
      "pre_attention_norm": self._norm().params(),
      "attention": self.mixer.params(),
      "pre_mlp_norm": self._norm().params(),
    }
    if c.mlp:
      return spec | {"mlp": MLP(c.mlp, self.precision).params()}
    return spec | ({"moe": MoE(c.moe, self.precision).params()} if c.moe else {})

  def cache_slots(self, length: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Slots of this layer's cache in rows of ``length`` tokens, and its arrays' shapes without batch and slots."""
    return length, self.mixer.cache_shapes()

  def __call__(
    self,
    p: dict,
    carry: Carry,
    ctx: Context,
    per_layer_input: jax.Array | None = None,
    cache: dict | None = None,
    slots: dict | None = None,
  ) -> tuple[Carry, Aux]:
    """carry["x"]: [B, T, D] in the residual dtype; cache: of earlier tokens, or None; slots: float32 [2] for each of
    ``PROBED``, or None."""
    aux: Aux = {}
    c, norm, residual = self.cfg, self._norm(), self.precision.residual
    x = carry["x"]
    out, attention_aux = self.mixer(
      p["attention"], norm(p["pre_attention_norm"], x), ctx.positions, ctx.tokens, cache, ctx.step
    )
    out = _probed(slots, "attention", out, aux)
    x = _add(x, out.astype(residual))
    y = norm(p["pre_mlp_norm"], x)
    if c.mlp:
      out, rescued = MLP(c.mlp, self.precision).forward(p["mlp"], y)
      aux["rescued"] = rescued
    else:
      assert c.moe, "one of the two; see DeepSeekLayerConfig"
      out, moe_aux = MoE(c.moe, self.precision)(p["moe"], y, live=ctx.live)
      aux |= _moe_aux(moe_aux, ctx)
    out = _probed(slots, "mlp", out, aux)
    x = _probed(slots, "residual", _add(x, out.astype(residual)), aux)
    if "indexer_loss" in attention_aux:
      aux["indexer_loss"] = attention_aux["indexer_loss"]
    if "indexer" in ctx.capture and "topk_idx" in attention_aux:
      aux["indexer.topk_idx"] = attention_aux["topk_idx"]
    if "cache" in attention_aux:
      aux["cache"] = attention_aux["cache"]
    if "hidden" in ctx.capture:
      aux["hidden"] = x
    return carry | {"x": x}, aux
