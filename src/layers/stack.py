"""``Stack``: groups the layers of a model into runs of equal rows, so that ``lax.scan`` can run each of them. Also combines the
statistics, losses and captured arrays of all layers of a decoder."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.block import Block
from maxtext_like.layers.cache import cache_arrays
from maxtext_like.layers.context import CAPTURES, PROBED, Aux
from maxtext_like.layers.moe import load_balance
from maxtext_like.layers.moe.load_balance import LOAD, NAMES
from maxtext_like.layers.moe.router_losses import RouterLosses
from maxtext_like.layers.param import stack


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

  def empty_cache(self, layers: Sequence[Block], rows: int, capacity: int, *, apart: bool, int8: bool) -> Any:
    """Create the caches of the stack, see ``Decoder.empty_cache``. ``layers`` are all layers of the model."""

    def zeros(*first: int) -> dict[str, dict[str, jax.Array]]:
      found: dict[str, dict[str, jax.Array]] = {}
      for j, layer in enumerate(self.layers):
        slots, shapes = layer.mixer.cache_shapes(capacity)
        dtype = functools.reduce(jnp.promote_types, {row[j].precision.dtype for _, row in self.split(layers)})
        own = found[f"layer_{j}"] = {}
        for name, shape in shapes.items():
          own |= cache_arrays(name, (*first, rows, *shape[:-1], slots, shape[-1]), dtype, int8=int8)
      return found

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
