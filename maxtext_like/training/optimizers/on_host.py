"""Which of an optimizer's state lies in the host's memory (``optimizer_memory_host_offload``): the moments of layers, which are
on the device while these are updated. A row of stacked layers is read out of an array there, and written into it where it lies.
"""

from typing import Any

import jax

from maxtext_like.errors import UserError
from maxtext_like.sharding.host_memory import KIND

Tree = Any

KEY = "optimizer_memory_host_offload"


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
    raise UserError(f"{KEY} = true: no layer has moments (opt_type, trainable_parameters_mask)\n  fix: {KEY}=false")
  return jax.tree.map(lambda away, sharding: sharding.with_memory_kind(KIND) if away else sharding, moved, shardings)
