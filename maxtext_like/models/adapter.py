"""``Adapter``: low-rank adapters of some weights of a model (LoRA, DoRA), and parts of the model that are trained completely
(of its vision tower, its embedding, its head).

The model's own tree of parameters does not change, so weights are read, written and named as without an adapter. The adapter's
arrays are in a tree under ``ADAPTER``, with the paths of their weights. They are combined with the weights when the decoder is
called. An array that is trained completely is stored there too, under ``WHOLE``; the model's original array stays in the
model's tree.
"""

import dataclasses
import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.config.adapter_keys import AdapterConfig
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.dropout import Dropout, folded
from maxtext_like.layers.param import Param, constant, path_keys
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization.low_rank import Layout, LowRank, factors, merged
from maxtext_like.models.naming import ADAPTER, row_names
from maxtext_like.models.quantized_base import QuantizedBase

Path = tuple[str, ...]
WHOLE = "whole"
"""Key of an array that is trained completely. Low-rank factors have other keys."""


def model_path(path: Path) -> Path:
  """Convert the adapter path of a completely trained array to its path in the model's tree. Return other paths unchanged."""
  return path[1:-1] if path[0] == ADAPTER and path[-1] == WHOLE else path


class Merged(NamedTuple):
  """Weights with an adapter merged into them.

  Attributes:
    params: the model's tree.
    squares: float32 [2], over all weights with an adapter and all completely trained arrays: sum of squared rounding errors,
      and sum of squared changes by the adapter.
  """

  params: Any
  squares: jax.Array

  @property
  def rounding(self) -> float:
    """The size of rounding errors relative to the adapter's changes."""
    error, added = (float(x) for x in self.squares)
    return math.sqrt(error / added) if added else 0.0


class Sizes(NamedTuple):
  """Rank and scale of the adapter of a weight: one per layer of its stack, or one for a weight that is not stacked."""

  ranks: tuple[int, ...]
  scales: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Adapter:
  """The weights that have an adapter, and the kind of adapter. Holds no arrays.

  Attributes:
    sizes: ranks and scales by path. In a stack, the factors have the largest rank of its layers. Beyond the rank of a layer
      they are zero, and no gradient changes that.
    names: names of the weights, one per layer: ``layers.7.attention.q``. If only some layers of a stack have an adapter, the
      factors exist for all layers, and stay zero for the others.
    weights: the declared weights, by path.
    whole: the completely trained arrays, by path. They include statistics, which do not change but which peft expects.
    dora: also train the norms of the outputs.
    dropout: fraction of the adapters' inputs that are set to zero in training.
  """

  sizes: Mapping[Path, Sizes]
  names: frozenset[str]
  weights: Mapping[Path, Param]
  whole: Mapping[Path, Param] = dataclasses.field(default_factory=dict)
  dora: bool = False
  dropout: float = 0.0

  def size(self, path: Path, row: int | None) -> tuple[int, float]:
    """Return rank and scale of the adapter of one row of a weight. row is None for a weight that is not stacked."""
    ranks, scales = self.sizes[path]
    i = row if row is not None and len(ranks) > 1 else 0
    return ranks[i], scales[i]

  @property
  def trained(self) -> frozenset[str]:
    """``names``, and the names of completely trained arrays, which belong to no layer of the decoder."""
    return self.names | {".".join(path) for path in self.whole}

  def params(self) -> dict[str, Any]:
    """Declare the adapter's arrays, all float32: "lora_a" and "lora_b" at the path of the weight (see ``low_rank.factors``),
    and ``WHOLE`` arrays."""
    found: dict[Path, Any] = {path: factors(p, max(self.sizes[path].ranks), dora=self.dora) for path, p in self.weights.items()}
    begun = {"dtype": "float32", "init": constant(0.0), "contracts": ()}  # ``started`` sets their values
    return _nested(found | {path: {WHOLE: dataclasses.replace(p, **begun)} for path, p in self.whole.items()})

  def attach(self, params: dict[str, Any], rows: jax.Array | None = None) -> dict[str, Any]:
    """Return the model's tree in the form that the decoder reads, with each adapted weight as a ``LowRank``.

    Args:
      params: the model's tree, and the adapter's arrays under ``ADAPTER``.
      rows: uint32 [B, 2], keys of the rows of a batch (``dropout.ROWS``), in training; None: no dropout.
    """

    def join(base, ab, path):
      if path in self.whole:
        return ab[WHOLE]
      p, dropout = self.weights[path], None
      if rows is not None and self.dropout:
        keys = folded(rows, jnp.array(zlib.crc32("/".join(path).encode()), jnp.uint32))
        dropout = Dropout(keys if p.rows is None else folded(keys, jnp.arange(p.rows)), self.dropout)
      magnitude = ab.get("lora_magnitude")
      scale, b = self._scaled(path, ab["lora_b"])
      return LowRank(base, ab["lora_a"], b, Layout.of(p), scale, magnitude, dropout)

    return self._joined(params, join)

  def replaced(self, params: dict[str, Any]) -> dict[str, Any]:
    """Return the model's tree, of arrays or other leaves, with completely trained arrays replaced, and without adapters."""
    return self._joined(params, lambda base, ab, path: ab[WHOLE] if path in self.whole else base)

  def started(self, params: dict[str, Any], precision: Precision, base: QuantizedBase | None = None) -> dict[str, Any]:
    """Set the initial values that depend on the model: zeros beyond the rank of a layer, magnitudes equal to the current norms
    of the weights, and completely trained arrays equal to those of the model.

    Args:
      params: as in ``attach``.
      precision: precision in which the weights are multiplied.
      base: storage of the weights; None: as declared.
    """
    if not (self.dora or self.whole or any(len(set(own.ranks)) > 1 for own in self.sizes.values())):
      return params

    found: dict[Path, Any] = {}

    def measure(below, ab, path):
      if path in self.whole:
        found[path] = {WHOLE: below.astype(jnp.float32)}
        return
      found[path] = ab = ab | {"lora_a": self._of_rank(path, ab["lora_a"])}
      if not self.dora:
        return
      p = self.weights[path]
      weight = LowRank(below, ab["lora_a"], ab["lora_b"], Layout.of(p), 1.0)  # the scale does not matter: B is zero
      norms = lambda weight: weight.norms(precision)
      found[path] = ab | {"lora_magnitude": norms(weight) if p.rows is None else jax.lax.map(norms, weight)}

    self._joined(params if base is None else base.attach(params), measure)
    return {**params, ADAPTER: _nested(found)}

  def merge(self, params: dict[str, Any], dtype: Any = None, base: QuantizedBase | None = None) -> "Merged":
    """Merge every adapter into its weight, in float32, rounded once, one layer at a time.

    Args:
      params: the model's stored tree, and the adapter's arrays under ``ADAPTER``.
      dtype: dtype of the merged weights; None: their own.
      base: storage of the weights. Quantized weights are dequantized. None: as declared.
    """
    sums: list[jax.Array] = []

    def squares_of(out, exact, below):
      return jnp.stack([jnp.sum(jnp.square(x)) for x in (out.astype("float32") - exact, exact - below)])

    def add(stored, ab, path):
      if path in self.whole:
        exact = ab[WHOLE].astype("float32")
        out = exact.astype(dtype or stored.dtype)
        sums.append(squares_of(out, exact, stored.astype("float32")))
        return out
      p, layout = self.weights[path], Layout.of(self.weights[path])
      scale, b = self._scaled(path, ab["lora_b"])

      def one(row):
        stored, ab = row
        below = base.values(path, stored, "float32") if base and path in base.weights else stored.astype("float32")
        exact = merged(below, ab["lora_a"], ab["lora_b"], layout, scale, ab.get("lora_magnitude"))
        out = exact.astype(dtype or p.dtype)
        return out, squares_of(out, exact, below)

      ab = ab | {"lora_b": b}
      out, squares = one((stored, ab)) if p.rows is None else jax.lax.map(one, (stored, ab))
      sums.append(jnp.sum(squares.reshape(-1, 2), axis=0))
      return out

    tree = self._joined(params, add)
    tree = tree if base is None else base.whole(tree, leave=self.weights)
    return Merged(tree, sum(sums, jnp.zeros(2)))

  def _scaled(self, path: Path, b: jax.Array) -> tuple[float, jax.Array]:
    """Return the scale of a weight's adapter, and its B. If layers of a stack have different scales, return the largest scale,
    and multiply each layer's B by its scale relative to that."""
    scales = self.sizes[path].scales
    largest = max(scales)
    if len(set(scales)) == 1:
      return largest, b
    shares = np.array(scales, np.float32) / np.float32(largest)
    return largest, b * shares.reshape(-1, *(1,) * (b.ndim - 1))

  def _of_rank(self, path: Path, a: jax.Array) -> jax.Array:
    """Return A with zeros beyond the rank of each layer of a stack."""
    ranks = self.sizes[path].ranks
    if len(set(ranks)) == 1:
      return a
    kept = np.arange(a.shape[-1]) < np.array(ranks)[:, None]
    return a * kept.reshape(len(ranks), *(1,) * (a.ndim - 2), -1)

  def _joined(self, params, join) -> dict[str, Any]:
    base = {name: value for name, value in params.items() if name != ADAPTER}

    def walk(node: Any, added: Any, path: Path) -> Any:
      if path in self.weights or path in self.whole:
        return join(node, added, path)
      if not isinstance(node, dict) or added is None:
        return node
      return {name: walk(value, added.get(name), (*path, name)) for name, value in node.items()}

    return walk(base, params[ADAPTER], ())


def make_adapter(
  decoder: Decoder,
  names: frozenset[str],
  settings: AdapterConfig,
  whole: Collection[Path] = (),
  *,
  ranks: Mapping[str, int] = MappingProxyType({}),
  alphas: Mapping[str, float] = MappingProxyType({}),
) -> Adapter:
  """Create the adapter of a model.

  Args:
    decoder: the model.
    names: names of the weights.
    settings: settings of the adapter.
    ranks, alphas: for weights that differ from the settings, by name.
    whole: paths of tables, or of parts of the vision tower such as ("vision", "projector"), to train completely.
  """
  declared = {path_keys(path): p for path, p in jax.tree_util.tree_leaves_with_path(decoder.params())}
  weights = {path: p for path, p in declared.items() if names & set(row_names(decoder, path))}
  apart = {path: p for path, p in declared.items() if any(path[: len(part)] == part for part in whole)}
  s = settings

  def sizes(path: Path) -> Sizes:
    layers = row_names(decoder, path)
    own = next(name for name in layers if name in names)  # layers without an adapter get the sizes of one that has it
    layers = [name if name in names else own for name in layers]
    found = tuple(ranks.get(name, s.lora_rank) for name in layers)
    return Sizes(found, tuple(s.scale(rank, alphas.get(name, s.alpha)) for rank, name in zip(found, layers, strict=True)))

  return Adapter({path: sizes(path) for path in weights}, names, weights, apart, dora=s.lora_dora, dropout=s.lora_dropout)


def _nested(leaves: dict[Path, Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for path, value in leaves.items():
    node = tree
    for name in path[:-1]:
      node = node.setdefault(name, {})
    node[path[-1]] = value
  return tree
