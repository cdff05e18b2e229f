"""The adapter of a model: low-rank additions to some of its weights (LoRA), a tree of parameters beside the model's own.

The model's tree is what it is without them, so that weights are read, written and named as ever. The additions stand under
``ADAPTER``, each where the weight stands that it belongs to, and meet the weights where the decoder is called.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.low_rank import Layout, LowRank, factors, merged
from maxtext_like.layers.param import Param
from maxtext_like.models.naming import ADAPTER, path_keys, row_names

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Adapter:
  """Which weights have an addition, and of which kind. Holds no array.

  Attributes:
    rank: of the additions.
    scale: what multiplies them.
    names: of the weights, a layer's own each: ``layers.7.attention.q``. A stack of which some layers alone are among them
      has factors for all, of which the others stay zero.
    weights: the declared weights, by path.
  """

  rank: int
  scale: float
  names: frozenset[str]
  weights: Mapping[Path, Param]

  def params(self) -> dict[str, Any]:
    """The declared factors, "lora_a" and "lora_b" where the weight stands; see ``low_rank.factors``."""
    return _nested({path: factors(p, self.rank) for path, p in self.weights.items()})

  def attach(self, params: dict[str, Any]) -> dict[str, Any]:
    """The model's tree as the decoder takes it, each weight with its addition.

    Args:
      params: the model's tree, and the additions under ``ADAPTER``.
    """
    return self._joined(params, lambda base, ab, layout: LowRank(base, ab["lora_a"], ab["lora_b"], layout, self.scale))

  def merge(self, params: dict[str, Any]) -> dict[str, Any]:
    """The model's tree with every addition added to its weight, in float32 and rounded to the weight's dtype."""

    def add(base, ab, layout):
      return merged(base, ab["lora_a"], ab["lora_b"], layout, self.scale).astype(base.dtype)

    return self._joined(params, add)

  def _joined(self, params, join) -> dict[str, Any]:
    base = {name: value for name, value in params.items() if name != ADAPTER}

    def walk(node: Any, added: Any, path: Path) -> Any:
      if path in self.weights:
        return join(node, added, Layout.of(self.weights[path]))
      if not isinstance(node, dict) or added is None:
        return node
      return {name: walk(value, added.get(name), (*path, name)) for name, value in node.items()}

    return walk(base, params[ADAPTER], ())


def make_adapter(decoder: Decoder, spec: Any, names: frozenset[str], *, rank: int, scale: float) -> Adapter:
  """The adapter of some weights of a model.

  Args:
    decoder: for the names of its parameters.
    spec: its declared parameters.
    names: of the weights.
    rank, scale: of the additions.
  """
  weights = {
    path_keys(path): p
    for path, p in jax.tree_util.tree_leaves_with_path(spec)
    if names & set(row_names(decoder, path_keys(path)))
  }
  return Adapter(rank, scale, names, weights)


def _nested(leaves: dict[Path, Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for path, value in leaves.items():
    node = tree
    for name in path[:-1]:
      node = node.setdefault(name, {})
    node[path[-1]] = value
  return tree
