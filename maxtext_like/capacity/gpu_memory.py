"""What one GPU holds when most is in use, instant by instant, as XLA's buffer assignments show it.

Beside ``memory.estimate``; docs/results/memory.md has the sums beside what XLA laid out and what runs had.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.capacity.array_bytes import as_dtype, by_place, bytes_as, bytes_of
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.training.optimizers.by_layer import ByLayer, parts_of, take, take_state
from maxtext_like.training.optimizers.low_rank_moment import Factors
from maxtext_like.training.optimizers.moments import piece_rows
from maxtext_like.training.step.in_backward.part_update import Leaves
from maxtext_like.training.step.program import TrainProgram


class InUse(NamedTuple):
  """Bytes by what they are, as of ``memory.MemoryEstimate``."""

  gradients: int
  copies: int
  activations: int
  logits: int


def in_loss(program: TrainProgram, trained: Any, kept: int, logits: int) -> InUse:
  """Bytes beside the state in the loss: what the forward pass keeps, the logits in float32 and their gradient as it multiplies.

  Of a loss in chunks the float32 sum of the head's gradients too, the head as it multiplies, where it is stored otherwise, and
  the gradient of the head that a chunk makes, in the place of its logits, which have gone by then.

  Args:
    program: of the run.
    trained: its trained parameters.
    kept: what the forward pass keeps for the backward pass, on the device.
    logits: float32 ones, of a chunk, and as much for their gradient.
  """
  dtype = jnp.dtype(program.config.precision.dtype)
  values = logits // 2
  gradient = values * dtype.itemsize // 4
  head = program.objective.made_in_forward(trained)
  if head is None:
    return InUse(0, 0, kept, values + gradient)
  made = bytes_as(dtype, head)
  return InUse(bytes_as(jnp.float32, head), max(0, made - values) + _unless_in(dtype, made, head), kept, values + gradient)


def in_backward(program: TrainProgram, trained: Any, kept: int, again: int, logits: int) -> InUse:
  """Bytes beside the state at the fullest of five instants, where each layer is updated as its gradient appears.

  In the loss. In the backward pass of a layer: what is kept, the gradient of the head as it is stored, the layer's
  activations, its gradients, and its weights as XLA takes them out of their stack; of moments on the host those of a layer, as
  they came and as they go. The update of that layer with momentum of low rank: its directions, and what is added to them, all
  at a time. Behind the layers: the head's gradient, that of the rows of a table that were read, in float32, and their sum; or
  the update of what lies in no stack.

  Args:
    program, trained, kept, logits: as of ``in_loss``.
    again: a layer's own activations, computed again.
  """
  head, outside = program.objective.made_in_forward(trained), take(trained, ())
  made = bytes_of(outside if head is None else head)
  own = max((max(row) for row in _by_layer(trained).values()), default=0)
  copies = own + 2 * _fetched_moments(program) + _steps_of_a_layer(program, trained)
  layer = InUse(made + own, copies, kept + again, 0)
  update = InUse(made + own, copies + 2 * _directions_of_a_layer(program, trained), kept, 0)
  read = {name: x for name, x in outside.items() if name != "head"}
  tower = kept if program.model.decoder.cfg.vision is not None else 0
  end = InUse(made + bytes_as(jnp.float32, read), _unless_in(jnp.dtype(jnp.float32), bytes_of(read), read), tower, 0)
  return max(in_loss(program, trained, kept, logits), layer, update, end, _in_last_update(program, outside), key=sum)


def _unless_in(dtype: jnp.dtype, size: int, tree: Any) -> int:
  """The size, or 0 where all of the tree is stored in the dtype, and nothing is made of it."""
  return 0 if all(x.dtype == dtype for x in jax.tree.leaves(tree)) else size


def _in_last_update(program: TrainProgram, outside: Any) -> InUse:
  """Of what lies in no stack, where an optimizer keeps between reading and writing what it computes: the steps of all that it
  updates at once in float32, the next moments, and a gradient in float32, of one after the other. Of an array that is updated
  piece by piece nothing is there but the gradient, which the other instants have."""
  step = program.step
  if not step.optimizer.in_pieces:
    return InUse(0, 0, 0, 0)
  assert isinstance(step.optimizer, ByLayer)
  leaves = Leaves(jax.tree.structure(outside))
  both = zip(jax.tree.leaves(step.optimizer.parts[()].spec), jax.tree.leaves(outside), strict=True)
  with use_mesh(program.model.mesh):  # of which several devices update everything at once
    at_once = [i for i, (p, x) in enumerate(both) if not x.ndim or piece_rows(p, x) == x.shape[0]]
  state = take_state(program.abstract_state["opt_state"], ())
  moments, outside = leaves.of_state(at_once, state), leaves.some(at_once, outside)
  gradient = max((bytes_as(jnp.float32, x) for x in jax.tree.leaves(outside)), default=0)
  return InUse(gradient, bytes_as(jnp.float32, outside) + bytes_of(moments), 0, 0)


def _steps_of_a_layer(program: TrainProgram, trained: Any) -> int:
  """Bytes of a layer's steps in float32, of the one that has most, where the optimizer goes through arrays in pieces."""
  if not program.step.optimizer.in_pieces:
    return 0
  return max((max(row) for row in _by_layer(as_dtype(trained, jnp.float32)).values()), default=0)


def _directions_of_a_layer(program: TrainProgram, trained: Any) -> int:
  """Bytes of a layer's directions as the products with a momentum of low rank read them, of the layer that has most."""
  state = jax.tree.leaves(program.abstract_state["opt_state"], is_leaf=lambda x: isinstance(x, Factors))
  if not any(isinstance(x, Factors) for x in state):
    return 0
  return max((max(row) for row in _by_layer(as_dtype(trained, jnp.bfloat16)).values()), default=0)


def _fetched_moments(program: TrainProgram) -> int:
  """Bytes of a layer's moments that lie on the host, of the layer that has most."""
  found = [0]
  for part in parts_of(program.selection.split(program.abstract_state["params"])[0]):
    _, away = by_place(take_state(program.abstract_state["opt_state"], part))
    found += [bytes_of(away) // away[0].shape[0]] if part and away else []
  return max(found)


def _by_layer(trained: Any) -> dict[str, list[int]]:
  """Bytes of each layer of a row of each stack."""
  found: dict[str, list[int]] = {}
  for part in parts_of(trained):
    if part and (leaves := jax.tree.leaves(take(trained, part))):
      found.setdefault(part[0], []).append(bytes_of(leaves) // leaves[0].shape[0])
  return found
