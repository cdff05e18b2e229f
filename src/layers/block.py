"""``Block``: one layer of a decoder. It adds a mixer and a feed-forward layer, with their norms, to the residual stream.

B batch, T position, D model.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import jax

from maxtext_like.layers.attention.masks import zeroed
from maxtext_like.layers.context import Aux, Context
from maxtext_like.layers.kernels.attention.registry import Case, Choice, Name
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, constant
from maxtext_like.layers.per_layer import PerLayerGate, PerLayerGateConfig
from maxtext_like.layers.precision import Precision

Carry = dict[str, Any]  # {"x": [B, T, D]}, and {"kv": {name: (k, v)}} if layers share keys and values


class Mixer(Protocol):
  """A layer that mixes the positions of a row: ``Attention``, ``MLA``. See ``Attention`` for the methods."""

  def params(self) -> dict: ...
  def __call__(self, p: dict, x_BTD: jax.Array, ctx: Context) -> jax.Array: ...
  def case(self, length: int, *, images: bool, documents: bool = False, context: int = 1) -> Case: ...
  def cache_shapes(self, length: int) -> tuple[int, dict[str, tuple[int, ...]]]: ...
  def shared_kv(self) -> dict[str, tuple[int, ...]]: ...


class FeedForward(Protocol):
  """A layer that works on each position separately: ``MLP``, ``MoE``, ``DenseAndMoE``.

  name: key of its parameters in the block's tree. None: its parameters are entries of the block's tree themselves."""

  name: ClassVar[str | None]

  def params(self) -> dict: ...
  def __call__(self, p: dict, x_BTD: jax.Array, ctx: Context) -> jax.Array: ...


class MixerConfig(Protocol):
  """The configuration of a mixer, including its kernel and the platform of the program."""

  @property
  def kernel(self) -> Choice: ...
  @property
  def platform(self) -> str: ...
  @property
  def capability(self) -> str | None: ...
  @property
  def failed(self) -> tuple[Name, ...]: ...
  def layer(self, precision: Precision) -> Mixer: ...


class FeedForwardConfig(Protocol):
  """The configuration of a feed-forward layer. ``experts`` is the configuration of its experts, or None if it has none."""

  @property
  def experts(self) -> Any: ...
  def layer(self, precision: Precision) -> FeedForward: ...


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
  """Settings of one block.

  Attributes:
    mixer, ffn: configurations of the two parts.
    norm: norm of their inputs.
    sandwich: also norm their outputs before adding them to the residual stream (Gemma).
    branch_gain: initial scale of the norms of the two outputs.
    per_layer: settings of the per-layer input (Gemma 4 E2B, E4B); None if the model has none.
    layer_scalar: multiply the residual stream by a stored number at the end of the block (Gemma 4).
  """

  mixer: MixerConfig
  ffn: FeedForwardConfig
  norm: NormConfig
  sandwich: bool = False
  branch_gain: float = 1.0
  per_layer: PerLayerGateConfig | None = None
  layer_scalar: bool = False


@dataclass(frozen=True)
class Block:
  """Norm, mixer, add; norm, feed-forward, add. Some models add a per-layer input and multiply by a scalar at the end."""

  cfg: BlockConfig
  precision: Precision

  @property
  def mixer(self) -> Mixer:
    """The layer that mixes the positions of a row."""
    return self.cfg.mixer.layer(self.precision)

  @property
  def ffn(self) -> FeedForward:
    """The layer that works on each position separately."""
    return self.cfg.ffn.layer(self.precision)

  @property
  def _norm(self) -> RMSNorm:
    return RMSNorm(self.cfg.norm, self.precision)

  def params(self) -> dict:
    c, norm, ffn = self.cfg, self._norm.params(), self.ffn
    spec: dict[str, Any] = {"pre_attention_norm": norm, "attention": self.mixer.params(), "pre_mlp_norm": norm}
    # A sandwich norm also norms the outputs of both parts.
    if c.sandwich:
      branch_norm = RMSNorm(replace(c.norm, initial_scale=c.branch_gain), self.precision).params()
      spec |= {"post_attention_norm": branch_norm, "post_mlp_norm": branch_norm}
    spec |= {ffn.name: ffn.params()} if ffn.name else ffn.params()
    # Parts that only some models have.
    if c.per_layer:
      spec["ple"] = PerLayerGate(c.per_layer, self.precision).params()
    if c.layer_scalar:
      spec["layer_scalar"] = Param((), (), self.precision.weight_dtype, constant(1.0), trainable=False)
    return spec

  def __call__(self, p: dict, carry: Carry, ctx: Context) -> tuple[Carry, Aux]:
    """Run the block. Return the carry after it, and the values that its parts report.

    Args:
      p: parameters.
      carry: "x", [B, T, D] in the residual dtype, and "kv", the keys and values that earlier layers share.
      ctx: context of the pass, with the cache, probes and per-layer input of this layer.
    """
    # Mixer: norm, mix positions, add to the stream.
    x = carry["x"]
    ctx = ctx.collecting(stream=x, shared=carry.get("kv", {}))
    x, normed = self._normed(p, "pre_attention_norm", x)
    out = self.mixer(p["attention"], normed, ctx)
    x = self._joined(p, x, "post_attention_norm", ctx.tap("attention", out), ctx.tokens.real)
    # Feed-forward layer: norm, work on each position, add to the stream.
    ctx = ctx.at_stream(x)
    ffn = self.ffn
    x, normed = self._normed(p, "pre_mlp_norm", x)
    out = ffn(p[ffn.name] if ffn.name else p, normed, ctx)
    x = self._joined(p, x, "post_mlp_norm", ctx.tap("mlp", out))
    # Per-layer input and scalar of Gemma 4.
    if self.cfg.per_layer:
      x = _add(x, PerLayerGate(self.cfg.per_layer, self.precision)(p["ple"], x, ctx))
    if self.cfg.layer_scalar:
      with jax.named_scope("residual"):
        x = x * p["layer_scalar"].astype(x.dtype)
    # Report captures and probes, and pass this layer's shared keys and values on in the carry.
    x = ctx.tap("hidden", ctx.tap("residual", x))
    # Only a layer with ``shares_kv_as`` reports keys and values.
    shared = ctx.aux.pop("shared_kv", {})
    return carry | {"x": x} | ({"kv": carry["kv"] | shared} if shared else {}), ctx.aux

  def _normed(self, p: dict, norm: str, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the residual stream, and its normed form that a part of the block reads."""
    with jax.named_scope(norm):
      return self._norm.with_input(p[norm], x_BTD)

  def _joined(self, p: dict, x_BTD: jax.Array, norm: str, out_BTD: jax.Array, real_BT: jax.Array | None = None) -> jax.Array:
    """Add the output of a part to the residual stream, in the dtype of the stream. No other code decides this dtype.

    The output is normed first if ``sandwich`` is set. Nothing is added at positions where ``real_BT`` is False."""
    # The dtype of the stream, which may be wider than that of the layers.
    residual = self.precision.residual
    if self.cfg.sandwich:
      return _add(x_BTD, named(self._norm, p, norm, out_BTD, residual, real=real_BT))
    return _add(x_BTD, zeroed(out_BTD, real_BT).astype(residual))


@jax.named_scope("residual")
def _add(x: jax.Array, branch: jax.Array) -> jax.Array:
  return x + branch
