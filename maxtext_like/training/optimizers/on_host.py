"""Which arrays of an optimizer's state are in the host's memory (``optimizer_memory_host_offload``).

The moments of layers are on the host, and on the device only while their layer is updated. A row of stacked layers is read from
the host array and written back into it.
"""

from typing import Any

import jax

from maxtext_like.errors import UserError
from maxtext_like.sharding.host_memory import KIND

Tree = Any

KEY = "optimizer_memory_host_offload"


def places(opt_state: Tree, shardings: Tree) -> Tree:
  """Return the shardings of a state whose arrays of stacked layers are on the host.

  All other arrays stay on the device: they would be on the device together during their update anyway, and no transfer could
  overlap with it.

  Args:
    opt_state: shapes of an optimizer's state.
    shardings: NamedShardings of the same structure.

  Raises:
    UserError: the state has no arrays of stacked layers.
  """

  def moves(path: tuple[Any, ...], x: Any) -> bool:
    return x.ndim > 0 and any(isinstance(e, jax.tree_util.DictKey) and str(e.key).startswith("stack_") for e in path)

  # Without an array that moves, the key would have no effect.
  moved = jax.tree_util.tree_map_with_path(moves, opt_state)
  if not any(jax.tree.leaves(moved)):
    raise UserError(
      f"{KEY} = true has no effect: no layer has moments (see opt_type, trainable_parameters_mask)\n  fix: {KEY}=false"
    )
  return jax.tree.map(lambda away, sharding: sharding.with_memory_kind(KIND) if away else sharding, moved, shardings)
