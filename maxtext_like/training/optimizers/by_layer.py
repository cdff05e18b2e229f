"""An optimizer that updates each layer's arrays separately from all other arrays. The step with ``optimizer_in_backward`` uses
it.

A part of the parameters is (stack, layer): the arrays of one layer of a stack's rows. The part () holds everything outside the
stacks. The state has the same structure as the state of the ordinary optimizer. The results differ only for rules that use
statistics of a complete array: Adafactor factors and clips each layer separately.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.partition import as_declared
from maxtext_like.sharding import host_memory
from maxtext_like.training.optimizers.optimizer import Optimizer

Tree = Any
Part = tuple[str, ...]


# Largest clipping threshold with a proof: the square of a gradient must stay far below the largest float32 number.
_LARGEST_CLIP = 2.0**30


def parts_of(tree: Tree) -> list[Part]:
  """Return the parts of a tree of parameters in order; () is last."""
  return [(name, layer) for name in tree if name.startswith("stack_") for layer in tree[name]] + [()]


def take(tree: Tree, part: Part) -> Tree:
  """Return one part of a tree of parameters, under the same paths."""
  # The arrays of one layer, under their own stack.
  if part:
    stack, layer = part
    return {stack: {layer: tree[stack][layer]}}
  return {name: x for name, x in tree.items() if not name.startswith("stack_")}


def take_row(tree: Tree, row: jax.Array) -> Tree:
  """Return one row of arrays of stacked layers, on the device. Counters are shared by all rows."""
  return jax.tree.map(lambda x: as_declared(host_memory.row(x, row)) if x.ndim else x, tree)


def put_row(tree: Tree, new: Tree, row: jax.Array) -> Tree:
  """Write one row into the arrays of stacked layers. Counters keep their value until all rows are done."""
  put = lambda x, n: jax.lax.dynamic_update_index_in_dim(x, host_memory.put_like(as_declared(n), x), row, 0) if x.ndim else x
  return jax.tree.map(put, tree, new)


def join(parts: list[Tree]) -> Tree:
  """Return the tree that all these parts were taken from."""
  whole: dict[str, Any] = {}
  for part in parts:
    for name, x in part.items():
      whole[name] = {**whole.get(name, {}), **x} if name.startswith("stack_") else x
  return whole


def take_state(state: Tree, part: Part) -> Tree:
  """Return the state of a part: that part of every tree of parameters in the state. Counters are copied."""
  return in_states(lambda tree: take(tree, part), state)


def join_states(parts: list[Tree]) -> Tree:
  """Return the state that all these parts were taken from. Counters are those of the last part."""
  return in_states(lambda *trees: join([*trees]), *parts)


def in_states(function: Callable[..., Tree], *states: Tree) -> Tree:
  """Apply a function to every tree of parameters in states of the same structure. Counters are those of the last state."""
  is_tree = lambda node: isinstance(node, dict)
  return jax.tree.map(lambda *nodes: function(*nodes) if is_tree(nodes[0]) else nodes[-1], *states, is_leaf=is_tree)


@dataclass(frozen=True, eq=False)
class ByLayer(Optimizer):
  """An ``Optimizer`` with the same rule that initializes and updates each part separately."""

  @classmethod
  def of(cls, optimizer: Optimizer) -> "ByLayer":
    """Return the same optimizer, working layer by layer."""
    # The subclass adds no fields, so the fields of the optimizer are sufficient.
    return cls(**{f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)})

  @functools.cached_property
  def parts(self) -> dict[Part, Optimizer]:
    """The optimizer of each part. For a stacked layer it is the optimizer of one row."""
    given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Optimizer)}
    return {part: Optimizer(**given | {"spec": take(self.spec, part)}) for part in parts_of(self.spec)}

  def usually_proved(self, clip: float) -> bool:
    """Only for clipped gradients is a bound known before the first layer is updated. The bound is the threshold, and its square
    must be far below the largest float32 number."""
    return 0 < clip <= _LARGEST_CLIP and super().usually_proved(clip)

  def init(self, params: Tree) -> Tree:
    return join_states([_by_row(part, optimizer.init, take(params, part)) for part, optimizer in self.parts.items()])

  def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    # Each part has its own state and is independent of the other parts.
    directions, states = [], []
    for part, optimizer in self.parts.items():
      given = take(grads, part), take_state(state, part), take(params, part)
      direction, after = _by_row(part, optimizer.update, *given)
      directions.append(direction)
      states.append(after)
    return join(directions), join_states(states)


def _by_row(part: Part, function: Any, *trees: Tree) -> Tree:
  """Apply a function to trees of a part, separately for each row of a stacked part. Counters are shared by all rows."""
  if not part or all(map(_is_counter, jax.tree.leaves(trees))):  # a completely frozen layer has only counters
    return function(*trees)
  # All arrays are mapped over their first axis, the rows of the stack. Counters are the same for all rows.
  axes = [jax.tree.map(lambda x: None if _is_counter(x) else 0, tree) for tree in trees]
  row = jax.tree.map(lambda x: x if _is_counter(x) else jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trees)
  out = jax.tree.map(lambda x: None if _is_counter(x) else 0, jax.eval_shape(function, *row))
  return jax.vmap(function, in_axes=tuple(axes), out_axes=out)(*trees)


def _is_counter(x: Any) -> bool:
  return x.dtype == jnp.int32
