"""``QuantizedBase``: the quantized weights of a model under an adapter. It declares their stored arrays, quantizes and
dequantizes.

In the tree of parameters, the few stored arrays (``layers.quantized``) replace the weight, under its name. When the decoder is
called, they are combined into one ``Weight``, as adapters are.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.kernels.quantized_matmul import Name as KernelName
from maxtext_like.layers.param import Param, count, init, path_keys
from maxtext_like.layers.quantization.low_rank import one_layer
from maxtext_like.layers.quantization.quantized import FORMS, Form, FormName, Quantized, quantize, stored_params
from maxtext_like.layers.sharding_rules import Rules
from maxtext_like.models.naming import row_names

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class QuantizedBase:
  """The quantized weights of a model, and their form. Holds no arrays.

  Attributes:
    form: form of all these weights.
    weights: their declarations, by path.
    rules: sharding of the model's arrays over its mesh.
    kernel: kernel for products of few rows (``quantized_kernels.settle``).
    note: note about that kernel; "" if it is XLA.
  """

  form: Form
  weights: Mapping[Path, Param]
  rules: Rules
  kernel: KernelName = "xla"
  note: str = ""

  def spec(self, declared: Any) -> Any:
    """Return the tree of declared parameters, with the stored arrays instead of the weights."""
    return self._mapped(declared, lambda path, p: stored_params(self.form, p))

  def attach(self, params: Any) -> Any:
    """Return the stored tree in the form that the decoder reads."""
    return self._mapped(params, self._weight)

  def init(self, declared: Any, key: jax.Array) -> Any:
    """Draw the weights as ``param.init`` does, and quantize them, one layer of a stack at a time."""
    store = lambda path, p: (lambda x: quantize(self.form, p, x)) if path_keys(path) in self.weights else None
    return init(declared, key, store=store)

  def values(self, path: Path, stored: Any, dtype: str) -> jax.Array:
    """Dequantize the stored arrays of one layer's weight."""
    return self._weight(path, stored).values(dtype)

  def _weight(self, path: Path, stored: Any) -> Quantized:
    return Quantized(stored, self.form, one_layer(self.weights[path]), self.rules, kernel=self.kernel)

  def whole(self, params: Any, leave: Collection[Path] = ()) -> Any:
    """Dequantize every weight of the stored tree to its declared dtype, except those of ``leave``, which are already plain."""

    def make(path: Path, stored: Any) -> Any:
      if path in leave:
        return stored
      p = self.weights[path]
      values = lambda stored: self.values(path, stored, p.dtype)
      return values(stored) if p.rows is None else jax.lax.map(values, stored)

    return self._mapped(params, make)

  def rounded(self, params: Any) -> Any:
    """Quantize and dequantize plain weights, in their own dtypes."""

    def round_one(path: Path, x: jax.Array) -> jax.Array:
      p = self.weights[path]
      one = lambda x: self.values(path, quantize(self.form, p, x), str(x.dtype))
      return one(x) if p.rows is None else jax.lax.map(one, x)

    return self._mapped(params, round_one)

  def bytes_at_work(self, item: int) -> int:
    """Return the bytes of the largest weight of one layer, dequantized, with ``item`` bytes per element."""
    return max((count(one_layer(p)) * item for p in self.weights.values()), default=0)

  def _mapped(self, tree: Any, change: Callable[[Path, Any], Any]) -> Any:
    def walk(node: Any, path: Path) -> Any:
      if path in self.weights:
        return change(path, node)
      if not isinstance(node, dict):
        return node
      return {name: walk(value, (*path, name)) for name, value in node.items()}

    return walk(tree, ())


def make_base(decoder: Decoder, names: frozenset[str], form: FormName) -> QuantizedBase:
  """Create the base of a model with some quantized weights.

  Args:
    decoder: the model.
    names: names of the weights, such as ``layers.7.attention.q``.
    form: form to store them in.

  Raises:
    ValueError: one of them is a table, or only some layers of a stack are listed.
  """
  weights = {}
  for path, p in jax.tree_util.tree_leaves_with_path(decoder.params()):
    own = set(row_names(decoder, path_keys(path)))
    if names & own:
      if left := sorted(own - names):
        raise ValueError(f"{min(names & own)} and {left[0]} are stored in one array, so quantize both or neither of them")
      stored_params(FORMS[form], p)
      weights[path_keys(path)] = p
  return QuantizedBase(FORMS[form], weights, decoder.cfg.rules)
