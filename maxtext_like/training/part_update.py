"""The update of a part of the parameters by its gradients: of a layer, or of all that lies in no stack.

The table of a large vocabulary has more numbers than a layer, and its steps in float32 would be as large as the gradients of
several layers. Where moments are stored in fewer bits, and so what a rule computes is not all fused, such an array is updated
piece by piece, each written where it lies before the next one is read.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.models.row_norms import peaks_of_arrays
from maxtext_like.training import update_survival
from maxtext_like.training.optimizers.moments import pieces_of
from maxtext_like.training.optimizers.optimizer import Optimizer
from maxtext_like.training.parts_seen import by_row
from maxtext_like.training.rounding import stays_finite
from maxtext_like.training.step import TrainStep

Tree = Any


class Updated(NamedTuple):
  """What came of an update.

  Attributes:
    params, state: next ones; the given ones where they may not be written.
    alive: bool scalar: they were.
    finite: bool by leaf, of the updated numbers, where that was looked at.
    peaks: of the updated state, see ``peaks_of_arrays``, likewise.
    survival: sums of ``update_survival.products``, where they are asked for.
  """

  params: Tree
  state: Tree
  alive: jax.Array
  finite: Tree = None
  peaks: Tree = None
  survival: tuple[Tree, Tree] | None = None


@dataclass(frozen=True, eq=False)
class PartUpdate:
  """The update of a part in a step.

  Attributes:
    step: the train step.
    optimizer: of the part.
    number: int32 scalar, of the state.
    rate: float32 scalar, the learning rate.
    row: int32 scalar, which row of its stack; None: of what lies in no stack.
    clipped: gradients as they are clipped, float32; each number by itself.
    masked: directions with zeros for what is not trained, likewise.
  """

  step: TrainStep
  optimizer: Optimizer
  number: jax.Array
  rate: jax.Array
  row: jax.Array | None
  clipped: Callable[[Tree], Tree]
  masked: Callable[[Tree], Tree]

  def __call__(self, grads: Tree, state: Tree, params: Tree, alive: jax.Array) -> Updated:
    """Updates.

    Args:
      grads: of the part, not yet clipped.
      state, params: before the update.
      alive: bool scalar: the update may be written.
    """
    pieces = self._pieces(params)
    if not pieces:
      return self._at_once(self.optimizer, grads, state, params, alive)
    leaves = Leaves(jax.tree.structure(params))
    large = [_InPieces(self._of(leaves, [i]), count, *leaves.only([i], grads, state, params)) for i, count in pieces.items()]
    rest = [i for i in range(leaves.structure.num_leaves) if i not in pieces]
    looked: list[tuple[Tree, Tree]] = []
    if self.step.careful:  # nothing is written before all has been seen
      looked = [one.looked(self) for one in large]
      alive = alive & _sound(looked)
    others = self._at_once(self._of(leaves, rest), *leaves.only(rest, grads, state, params), alive)
    found = [*(one.written(self, others.alive) for one in large), others]  # counters are those of the last
    return Updated(
      leaves.join([u.params for u in found]),
      leaves.join_states([u.state for u in found]),
      others.alive,
      leaves.join([*(finite for finite, _ in looked), others.finite]) if looked else None,
      leaves.join_states([*(peaks for _, peaks in looked), others.peaks]) if looked else None,
      None if others.survival is None else tuple(map(leaves.join, zip(*(u.survival for u in found), strict=True))),
    )

  def _pieces(self, params: Tree) -> dict[int, int]:
    """How many pieces each of the leaves has that are updated so, by its number."""
    if self.row is not None or not self.optimizer.in_pieces:
      return {}
    both = zip(jax.tree.leaves(self.optimizer.spec), jax.tree.leaves(params), strict=True)
    return {i: count for i, (p, x) in enumerate(both) if (count := pieces_of(p, x)) > 1}

  def _of(self, leaves: "Leaves", chosen: Collection[int]) -> Optimizer:
    """The optimizer of some leaves."""
    given = {f.name: getattr(self.optimizer, f.name) for f in fields(Optimizer)}
    return Optimizer(**given | {"spec": leaves.some(chosen, self.optimizer.spec)})

  def _at_once(
    self, optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, alive: jax.Array, begin: jax.Array | int = 0
  ) -> Updated:
    """Of some leaves, or of a piece of one, before which ``begin`` numbers lie."""
    step = self.step
    direction, new_state = optimizer.update(self.clipped(grads), state, params)
    direction = self.masked(direction)
    moved = step.moved(params, direction, self.rate)
    new = step.stored(moved, params, self.number, self.row, begin)
    finite = peaks = survival = None
    if step.survival:
      survival = jax.tree.map(jnp.sum, update_survival.products(params, new, direction, self.rate))
    if step.careful:
      # Whether it may be written is known before anything is: this pass over the numbers draws no random bits.
      stays = stays_finite if step.rounding else lambda x, dtype: jnp.isfinite(x.astype(dtype))
      finite = jax.tree.map(lambda x, p: jnp.all(stays(x, p.dtype)), moved, params)
      peaks = peaks_of_arrays(new_state)
      alive = alive & _sound([(finite, peaks)])
    new, new_state = jax.tree.map(lambda x, old: jnp.where(alive, x, old), (new, new_state), (params, state))
    return Updated(new, new_state, alive, finite, peaks, survival)


class _InPieces(NamedTuple):
  """A leaf whose update goes through it piece by piece: its optimizer, how many they are, and trees of this leaf alone."""

  optimizer: Optimizer
  count: int
  grads: Tree
  state: Tree
  params: Tree

  def _piece(self, update: PartUpdate, number: jax.Array, params: Tree, state: Tree, alive: jax.Array) -> Updated:
    cut = lambda tree: jax.tree.map(lambda x: self._cut(x, number), tree)
    (leaf,) = jax.tree.leaves(params)
    begin = number.astype(jnp.uint32) * jnp.uint32(leaf.size // self.count % 2**32)
    return update._at_once(self.optimizer, cut(self.grads), cut(state), cut(params), alive, begin)

  def looked(self, update: PartUpdate) -> tuple[Tree, Tree]:
    """``finite`` and ``peaks`` of the update."""

    def look(number):
      piece = self._piece(update, number, self.params, self.state, jnp.ones((), bool))
      return piece.finite, piece.peaks

    finite, peaks = jax.lax.map(look, jnp.arange(self.count))
    return jax.tree.map(jnp.all, finite), jax.tree.map(jnp.max, peaks)

  def written(self, update: PartUpdate, alive: jax.Array) -> Updated:
    """The update, where ``alive``; counters are as they were."""

    def write(number, carry):
      params, state, sums = carry
      piece = self._piece(update, number, params, state, alive)
      put = lambda x, new: self._put(x, new, number)
      added = None if sums is None else jax.tree.map(jnp.add, sums, piece.survival)
      return jax.tree.map(put, params, piece.params), jax.tree.map(put, state, piece.state), added

    zeros = jax.tree.map(lambda x: jnp.zeros((), jnp.float32), self.params)
    begin = self.params, self.state, (zeros, zeros) if update.step.survival else None
    params, state, sums = jax.lax.fori_loop(0, self.count, write, begin)
    return Updated(params, state, alive, survival=sums)

  def _cut(self, x: jax.Array, number: jax.Array) -> jax.Array:
    size = x.shape[0] // self.count if x.ndim else 0
    return jax.lax.dynamic_slice_in_dim(x, number * size, size) if x.ndim else x

  def _put(self, x: jax.Array, new: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new, number * new.shape[0], 0) if x.ndim else x


class Leaves(NamedTuple):
  """Trees of some leaves of a part, with None in the place of the others."""

  structure: Any

  def some(self, chosen: Collection[int], tree: Tree) -> Tree:
    """Of a tree of this structure."""
    kept = [x if i in chosen else None for i, x in enumerate(self.structure.flatten_up_to(tree))]
    return self.structure.unflatten(kept)

  def of_state(self, chosen: Collection[int], state: Tree) -> Tree:
    """Of each such tree in a state of the optimizer; counters as they are."""
    return jax.tree.map(lambda x: self.some(chosen, x) if _is_dict(x) else x, state, is_leaf=_is_dict)

  def only(self, chosen: Collection[int], grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree, Tree]:
    """Of all that an update reads."""
    return self.some(chosen, grads), self.of_state(chosen, state), self.some(chosen, params)

  def join(self, trees: Sequence[Tree]) -> Tree:
    """The tree that these are the leaves of."""
    places = zip(*map(self.structure.flatten_up_to, trees), strict=True)
    return self.structure.unflatten([next((x for x in found if x is not None), None) for found in places])

  def join_states(self, states: Sequence[Tree]) -> Tree:
    """Likewise; counters are those of the last."""
    pick = lambda *nodes: self.join(nodes) if _is_dict(nodes[0]) else nodes[-1]
    return jax.tree.map(pick, *states, is_leaf=_is_dict)


def _is_dict(node: Any) -> bool:
  return isinstance(node, dict)


def _sound(looked: Sequence[tuple[Tree, Tree]]) -> jax.Array:
  """Bool scalar: all of ``finite`` and ``peaks`` are."""
  finite, peaks = (by_row(list(trees)) for trees in zip(*looked, strict=True))
  return jnp.all(finite) & jnp.all(jnp.isfinite(peaks))
