"""The parameters of a model in the form that decoding reads: every layer with its own arrays, rounded to the dtype of products.

A decode step on a GPU or TPU copies every slice of a stacked array before a product reads it: two further passes over the
weights. XLA on a CPU runs the loop over layers instead, which compiles faster. float32 weights of products in bfloat16 are
rounded once, as each product would round them: they then take half of the memory, and the answers are the same bit for bit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys

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
    self._splits, self._rounded = platform != "cpu", False

  @property
  def stacked(self) -> Any:
    """The parameters as layers declare them. They are read again if they have been rounded."""
    if self._rounded:
      self._params = None
      self._params, self._rounded = self._read(), False
    elif isinstance(self._params[self._stacks[0]], tuple):
      self._convert(_together)
    return self._params

  @property
  def for_decoding(self) -> Any:
    """The parameters for ``Schedule``: rows apart and rounded, except on a CPU."""
    if self._splits and not isinstance(self._params[self._stacks[0]], tuple):
      # New dicts, because the caller may hold those of ``stacked``.
      self._params = jax.tree.map(lambda x: x, self._params)
      self._rounded = _round(self._decoder, self._params)
      self._convert(_apart)
    return self._params

  def _convert(self, convert: Any) -> None:
    # Release each array before the next one is converted, so that the weights are never in memory twice.
    params, self._params = dict(self._params), None
    for name in self._stacks:
      params[name] = convert(params.pop(name))
    self._params = params


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


def _round(decoder: Decoder, params: Any) -> bool:
  """Round the parameters of ``roundable`` in place. Quantized and adapted weights stay. Return True if any changed."""
  changed = False
  for keys in sorted(roundable(decoder)):
    node = params
    for key in keys[:-1]:
      node = node[key]
    weight = node[keys[-1]]
    if isinstance(weight, jax.Array) and jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize > 2:
      node[keys[-1]], changed = weight.astype(jnp.bfloat16), True
  return changed


def _apart(stack: Any) -> tuple[Any, ...]:
  leaves, tree = jax.tree.flatten(stack)
  del stack
  rows = []
  while leaves:
    rows.append(jnp.unstack(leaves.pop(0)))
  return tuple(tree.unflatten(row) for row in zip(*rows, strict=True))


def _together(rows: tuple[Any, ...]) -> Any:
  flat, tree = [jax.tree.leaves(row) for row in rows], jax.tree.structure(rows[0])
  del rows
  stacked = []
  while flat[0]:
    stacked.append(jnp.stack([row.pop(0) for row in flat]))
  return tree.unflatten(stacked)
