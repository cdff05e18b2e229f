"""``Block``, one layer of a decoder, and ``Stack``, a run of equal layers.

A block adds a mixer and a feed-forward layer, with their norms, to the residual stream. ``find_stacks`` groups the layers of a
model into stacks, so that ``lax.scan`` can run each of them, and ``totals`` and ``captured`` combine what all layers report.

B batch, T position, D model.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import zeroed
from maxtext_like.layers.cache import cache_arrays
from maxtext_like.layers.context import CAPTURES, PROBED, Aux, Context
from maxtext_like.layers.kernels.attention.registry import Case, Choice, Name
from maxtext_like.layers.moe import load_balance
from maxtext_like.layers.moe.load_balance import LOAD, NAMES
from maxtext_like.layers.moe.router_losses import RouterLosses
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, constant, stack
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


@dataclass(frozen=True)
class Stack:
  """``repeats`` equal rows of a few layers each. ``first`` is the index of its first layer in the model."""

  name: str
  first: int
  layers: tuple[Block, ...]
  repeats: int

  def params(self) -> dict:
    return stack({f"layer_{j}": layer.params() for j, layer in enumerate(self.layers)}, self.repeats)

  def split(self, layers: Sequence[Block]) -> list[tuple[int, tuple[Block, ...]]]:
    """Split the stack where the precision of its layers changes. Return (number of rows, layers of a row) for each part.

    Args:
      layers: all layers of the model, with their own precisions.
    """
    period = len(self.layers)
    rows = [tuple(layers[self.first + r * period : self.first + (r + 1) * period]) for r in range(self.repeats)]
    return [(len(list(same)), row) for row, same in itertools.groupby(rows)]

  def empty_cache(self, layers: Sequence[Block], rows: int, capacity: int, *, apart: bool, int8: bool, spare: int = 0) -> Any:
    """Create the caches of the stack, see ``Decoder.empty_cache``. ``layers`` are all layers of the model."""

    def zeros(*first: int) -> dict[str, dict[str, jax.Array]]:
      found: dict[str, dict[str, jax.Array]] = {}
      for j, layer in enumerate(self.layers):
        slots, shapes = layer.mixer.cache_shapes(capacity)
        slots = min(slots + spare, capacity)  # only a ring is smaller than the capacity
        # A stack is one array for all its rows, so its cache has the widest dtype of its layers.
        dtype = functools.reduce(jnp.promote_types, {row[j].precision.dtype for _, row in self.split(layers)})
        own = found[f"layer_{j}"] = {}
        for name, shape in shapes.items():
          own |= cache_arrays(name, (*first, rows, *shape[:-1], slots, shape[-1]), dtype, int8=int8)
      return found

    # Parameters of ``Decoder.apart`` are not stacked, so their caches are not stacked either.
    return tuple(zeros() for _ in range(self.repeats)) if apart else zeros(self.repeats)

  def shared_slots(self, cache: Any) -> dict[str, int]:
    """Return the number of cache slots of the keys and values that layers of this stack share, by name."""
    row = cache[0] if isinstance(cache, tuple) else cache
    layers = ((layer.mixer, row[f"layer_{j}"]) for j, layer in enumerate(self.layers))
    return {name: next(iter(own.values())).shape[-2] for mixer, own in layers for name in mixer.shared_kv()}


def taken_caches(aux: dict[str, Aux]) -> dict[str, Any]:
  """Remove the caches from the aux values of the layers of a row. Return them by layer."""
  return {name: values.pop("cache", {}) for name, values in aux.items()}


def find_stacks(layers: Sequence[Block]) -> tuple[Stack, ...]:
  """Divide a list of layers into stacks of a repeating row.

  Each step, from the left, chooses the row whose repetition covers most layers, and the shortest of equal choices. Gemma's 5
  local and 1 global layer are one row of 6. DeepSeek's dense layers and its MoE layers are two stacks with rows of one layer.
  """
  stacks, at = [], 0
  while at < len(layers):
    best, repeats = 1, 1
    # Try every length of a row, and count how often it repeats from here.
    for period in range(1, (len(layers) - at) // 2 + 1):
      row, n = layers[at : at + period], 1
      while layers[at + n * period : at + (n + 1) * period] == row:
        n += 1
      if n > 1 and n * period > best * repeats:
        best, repeats = period, n
    stacks.append(Stack(f"stack_{len(stacks)}", at, tuple(layers[at : at + best]), repeats))
    at += best * repeats
  return tuple(stacks)


Collected = list[tuple[Stack, dict[str, Aux]]]


def totals(
  collected: Collected, router: tuple[RouterLosses, int] = (RouterLosses(), 0), load_LE: jax.Array | None = None
) -> dict[str, Any]:
  """Combine statistics over all layers: sums, means, router losses, and expert loads in the order of the layers.

  Args:
    collected: for each stack, the values that its layers reported. Every leaf has a leading axis of ``repeats``.
    router: the router losses, and the number of experts per token.
    load_LE: as in ``load_balance.totals``.
  """
  # Put the values of all layers into one array per name, in the order of the layers.
  found: dict[str, list[jax.Array]] = {}
  probes = [f"probe.{name}" for name in PROBED]
  for _, aux in collected:
    # Stack the layers of a row next to each other, so that the order is that of the model.
    layers = list(aux.values())
    for key in ("clamped", "indexer_loss", "moe_load", *NAMES, *probes):
      values = [a[key] for a in layers if key in a]
      if values:
        together = jnp.stack(values, axis=1)  # [repeats, layers of the row that have it, ...]
        found.setdefault(key, []).append(together.reshape(-1, *together.shape[2:]))
  joined = {key: jnp.concatenate(values) for key, values in found.items()}
  # Reduce over layers, and replace router statistics by the losses of the model.
  reduce = {"clamped": jnp.sum, "indexer_loss": jnp.mean}
  seen = {key.removeprefix("probe."): joined.pop(key) for key in probes if key in joined}
  losses, k = router
  statistics = {key: joined.pop(key) for key in NAMES if key in joined}
  if statistics:
    joined |= load_balance.totals(losses, statistics, k, load_LE)
  if LOAD in statistics:
    joined[LOAD] = statistics[LOAD]
  made = {key: reduce[key](value) if key in reduce else value for key, value in joined.items()}
  return made | ({"probes": seen} if seen else {})


def captured(collected: Collected) -> dict:
  """Return the captured arrays by name and layer: ``hidden.layerNN``, ``router.layerNN.scores``, ..."""
  # The name of a capture gets the index of its layer in the model.
  out = {}
  for s, aux in collected:
    for row in range(s.repeats):
      for j in range(len(s.layers)):
        number = f"layer{s.first + row * len(s.layers) + j:02d}"
        for key, value in aux[f"layer_{j}"].items():
          kind, _, rest = key.partition(".")
          if kind in CAPTURES:
            out[f"{kind}.{number}" + (f".{rest}" if rest else "")] = value[row]
  return out
