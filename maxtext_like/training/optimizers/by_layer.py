"""The optimizer taken layer by layer: each layer's arrays are updated as if there were no others.

A part of the parameters is (stack, layer), the arrays of one layer of a stack's rows, or () for all that lies in no stack. A
state has the structure that it has without; only rules that look at an array as a whole see one layer's where they would see
those of all, as Adafactor, which then factors and clips each layer by itself.
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


_LARGEST_CLIP = 2.0**30


def parts_of(tree: Tree) -> list[Part]:
  """The parts of a tree of parameters, in order; () last."""
  return [(name, layer) for name in tree if name.startswith("stack_") for layer in tree[name]] + [()]


def take(tree: Tree, part: Part) -> Tree:
  """A part of a tree of parameters, under the paths that it has there."""
  if part:
    stack, layer = part
    return {stack: {layer: tree[stack][layer]}}
  return {name: x for name, x in tree.items() if not name.startswith("stack_")}


def take_row(tree: Tree, row: jax.Array) -> Tree:
  """A row of arrays of stacked layers, on the device; counters belong to all."""
  return jax.tree.map(lambda x: as_declared(host_memory.row(x, row)) if x.ndim else x, tree)


def put_row(tree: Tree, new: Tree, row: jax.Array) -> Tree:
  """The arrays of stacked layers with a row written; counters as they were, until all rows are through."""
  put = lambda x, n: jax.lax.dynamic_update_index_in_dim(x, host_memory.returned(as_declared(n), x), row, 0) if x.ndim else x
  return jax.tree.map(put, tree, new)


def join(parts: list[Tree]) -> Tree:
  """The tree that all its parts were taken from."""
  whole: dict[str, Any] = {}
  for part in parts:
    for name, x in part.items():
      whole[name] = {**whole.get(name, {}), **x} if name.startswith("stack_") else x
  return whole


def take_state(state: Tree, part: Part) -> Tree:
  """The state of a part: of every tree of parameters in it that part, counters as they are."""
  return in_states(lambda tree: take(tree, part), state)


def join_states(parts: list[Tree]) -> Tree:
  """The state that all its parts were taken from; counters are those of the last."""
  return in_states(lambda *trees: join([*trees]), *parts)


def in_states(function: Callable[..., Tree], *states: Tree) -> Tree:
  """A function of every tree of parameters in states of a structure; counters are those of the last."""
  is_tree = lambda node: isinstance(node, dict)
  return jax.tree.map(lambda *nodes: function(*nodes) if is_tree(nodes[0]) else nodes[-1], *states, is_leaf=is_tree)


@dataclass(frozen=True, eq=False)
class ByLayer(Optimizer):
  """An ``Optimizer`` of the same rule, whose state and update are those of its parts."""

  @classmethod
  def of(cls, optimizer: Optimizer) -> "ByLayer":
    """The same optimizer, layer by layer."""
    return cls(**{f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)})

  @functools.cached_property
  def parts(self) -> dict[Part, Optimizer]:
    """The optimizer of each part; of a stacked layer that of one row."""
    given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Optimizer)}
    return {part: Optimizer(**given | {"spec": take(self.spec, part)}) for part in parts_of(self.spec)}

  def usually_proved(self, clip: float) -> bool:
    """Only of clipped gradients is it known how large they are before the first layer is updated; and what is known is the
    threshold, of which even a square has to be far from the end of float32."""
    return 0 < clip <= _LARGEST_CLIP and super().usually_proved(clip)

  def init(self, params: Tree) -> Tree:
    return join_states([_by_row(part, optimizer.init, take(params, part)) for part, optimizer in self.parts.items()])

  def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    directions, states = [], []
    for part, optimizer in self.parts.items():
      given = take(grads, part), take_state(state, part), take(params, part)
      direction, after = _by_row(part, optimizer.update, *given)
      directions.append(direction)
      states.append(after)
    return join(directions), join_states(states)


def _by_row(part: Part, function: Any, *trees: Tree) -> Tree:
  """A function of trees of a part, for each row of a stacked one; counters belong to all rows together."""
  if not part or all(map(_is_counter, jax.tree.leaves(trees))):  # a layer that is frozen whole has nothing else
    return function(*trees)
  axes = [jax.tree.map(lambda x: None if _is_counter(x) else 0, tree) for tree in trees]
  row = jax.tree.map(lambda x: x if _is_counter(x) else jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trees)
  out = jax.tree.map(lambda x: None if _is_counter(x) else 0, jax.eval_shape(function, *row))
  return jax.vmap(function, in_axes=tuple(axes), out_axes=out)(*trees)


def _is_counter(x: Any) -> bool:
  return x.dtype == jnp.int32
