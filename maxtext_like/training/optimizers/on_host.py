"""Moments that lie in the host's memory and come to the device while they are updated (``optimizer_memory_host_offload``).

Where an array lies is in its type (``jax.memory.Space``): what moves here goes by that, so arrays that are on the device anyway
stay where they are. A row of stacked layers is read out of an array on the host, and written into it where it lies.
"""

from typing import Any

import jax

from maxtext_like.errors import UserError

Tree = Any

KEY = "optimizer_memory_host_offload"
KIND = "pinned_host"
"""What a sharding calls the host's memory that devices read and write."""


def places(opt_state: Tree, shardings: Tree) -> Tree:
  """Shardings of a state whose arrays of stacked layers lie on the host.

  The others stay: they would be on the device together where they are updated, and nothing beside them moves then.

  Args:
    opt_state: shapes of an optimizer's state.
    shardings: NamedShardings of the same structure.

  Raises:
    UserError: there are none.
  """

  def moves(path: tuple[Any, ...], x: Any) -> bool:
    return x.ndim > 0 and any(isinstance(e, jax.tree_util.DictKey) and str(e.key).startswith("stack_") for e in path)

  moved = jax.tree_util.tree_map_with_path(moves, opt_state)
  if not any(jax.tree.leaves(moved)):
    raise UserError(f"{KEY} = true with an optimizer that keeps nothing of layers\n  fix: {KEY}=false")
  return jax.tree.map(lambda away, sharding: sharding.with_memory_kind(KIND) if away else sharding, moved, shardings)


def is_there(x: Any) -> bool:
  """Whether an array, traced or not, lies on the host."""
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def fetched(tree: Tree) -> Tree:
  """The arrays on the device."""
  return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_there(x) else x, tree)


def returned(tree: Tree, like: Tree) -> Tree:
  """The arrays where those of ``like`` lie."""
  return jax.tree.map(lambda x, old: jax.device_put(x, jax.memory.Space.Host) if is_there(old) else x, tree, like)
