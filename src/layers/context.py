"""``Context``: the arguments of a layer other than the residual stream, and the values that it reports.

Mixers and feed-forward layers have the signature ``part(p, x, ctx) -> out``. Their other results (statistics, captured arrays,
probes, cache entries, keys and values for later layers) are collected in the context. A layer creates a collecting context
inside its own call (``ctx.collecting()``) and returns the collected values as aux. This is needed because a value can only
leave a transformed function (scan, remat) as a result.

B batch, T position (in generation, the new tokens), D model, P per-layer width.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.cache import Step, extended, split_over_mesh
from maxtext_like.layers.kernels.grouped_matmul.registry import Name
from maxtext_like.layers.probe import probe
from maxtext_like.layers.sharding_rules import RULES, Rules

Aux = dict[str, Any]
KeysValues = tuple[jax.Array, jax.Array]

CAPTURES = ("hidden", "router", "indexer", "ple", "vision")
PROBED = ("attention", "mlp", "residual")
"""Points that probes can observe: the output of the mixer, that of the feed-forward layer, and the stream after the layer."""


class Taps:
  """Values that one layer has reported so far, by name. An object belongs to one trace. It is not an array, so a context that
  contains one cannot be an argument of jit, scan or checkpoint."""

  def __init__(self):
    self.found: Aux = {}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
  """Arguments of a layer other than parameters and the residual stream.

  Attributes:
    positions: int32 [B, T], positions in tokens, for the rotary angle.
    tokens: segments and images.
    step: position of the new tokens relative to the cache, in generation.
    capture: names of ``CAPTURES`` to return in aux.
    rules: sharding of activations over the current mesh.
    grouped: name of the kernel that multiplies tokens by their experts.
    balance_load: ``load_balance.LOAD`` of the complete batch, if these rows are only a part of it; None otherwise.
    cache: the cache entries of this layer, in generation; empty if the layer reuses those of another layer.
    probes: float32 [2] for each of ``PROBED`` (see ``layers.probe``); None: no probes.
    per_layer_input: [B, T, P], the per-layer input (Gemma 4 E2B and E4B).
    shared: keys and values that earlier layers share, by name.
    stream: [B, T, D], the residual stream from which the normed input was computed.
    kept_apart: XLA cannot fuse this layer's saved products with the operations that computed them, because they are stored
      by a loop or protected by a barrier until the backward pass.
    taps: collected values; None if the context does not collect.
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
    """Create the context of rows x [B, T, ...]. positions default to 0, 1, 2, ..."""
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return cls(positions, tokens, **values)

  @property
  def real(self) -> jax.Array | None:
    """bool [B, T]: which tokens are real; None: all of them."""
    return None if self.tokens.segments is None else self.tokens.segments > 0

  def collecting(self, **values: Any) -> "Context":
    """Return a copy with some attributes replaced and an empty collection, which ``aux`` returns."""
    return replace(self, taps=Taps(), **values)

  def at_stream(self, stream: jax.Array) -> "Context":
    """Return a copy with another residual stream, which adds to the same collection."""
    return replace(self, stream=stream)

  @property
  def aux(self) -> Aux:
    """The values collected since ``collecting``. A context that does not collect drops all values."""
    return {} if self.taps is None else self.taps.found

  def tap(self, name: str, x: jax.Array) -> jax.Array:
    """Return x. Report x if its name, or the part before the dot, is captured.

    If the name has a probe, also report the statistics of x, and pass the statistics of its cotangent to the probe."""
    # Probe first, so that a capture returns the probed array.
    if self.probes is not None and name in self.probes:
      x, self.aux[f"probe.{name}"] = probe(x, self.probes[name])
    if name.partition(".")[0] in self.capture:
      self.aux[name] = x
    return x

  def report(self, name: str, value: jax.Array) -> None:
    """Report a statistic, independent of captures. Several values with one name are added."""
    self.aux[name] = self.aux[name] + value if name in self.aux else value

  def update_cache(self, **new: jax.Array) -> dict[str, jax.Array]:
    """Store the entries of the new tokens in the cache. Return the entries that these tokens may see, by name.

    Args:
      new: [B, T, ..., X], entries of the new tokens.

    Returns:
      Without a cache, the arguments. Otherwise [B, ..., S, X], see ``Step.extended``.
    """
    # Without a cache, the layer reads only the current tokens.
    if self.cache is None or self.step is None:
      return new
    if self.taps is None:
      raise ValueError(
        "context: a layer has a cache, but its context does not collect values, so new cache entries would be lost\n  fix: use "
        "ctx.collecting()"
      )
    # New entries are stored for the next call, and attention reads all entries of the row.
    stored, held = {}, {}
    for name, x in new.items():
      arrays, held[name] = extended(self.step, self.cache, name, x)
      stored |= {key: split_over_mesh(x, self.rules) for key, x in arrays.items()}
    self.aux["cache"] = stored
    return held

  def share_kv(self, name: str, kv: KeysValues) -> None:
    """Share keys and values with later layers, which find them in ``shared`` under this name."""
    self.aux["shared_kv"] = self.aux.get("shared_kv", {}) | {name: kv}
