"""Results of the forward pass for the fused backward pass: inputs and kept arrays of every layer, and the first cotangents."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.layers.block import Block, Carry, Stack
from maxtext_like.layers.context import Aux, Context
from maxtext_like.layers.decoder import Decoder
from maxtext_like.training.step.in_backward.residuals import Residuals

Tree = Any
Result = Callable[[Any], tuple[jax.Array, dict]]


@dataclass(frozen=True, eq=False)
class PrecomputedDecoder(Decoder):
  """A decoder whose layers have already run: ``hidden`` returns their result."""

  result: Result | None = None

  def hidden(self, p: dict, batch: dict, *given: Any, **named: Any) -> tuple[jax.Array, dict]:
    del batch, given, named
    assert self.result is not None
    return self.result(p)


class RowRun(NamedTuple):
  """Equal consecutive rows of a stack: their layers, the index of the first row and the number of rows."""

  stack: Stack
  layers: tuple[Block, ...]
  first: int
  count: int


class Forward(NamedTuple):
  """Everything the backward pass starts from.

  Attributes:
    out: loss terms and the other outputs of ``TrainStep.total``.
    layer_inputs: per run, the inputs of its layers: a carry for each layer of a row, every leaf with a leading axis of rows.
    kept: per run, the other arrays that each layer of a row keeps, with a leading axis of rows.
    residuals: per run, how these arrays enter each layer's pullback; empty if layers keep nothing.
    last: cotangent of the last carry.
    output_cotangents: per run, cotangents of the float outputs of its layers.
    outside: gradients of the parameters outside the stacks, from the computation after the layers only.
    enter_pullback: maps cotangents of the first carry and of the per-layer inputs to the gradients of the computation before
      the layers.
    ctx: context of the batch.
    per_layer: the per-layer inputs [L, B, T, P], or None.
  """

  out: dict[str, Any]
  layer_inputs: list[list[Carry]]
  kept: list[list[list[jax.Array]]]
  residuals: list[list[Residuals]]
  last: Carry
  output_cotangents: list[dict[str, Aux]]
  outside: Tree
  enter_pullback: Callable[..., Any]
  ctx: Context
  per_layer: jax.Array | None


def split_floats(aux: Any) -> tuple[Any, Any]:
  """Split the outputs of layers into floats and others, with None at the positions of the other kind."""
  pick = lambda wanted: jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) == wanted else None, aux)
  return pick(True), pick(False)
