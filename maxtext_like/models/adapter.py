"""The adapter of a model: low-rank additions to some of its weights (LoRA, DoRA), a tree of parameters beside the model's own,
and arrays of its vision tower that are trained whole.

The model's tree is what it is without them, so that weights are read, written and named as ever. The additions stand under
``ADAPTER``, each where the weight stands that it belongs to, and meet the weights where the decoder is called. So does an array
that is trained whole, under ``WHOLE``: its own of the model stays below it.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.config.schema import AdapterConfig
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.dropout import Dropout, folded
from maxtext_like.layers.low_rank import Layout, LowRank, factors, merged
from maxtext_like.layers.param import Param, constant
from maxtext_like.layers.precision import Precision
from maxtext_like.models.naming import ADAPTER, path_keys, row_names
from maxtext_like.models.quantised_base import QuantisedBase

Path = tuple[str, ...]
WHOLE = "whole"
"""The key of an array that is trained whole, where an addition has those of its factors."""


class Merged(NamedTuple):
  """Weights with an adapter added.

  Attributes:
    params: the model's tree.
    squares: float32 [2], of all weights with an addition: sums of the squares of what rounding changed, and of the additions.
  """

  params: Any
  squares: jax.Array

  @property
  def rounding(self) -> float:
    """What rounding changed beside what the adapter adds."""
    error, added = (float(x) for x in self.squares)
    return math.sqrt(error / added) if added else 0.0


@dataclass(frozen=True, eq=False)
class Adapter:
  """Which weights have an addition, and of which kind. Holds no array.

  Attributes:
    rank: of the additions.
    scale: what multiplies them.
    names: of the weights, a layer's own each: ``layers.7.attention.q``. A stack of which some layers alone are among them
      has factors for all, of which the others stay zero.
    weights: the declared weights, by path.
    whole: the declared arrays that are trained whole, by path; with statistics among them, which stay and which peft asks for.
    dora: the norms of the outputs are trained too.
    dropout: share of the inputs of the additions that are zero in training.
  """

  rank: int
  scale: float
  names: frozenset[str]
  weights: Mapping[Path, Param]
  whole: Mapping[Path, Param] = dataclasses.field(default_factory=dict)
  dora: bool = False
  dropout: float = 0.0

  @property
  def trained(self) -> frozenset[str]:
    """``names``, and those of the arrays that are trained whole, which are of no layer of the decoder."""
    return self.names | {".".join(path) for path in self.whole}

  def params(self) -> dict[str, Any]:
    """The declared factors, "lora_a" and "lora_b" where the weight stands (see ``low_rank.factors``), and ``WHOLE`` arrays; all
    float32."""
    found: dict[Path, Any] = {path: factors(p, self.rank, dora=self.dora) for path, p in self.weights.items()}
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
      return LowRank(base, ab["lora_a"], ab["lora_b"], Layout.of(p), self.scale, magnitude, dropout)

    return self._joined(params, join)

  def started(self, params: dict[str, Any], precision: Precision, base: QuantisedBase | None = None) -> dict[str, Any]:
    """The model's tree and its additions, whose magnitudes are the norms that its weights have now, and whose whole arrays are
    what they are in the model.

    Args:
      params: as of ``attach``.
      precision: in which the weights are multiplied.
      base: how they are stored; None: as they are declared.
    """
    if not (self.dora or self.whole):
      return params

    found: dict[Path, Any] = {}

    def measure(below, ab, path):
      if path in self.whole:
        found[path] = {WHOLE: below.astype(jnp.float32)}
        return
      found[path] = ab
      if not self.dora:
        return
      p = self.weights[path]
      weight = LowRank(below, ab["lora_a"], ab["lora_b"], Layout.of(p), self.scale)
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

    def add(stored, ab, path):
      if path in self.whole:
        return ab[WHOLE].astype(dtype or stored.dtype)
      p, layout = self.weights[path], Layout.of(self.weights[path])

      def one(row):
        stored, ab = row
        below = base.values(path, stored, "float32") if base and path in base.weights else stored.astype("float32")
        exact = merged(below, ab["lora_a"], ab["lora_b"], layout, self.scale, ab.get("lora_magnitude"))
        out = exact.astype(dtype or p.dtype)
        return out, jnp.stack([jnp.sum(jnp.square(x)) for x in (out.astype("float32") - exact, exact - below)])

      out, squares = one((stored, ab)) if p.rows is None else jax.lax.map(one, (stored, ab))
      sums.append(jnp.sum(squares.reshape(-1, 2), axis=0))
      return out

    tree = self._joined(params, add)
    tree = tree if base is None else base.whole(tree, leave=self.weights)
    return Merged(tree, sum(sums, jnp.zeros(2)))

  def _joined(self, params, join) -> dict[str, Any]:
    base = {name: value for name, value in params.items() if name != ADAPTER}

    def walk(node: Any, added: Any, path: Path) -> Any:
      if path in self.weights or path in self.whole:
        return join(node, added, path)
      if not isinstance(node, dict) or added is None:
        return node
      return {name: walk(value, added.get(name), (*path, name)) for name, value in node.items()}

    return walk(base, params[ADAPTER], ())


def make_adapter(decoder: Decoder, names: frozenset[str], settings: AdapterConfig, whole: tuple[str, ...] = ()) -> Adapter:
  """The adapter of some weights of a model.

  Args:
    decoder: the model.
    names: of the weights.
    settings: of the adapter.
    whole: what is trained whole: path of a part of the vision tower, as ("vision", "projector"); (): nothing is.
  """
  declared = {path_keys(path): p for path, p in jax.tree_util.tree_leaves_with_path(decoder.params())}
  weights = {path: p for path, p in declared.items() if names & set(row_names(decoder, path))}
  apart = {path: p for path, p in declared.items() if whole and path[: len(whole)] == whole}
  s = settings
  return Adapter(s.lora_rank, s.scale, names, weights, apart, dora=s.lora_dora, dropout=s.lora_dropout)


def _nested(leaves: dict[Path, Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for path, value in leaves.items():
    node = tree
    for name in path[:-1]:
      node = node.setdefault(name, {})
    node[path[-1]] = value
  return tree
