"""The parameters of a model in the form that decoding reads: every layer with its own arrays, rounded to the dtype of products.

A decode step on a GPU or TPU copies every slice of a stacked array before a product reads it: two further passes over the
weights. XLA on a CPU runs the loop over layers instead, which compiles faster. float32 weights of products in bfloat16 are
rounded once, as each product would round them: they then take half of the memory, and the answers are the same bit for bit.
Codes of quantized weights are transposed if a kernel multiplies by them (``layers.kernels.quantized_matmul``).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys
from maxtext_like.layers.quantization.quantized import Quantized

_EXACT = ("router", "indexer")
"""Parts of a layer whose products may be in float32 although the layer's dtype is bfloat16."""


class DecodingWeights:
  """Parameters that change between their stacked form and the form for decoding. Only one form is held.

  Args:
    decoder: the model.
    read: returns its parameters, stacked.
    platform: "cpu", "gpu" or "tpu": where they are.
  """

  def __init__(self, decoder: Decoder, read: Callable[[], Any], platform: str):
    self._decoder, self._read = decoder, read
    self._stacks = [stack.name for stack in decoder.stacks]
    self._params: Any = read()
    self._splits, self._changed = platform != "cpu", False

  @property
  def stacked(self) -> Any:
    """The parameters as layers declare them. They are read again if decoding rounded them or ordered their codes."""
    if self._changed or self._params is None:
      self._params = None
      self._params, self._changed = self._read(), False
    self._convert(apart=False)
    return self._params

  @property
  def for_decoding(self) -> Any:
    """The parameters for ``Scheduler``: rows apart and rounded, except on a CPU."""
    if self._params is None:  # reading them again has failed
      self._params, self._changed = self._read(), False
    if self._splits:
      if all(isinstance(self._params[name], dict) for name in self._stacks):
        self._prepare()
      self._convert(apart=True)
    return self._params

  def _prepare(self) -> None:
    """Round the parameters of ``roundable``, and order codes as the kernel for few rows reads them."""
    # New dicts, because the caller may hold those of ``stacked``.
    self._params = jax.tree.map(lambda x: x, self._params)
    for keys in sorted(roundable(self._decoder)):
      node = self._params
      for key in keys[:-1]:
        node = node[key]
      weight = node[keys[-1]]
      if isinstance(weight, jax.Array) and jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize > 2:
        rounded = jax.block_until_ready(weight.astype(jnp.bfloat16))
        self._changed = True  # an error at the next one leaves those before it rounded
        node[keys[-1]] = rounded
    self._order_codes(self._params)

  def _order_codes(self, node: Any) -> None:
    """Order the codes of quantized weights as the kernel for few rows reads them, one weight at a time."""
    quantized = lambda x: isinstance(x, Quantized)
    for name, child in node.items():
      if isinstance(child, dict):
        self._order_codes(child)
        continue
      ordered = jax.tree.map(lambda x: x.for_few_rows() if quantized(x) else x, child, is_leaf=quantized)
      if jax.tree.structure(ordered) != jax.tree.structure(child):
        node[name], self._changed = jax.block_until_ready(ordered), True

  def _convert(self, *, apart: bool) -> None:
    """Convert the stacks that have the other form, one array at a time, so that the weights are never in memory twice.

    An error, such as out of memory, leaves each array in one of both forms, and the next call converts the others.
    """
    if all(isinstance(self._params[name], tuple if apart else dict) for name in self._stacks):
      return
    self._params = dict(self._params)  # the caller may hold that of ``stacked``
    for name in self._stacks:
      if not isinstance(self._params[name], _Stack):
        self._params[name] = _Stack(self._params[name])
      self._params[name].convert(apart=apart)
      self._params[name] = self._params[name].tree()


def roundable(decoder: Decoder) -> set[tuple[str, ...]]:
  """Return the paths of parameters that are only read rounded to bfloat16: weights of products of layers in bfloat16."""
  found: set[tuple[str, ...]] = set()
  if decoder.precision.dtype != "bfloat16":
    return found
  # A stack is one array, so all its layers must have this dtype.
  stacks = {
    s.name
    for s in decoder.stacks
    if all(layer.precision.dtype == "bfloat16" for _, row in s.split(decoder.layers) for layer in row)
  }
  for path, p in jax.tree_util.tree_leaves_with_path(decoder.params()):
    keys = path_keys(path)
    table = keys[0] in ("embedding", "head") and decoder.precision.for_logits.dtype == "bfloat16"
    if p.contracts and not set(keys) & set(_EXACT) and (keys[0] in stacks or table):
      found.add(keys)
  return found


class _Stack:
  """The arrays of a stack during a conversion. ``leaves`` has an array for each parameter, or the list of its rows."""

  def __init__(self, stack: Any):
    rows = stack if isinstance(stack, tuple) else (stack,)
    self._tree = jax.tree.structure(rows[0])
    self.leaves: list[Any] = jax.tree.leaves(stack)
    if isinstance(stack, tuple):
      self.leaves = [list(of_row) for of_row in zip(*map(jax.tree.leaves, rows), strict=True)]

  def convert(self, *, apart: bool) -> None:
    """Convert the arrays that have the other form."""
    for i in range(len(self.leaves)):
      if isinstance(self.leaves[i], list) is not apart:
        converted = list(jnp.unstack(self.leaves[i])) if apart else jnp.stack(self.leaves[i])
        # The previous array is released only when the next one exists.
        self.leaves[i] = jax.block_until_ready(converted)
        del converted

  def tree(self) -> Any:
    """Return the stack, whose arrays have the same form."""
    if isinstance(self.leaves[0], list):
      return tuple(self._tree.unflatten(row) for row in zip(*self.leaves, strict=True))
    return self._tree.unflatten(self.leaves)
