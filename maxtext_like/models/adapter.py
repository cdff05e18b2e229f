"""The adapter of a model: low-rank additions to some of its weights (LoRA, DoRA), a tree of parameters beside the model's own,
and arrays that are trained whole: of its vision tower, its embedding, its head.

The model's tree is what it is without them, so that weights are read, written and named as ever. The additions stand under
``ADAPTER``, each where the weight stands that it belongs to, and meet the weights where the decoder is called. So does an array
that is trained whole, under ``WHOLE``: its own of the model stays below it.
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
from maxtext_like.layers.param import Param, constant
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization.low_rank import Layout, LowRank, factors, merged
from maxtext_like.models.naming import ADAPTER, path_keys, row_names
from maxtext_like.models.quantised_base import QuantisedBase

Path = tuple[str, ...]
WHOLE = "whole"
"""The key of an array that is trained whole, where an addition has those of its factors."""


def model_path(path: Path) -> Path:
  """Where an array lies in the model's tree for which one is trained whole; any other path is as it is."""
  return path[1:-1] if path[0] == ADAPTER and path[-1] == WHOLE else path


class Merged(NamedTuple):
  """Weights with an adapter added.

  Attributes:
    params: the model's tree.
    squares: float32 [2], of all weights with an addition and all that are trained whole: sums of the squares of what rounding
      changed, and of what was added.
  """

  params: Any
  squares: jax.Array

  @property
  def rounding(self) -> float:
    """What rounding changed beside what the adapter adds."""
    error, added = (float(x) for x in self.squares)
    return math.sqrt(error / added) if added else 0.0


class Sizes(NamedTuple):
  """Rank and scale of the additions to a weight: those of each layer of its stack, of any other weight one."""

  ranks: tuple[int, ...]
  scales: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Adapter:
  """Which weights have an addition, and of which kind. Holds no array.

  Attributes:
    sizes: of the additions, by path: in a stack, factors have the largest rank of a layer, and beyond their own zeros, which
      no gradient moves.
    names: of the weights, a layer's own each: ``layers.7.attention.q``. A stack of which some layers alone are among them
      has factors for all, of which the others stay zero.
    weights: the declared weights, by path.
    whole: the declared arrays that are trained whole, by path; with statistics among them, which stay and which peft asks for.
    dora: the norms of the outputs are trained too.
    dropout: share of the inputs of the additions that are zero in training.
  """

  sizes: Mapping[Path, Sizes]
  names: frozenset[str]
  weights: Mapping[Path, Param]
  whole: Mapping[Path, Param] = dataclasses.field(default_factory=dict)
  dora: bool = False
  dropout: float = 0.0

  def size(self, path: Path, row: int | None) -> tuple[int, float]:
    """Rank and scale of the addition to a row of a weight; None: it is of no stack."""
    ranks, scales = self.sizes[path]
    i = row if row is not None and len(ranks) > 1 else 0
    return ranks[i], scales[i]

  @property
  def trained(self) -> frozenset[str]:
    """``names``, and those of the arrays that are trained whole, which are of no layer of the decoder."""
    return self.names | {".".join(path) for path in self.whole}

  def params(self) -> dict[str, Any]:
    """The declared factors, "lora_a" and "lora_b" where the weight stands (see ``low_rank.factors``), and ``WHOLE`` arrays; all
    float32."""
    found: dict[Path, Any] = {path: factors(p, max(self.sizes[path].ranks), dora=self.dora) for path, p in self.weights.items()}
    begun = {"dtype": "float32", "init": constant(0.0), "contracts": ()}  # as ``started`` makes them
    return _nested(found | {path: {WHOLE: dataclasses.replace(p, **begun)} for path, p in self.whole.items()})

  def attach(self, params: dict[str, Any], rows: jax.Array | None = None) -> dict[str, Any]:
    """The model's tree as the decoder takes it, each weight with its addition.

    Args:
      params: the model's tree, and the additions under ``ADAPTER``.
      rows: uint32 [B, 2], the keys of a batch's rows (``dropout.ROWS``), in training; None: there is no dropout.
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
    """The model's tree, of arrays or whatever stands for them, with what is trained whole in its place, without additions."""
    return self._joined(params, lambda base, ab, path: ab[WHOLE] if path in self.whole else base)

  def started(self, params: dict[str, Any], precision: Precision, base: QuantisedBase | None = None) -> dict[str, Any]:
    """The model's tree and its additions: zeros beyond the rank of a layer, magnitudes that are the norms that the weights have
    now, and whole arrays as they are in the model.

    Args:
      params: as of ``attach``.
      precision: in which the weights are multiplied.
      base: how they are stored; None: as they are declared.
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
      weight = LowRank(below, ab["lora_a"], ab["lora_b"], Layout.of(p), 1.0)  # whatever the scale: B is zero
      norms = lambda weight: weight.norms(precision)
      found[path] = ab | {"lora_magnitude": norms(weight) if p.rows is None else jax.lax.map(norms, weight)}

    self._joined(params if base is None else base.attach(params), measure)
    return {**params, ADAPTER: _nested(found)}

  def merge(self, params: dict[str, Any], dtype: Any = None, base: QuantisedBase | None = None) -> "Merged":
    """The model's tree with every addition added to its weight, in float32 and rounded once, one layer at a time.

    Args:
      params: the model's tree as it is stored, and the additions under ``ADAPTER``.
      dtype: of the weights that have an addition; None: their own.
      base: how the weights are stored; each that is quantised is made whole. None: as they are declared.
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
    """The scale of a weight's additions, and its B; where layers of a stack have scales of their own, the largest, and each
    layer's B times its share of that."""
    scales = self.sizes[path].scales
    largest = max(scales)
    if len(set(scales)) == 1:
      return largest, b
    shares = np.array(scales, np.float32) / np.float32(largest)
    return largest, b * shares.reshape(-1, *(1,) * (b.ndim - 1))

  def _of_rank(self, path: Path, a: jax.Array) -> jax.Array:
    """A with zeros beyond the rank of each layer of a stack."""
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
  """The adapter of some weights of a model.

  Args:
    decoder: the model.
    names: of the weights.
    settings: of the adapter.
    ranks, alphas: of weights, by name, that have others than the settings say.
    whole: what is trained whole: paths of tables, or of parts of the vision tower, as ("vision", "projector").
  """
  declared = {path_keys(path): p for path, p in jax.tree_util.tree_leaves_with_path(decoder.params())}
  weights = {path: p for path, p in declared.items() if names & set(row_names(decoder, path))}
  apart = {path: p for path, p in declared.items() if any(path[: len(part)] == part for part in whole)}
  s = settings

  def sizes(path: Path) -> Sizes:
    layers = row_names(decoder, path)
    own = next(name for name in layers if name in names)  # layers without an addition take that of one that has
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
