"""The parameters of a model in the form that decoding reads: every layer with its own arrays.

A decode step on a GPU or TPU copies every slice of a stacked array before a product reads it: two further passes over the
weights. XLA on a CPU runs the loop over layers instead, which compiles faster.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.decoder import Decoder


class DecodingWeights:
  """Parameters that change between their stacked form and rows apart (``Decoder.apart``). Only one form is held.

  Args:
    decoder: the model.
    params: its parameters, stacked.
    platform: "cpu", "gpu" or "tpu": where they are.
  """

  def __init__(self, decoder: Decoder, params: Any, platform: str):
    self._stacks = [stack.name for stack in decoder.stacks]
    self._params: Any = params
    self._splits = platform != "cpu"

  @property
  def stacked(self) -> Any:
    """The parameters as layers declare them."""
    if isinstance(self._params[self._stacks[0]], tuple):
      self._convert(_together)
    return self._params

  @property
  def for_decoding(self) -> Any:
    """The parameters for ``Schedule``: rows apart, except on a CPU."""
    if self._splits and not isinstance(self._params[self._stacks[0]], tuple):
      self._convert(_apart)
    return self._params

  def _convert(self, convert: Any) -> None:
    # Release each array before the next one is converted, so that the weights are never in memory twice.
    params, self._params = dict(self._params), None
    for name in self._stacks:
      params[name] = convert(params.pop(name))
    self._params = params


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
