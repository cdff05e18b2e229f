"""The peak memory of one GPU, phase by phase, following XLA's buffer assignments.

``memory.estimate`` uses it. docs/results/memory.md compares the results with XLA's layouts and with real runs.
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
  """Bytes by category, as in ``memory.MemoryEstimate``."""

  gradients: int
  copies: int
  activations: int
  logits: int


def in_loss(program: TrainProgram, trained: Any, kept: int, logits: int) -> InUse:
  """Return the bytes in use during the loss, in addition to the state: the activations, the float32 logits, and their gradient
  in ``dtype``.

  For a loss in chunks, also the float32 sum of the head's gradients, the head in ``dtype`` if it is stored in another dtype,
  and the head's gradient of one chunk, which reuses the memory of the chunk's logits.

  Args:
    program: program of the run.
    trained: its trained parameters.
    kept: activations kept for the backward pass, on the device.
    logits: bytes of a chunk's float32 logits and of their gradient.
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
  """Return the bytes in use, in addition to the state, at the largest of five phases, if each layer is updated as soon as it
  has a gradient.

  The phases are:
  - the loss;
  - the backward pass of a layer: kept activations, the stored gradient of the head, the layer's activations and gradients, and
    its weights, which XLA copies out of their stack. With moments on the host, also those of a layer, incoming and outgoing;
  - the update of that layer with momentum of low rank: its updates and the changes that momentum adds, all at the same time;
  - after the layers: the head's gradient, the float32 gradient of the rows that were read from a table, and their sum;
  - the update of everything outside the stacks.

  Args:
    program, trained, kept, logits: as of ``in_loss``.
    again: a layer's own activations, which are recomputed.
  """
  head, outside = program.objective.made_in_forward(trained), take(trained, ())
  made = bytes_of(outside if head is None else head)
  own = max((max(row) for row in _by_layer(trained).values()), default=0)
  copies = own + 2 * _moments_from_host(program) + _steps_of_a_layer(program, trained)
  layer = InUse(made + own, copies, kept + again, 0)
  update = InUse(made + own, copies + 2 * _directions_of_a_layer(program, trained), kept, 0)
  read = {name: x for name, x in outside.items() if name != "head"}
  tower = kept if program.model.decoder.cfg.vision is not None else 0
  end = InUse(made + bytes_as(jnp.float32, read), _unless_in(jnp.dtype(jnp.float32), bytes_of(read), read), tower, 0)
  return max(in_loss(program, trained, kept, logits), layer, update, end, _in_last_update(program, outside), key=sum)


def _unless_in(dtype: jnp.dtype, size: int, tree: Any) -> int:
  """Return the size, or 0 if the complete tree is already stored in the dtype."""
  return 0 if all(x.dtype == dtype for x in jax.tree.leaves(tree)) else size


def _in_last_update(program: TrainProgram, outside: Any) -> InUse:
  """Return the bytes of the update of everything outside the stacks, if the optimizer stores intermediate results: the float32
  updates of all arrays that are updated at once, the new moments, and one float32 gradient at a time. An array that is updated
  piece by piece only needs its gradient, which the other phases include."""
  step = program.step
  if not step.optimizer.in_pieces:
    return InUse(0, 0, 0, 0)
  assert isinstance(step.optimizer, ByLayer)
  leaves = Leaves(jax.tree.structure(outside))
  both = zip(jax.tree.leaves(step.optimizer.parts[()].spec), jax.tree.leaves(outside), strict=True)
  with use_mesh(program.model.mesh):  # several devices update everything at once
    at_once = [i for i, (p, x) in enumerate(both) if not x.ndim or piece_rows(p, x) == x.shape[0]]
  state = take_state(program.abstract_state["opt_state"], ())
  moments, outside = leaves.of_state(at_once, state), leaves.some(at_once, outside)
  gradient = max((bytes_as(jnp.float32, x) for x in jax.tree.leaves(outside)), default=0)
  return InUse(gradient, bytes_as(jnp.float32, outside) + bytes_of(moments), 0, 0)


def _steps_of_a_layer(program: TrainProgram, trained: Any) -> int:
  """Return the bytes of the float32 updates of the largest layer, if the optimizer updates arrays in pieces."""
  if not program.step.optimizer.in_pieces:
    return 0
  return max((max(row) for row in _by_layer(as_dtype(trained, jnp.float32)).values()), default=0)


def _directions_of_a_layer(program: TrainProgram, trained: Any) -> int:
  """Return the bytes of the largest layer's updates in bfloat16, as the products with a momentum of low rank read them."""
  state = jax.tree.leaves(program.abstract_state["opt_state"], is_leaf=lambda x: isinstance(x, Factors))
  if not any(isinstance(x, Factors) for x in state):
    return 0
  return max((max(row) for row in _by_layer(as_dtype(trained, jnp.bfloat16)).values()), default=0)


def _moments_from_host(program: TrainProgram) -> int:
  """Return the bytes of the largest layer's moments that are on the host."""
  found = [0]
  for part in parts_of(program.selection.split(program.abstract_state["params"])[0]):
    _, away = by_place(take_state(program.abstract_state["opt_state"], part))
    found += [bytes_of(away) // away[0].shape[0]] if part and away else []
  return max(found)


def _by_layer(trained: Any) -> dict[str, list[int]]:
  """Return the bytes of each layer of a row of each stack."""
  found: dict[str, list[int]] = {}
  for part in parts_of(trained):
    if part and (leaves := jax.tree.leaves(take(trained, part))):
      found.setdefault(part[0], []).append(bytes_of(leaves) // leaves[0].shape[0])
  return found
