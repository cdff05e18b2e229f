"""The weights below an adapter, in fewer bits than they came in: what stands in their places, and how it is made of them.

The tree of parameters has a few arrays (``layers.quantised``) where a weight stood, under its name. They meet the decoder as
one ``Weight`` where it is called, as an adapter does.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import Param, count, init
from maxtext_like.layers.quantization.low_rank import one_layer
from maxtext_like.layers.quantization.quantised import FORMS, Form, FormName, Quantised, quantise, stored_params
from maxtext_like.layers.sharding_rules import Rules
from maxtext_like.models.naming import path_keys, row_names

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class QuantisedBase:
  """Which weights of a model are stored in which form. Holds no array.

  Attributes:
    form: of all of them.
    weights: as they are declared, by path.
    rules: how the model's arrays are split over its mesh.
  """

  form: Form
  weights: Mapping[Path, Param]
  rules: Rules

  def spec(self, declared: Any) -> Any:
    """The tree of declared parameters with what is stored in the places of the weights."""
    return self._mapped(declared, lambda path, p: stored_params(self.form, p))

  def attach(self, params: Any) -> Any:
    """The stored tree as the decoder takes it."""
    return self._mapped(params, self._weight)

  def init(self, declared: Any, key: jax.Array) -> Any:
    """The stored tree of the weights that ``init`` draws, one layer of a stack at a time."""
    store = lambda path, p: (lambda x: quantise(self.form, p, x)) if path_keys(path) in self.weights else None
    return init(declared, key, store=store)

  def values(self, path: Path, stored: Any, dtype: str) -> jax.Array:
    """The weight of one layer, whole, of what is stored of it."""
    return self._weight(path, stored).values(dtype)

  def _weight(self, path: Path, stored: Any) -> Quantised:
    return Quantised(stored, self.form, one_layer(self.weights[path]), self.rules)

  def whole(self, params: Any, leave: Collection[Path] = ()) -> Any:
    """The stored tree with every weight made whole, in its declared dtype, but those of ``leave``, which are so already."""

    def make(path: Path, stored: Any) -> Any:
      if path in leave:
        return stored
      p = self.weights[path]
      values = lambda stored: self.values(path, stored, p.dtype)
      return values(stored) if p.rows is None else jax.lax.map(values, stored)

    return self._mapped(params, make)

  def rounded(self, params: Any) -> Any:
    """Whole weights as they are after quantisation, in their dtypes."""

    def round_one(path: Path, x: jax.Array) -> jax.Array:
      p = self.weights[path]
      one = lambda x: self.values(path, quantise(self.form, p, x), str(x.dtype))
      return one(x) if p.rows is None else jax.lax.map(one, x)

    return self._mapped(params, round_one)

  def bytes_at_work(self, item: int) -> int:
    """Of the largest weight of a layer, made whole, with ``item`` bytes a number."""
    return max((count(one_layer(p)) * item for p in self.weights.values()), default=0)

  def _mapped(self, tree: Any, change: Callable[[Path, Any], Any]) -> Any:
    def walk(node: Any, path: Path) -> Any:
      if path in self.weights:
        return change(path, node)
      if not isinstance(node, dict):
        return node
      return {name: walk(value, (*path, name)) for name, value in node.items()}

    return walk(tree, ())


def make_base(decoder: Decoder, names: frozenset[str], form: FormName) -> QuantisedBase:
  """The base of a model some of whose weights are quantised.

  Args:
    decoder: the model.
    names: of the weights, as ``layers.7.attention.q``.
    form: that they are stored in.

  Raises:
    ValueError: one of them is a table, or a part of a stack alone is among them.
  """
  weights = {}
  for path, p in jax.tree_util.tree_leaves_with_path(decoder.params()):
    own = set(row_names(decoder, path_keys(path)))
    if names & own:
      if left := sorted(own - names):
        raise ValueError(f"{min(names & own)} is stored in one array with {left[0]}, and both are quantised or neither")
      stored_params(FORMS[form], p)
      weights[path_keys(path)] = p
  return QuantisedBase(FORMS[form], weights, decoder.cfg.rules)
