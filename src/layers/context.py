"""What travels beside the residual stream: where the tokens stand, what a layer is given, and what it hands out.

Mixers and feed-forwards are ``part(p, x, ctx) -> out``. Whatever else they make (statistics, captured arrays, probes, what a
cache holds, keys and values for later layers) goes through the context, so that it is no part of their results. A layer
collects it inside its own call, ``ctx.collecting()``, and hands it on as aux: nothing leaves a trace (scan, remat) but as
a value of it.

B batch, T position, D model, P per-layer width.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.cache import Step, joined, stored
from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.grouped_matmul.registry import Name
from maxtext_like.layers.probe import probe
from maxtext_like.layers.sharding_rules import RULES, Rules

Aux = dict[str, Any]
KeysValues = tuple[jax.Array, jax.Array]

CAPTURES = ("hidden", "router", "indexer", "ple", "vision")
PROBED = ("attention", "mlp", "residual")
"""What a layer's probes look at: the output of its mixer, of its feed-forward, and the residual stream after the layer."""


class Taps:
  """What one layer has handed out so far, by name. It belongs to one trace: being no array, it lets no context that has one
  enter another (jit, scan, checkpoint)."""

  def __init__(self):
    self.found: Aux = {}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
  """What every layer of a forward pass sees, and what this one is given.

  Attributes:
    positions: int32 [B, T], in tokens; the rotary angle.
    tokens: segments and images.
    step: where the tokens stand after those of the caches, in generation.
    capture: names of ``CAPTURES`` to hand out in aux.
    rules: how activations are split over the mesh in use.
    grouped: the kernel that multiplies tokens with their experts.
    balance_load: ``load_balance.LOAD`` of the complete batch, where the rows are a part of it; None: they are all of it.
    cache: what this layer holds of earlier tokens, in generation; empty where it borrows another's.
    probes: float32 [2] for each of ``PROBED`` (see ``layers.probe``); None: nothing is probed.
    per_layer_input: [B, T, P], this layer's own small input (Gemma 4 E2B and E4B).
    shared: keys and values that earlier layers lend, by name.
    stream: [B, T, D], the residual stream that the normed input was made of.
    kept_apart: where this layer's products wait for its backward pass, in stacks of a loop or behind a barrier, XLA does not
      see what made them.
    taps: of a context that collects.
  """

  positions: jax.Array
  tokens: Tokens = Tokens()
  step: Step | None = None
  capture: frozenset[str] = field(default=frozenset(), metadata={"static": True})
  rules: Rules = field(default=RULES, metadata={"static": True})
  grouped: Name = field(default="ragged_dot", metadata={"static": True})
  balance_load: jax.Array | None = None
  cache: dict[str, jax.Array] | None = None
  probes: dict[str, jax.Array] | None = None
  per_layer_input: jax.Array | None = None
  shared: dict[str, KeysValues] = field(default_factory=dict)
  stream: jax.Array | None = None
  kept_apart: bool = field(default=False, metadata={"static": True})
  taps: Taps | None = None

  @classmethod
  def of(cls, x: jax.Array, positions: jax.Array | None = None, tokens: Tokens = Tokens(), **values: Any) -> "Context":
    """That of rows x [B, T, ...], whose positions are 0, 1, 2, ... where none are given."""
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return cls(positions, tokens, **values)

  @property
  def real(self) -> jax.Array | None:
    """bool [B, T]: real tokens; None: all of them."""
    return None if self.tokens.segments is None else self.tokens.segments > 0

  def collecting(self, **values: Any) -> "Context":
    """The same with some attributes replaced, whose taps are collected in ``aux``."""
    return replace(self, taps=Taps(), **values)

  def reading(self, stream: jax.Array) -> "Context":
    """The same, collecting into the same aux, at a later point of the stream."""
    return replace(self, stream=stream)

  @property
  def aux(self) -> Aux:
    """What was handed out since ``collecting``; nothing is kept of what is handed to a context that does not collect."""
    return {} if self.taps is None else self.taps.found

  def tap(self, name: str, x: jax.Array) -> jax.Array:
    """x itself. Where its name is probed its statistics are handed out, and those of its cotangent go to the probe; where
    its name, or what stands before the dot, is captured, x is handed out."""
    if self.probes is not None and name in self.probes:
      x, self.aux[f"probe.{name}"] = probe(x, self.probes[name])
    if name.partition(".")[0] in self.capture:
      self.aux[name] = x
    return x

  def note(self, name: str, value: jax.Array) -> None:
    """Hands out a statistic, whether it is asked for or not. What a layer notes several times adds up."""
    self.aux[name] = self.aux[name] + value if name in self.aux else value

  def remember(self, **new: jax.Array) -> dict[str, jax.Array]:
    """What the layer reads of all tokens so far, [B, S, ...] by name; in generation it is kept for later ones.

    Args:
      new: [B, T, ...], of the tokens at hand.
    """
    if self.cache is None or self.step is None:
      return new
    if self.taps is None:
      raise ValueError("a cache was given to a layer whose context does not collect: what it stores would be lost")
    self.aux["cache"] = {name: stored(self.cache[name], x, self.step) for name, x in new.items()}
    return {name: joined(self.cache[name], x) for name, x in new.items()}

  def lend(self, name: str, kv: KeysValues) -> None:
    """Hands keys and values to later layers, which find them in ``shared`` under this name."""
    self.aux["lent"] = self.aux.get("lent", {}) | {name: kv}
