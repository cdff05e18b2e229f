"""The update of a part of the parameters by its gradients: of a layer, or of all that lies in no stack.

The table of a large vocabulary has more numbers than a layer, and its steps in float32 would be as large as the gradients of
several layers. Where moments are stored in fewer bits, and so what a rule computes is not all fused, such an array is updated
piece by piece, each written where it lies before the next one is read.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.models.row_norms import peaks_of_arrays
from maxtext_like.training.optimizers.by_layer import in_states
from maxtext_like.training.optimizers.moments import piece_rows
from maxtext_like.training.optimizers.optimizer import Optimizer
from maxtext_like.training.step import update_retention
from maxtext_like.training.step.in_backward.part_stats import by_row
from maxtext_like.training.step.rounding import stays_finite
from maxtext_like.training.step.train_step import TrainStep

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
    large = [_InPieces(self._of(leaves, [i]), rows, *leaves.only([i], grads, state, params)) for i, rows in pieces.items()]
    rest = [i for i in range(leaves.structure.num_leaves) if i not in pieces]
    looked: list[tuple[Tree, Tree]] = []
    if self.step.careful:  # nothing is written before all has been seen, and then all is
      looked = [one.looked(self) for one in large]
      alive = alive & _sound(looked)
    others = self._at_once(self._of(leaves, rest), *leaves.only(rest, grads, state, params), alive)
    write = replace(self, step=replace(self.step, careful=False))
    found = [*(one.written(write, others.alive) for one in large), others]  # counters are those of the last
    return Updated(
      leaves.join([u.params for u in found]),
      leaves.join_states([u.state for u in found]),
      others.alive,
      leaves.join([*(finite for finite, _ in looked), others.finite]) if looked else None,
      leaves.join_states([*(peaks for _, peaks in looked), others.peaks]) if looked else None,
      None if others.survival is None else tuple(map(leaves.join, zip(*(u.survival for u in found), strict=True))),
    )

  def _pieces(self, params: Tree) -> dict[int, int]:
    """Rows of a piece of each of the leaves that are updated so, by its number."""
    if self.row is not None or not self.optimizer.in_pieces:
      return {}
    both = zip(jax.tree.leaves(self.optimizer.spec), jax.tree.leaves(params), strict=True)
    return {i: rows for i, (p, x) in enumerate(both) if x.ndim and (rows := piece_rows(p, x)) < x.shape[0]}

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
      survival = jax.tree.map(jnp.sum, update_retention.products(params, new, direction, self.rate))
    if step.careful:
      # Whether it may be written is known before anything is: this pass over the numbers draws no random bits.
      stays = stays_finite if step.rounding else lambda x, dtype: jnp.isfinite(x.astype(dtype))
      finite = jax.tree.map(lambda x, p: jnp.all(stays(x, p.dtype)), moved, params)
      peaks = peaks_of_arrays(new_state)
      alive = alive & _sound([(finite, peaks)])
    new, new_state = jax.tree.map(lambda x, old: jnp.where(alive, x, old), (new, new_state), (params, state))
    return Updated(new, new_state, alive, finite, peaks, survival)


class _InPieces(NamedTuple):
  """A leaf whose update goes through it piece by piece: its optimizer, rows of a piece, and trees of this leaf alone."""

  optimizer: Optimizer
  rows: int
  grads: Tree
  state: Tree
  params: Tree

  @property
  def _every(self) -> int:
    """Rows of the leaf."""
    (leaf,) = jax.tree.leaves(self.params)
    return leaf.shape[0]

  def _piece(self, update: PartUpdate, first: Any, rows: int, params: Tree, state: Tree, alive: jax.Array) -> Updated:
    """Of so many rows, from the first of them on."""

    def cut(x):
      share = self._every // x.shape[0] if x.ndim else 1  # 1, or the rows of a block that has one scale
      return jax.lax.dynamic_slice_in_dim(x, first // share, rows // share) if x.ndim else x

    grads, state, params = jax.tree.map(cut, (self.grads, state, params))
    (leaf,) = jax.tree.leaves(params)
    begin = jnp.asarray(first, jnp.uint32) * jnp.uint32(leaf.size // rows)
    return update._at_once(self.optimizer, grads, state, params, alive, begin)

  def looked(self, update: PartUpdate) -> tuple[Tree, Tree]:
    """``finite`` and ``peaks`` of the update."""

    def look(first, rows):
      piece = self._piece(update, first, rows, self.params, self.state, jnp.ones((), bool))
      return piece.finite, piece.peaks

    count, last = divmod(self._every, self.rows)
    finite, peaks = jax.lax.map(lambda number: look(number * self.rows, self.rows), jnp.arange(count))
    found = jax.tree.map(jnp.all, finite), jax.tree.map(jnp.max, peaks)
    if not last:
      return found
    finite, peaks = look(count * self.rows, last)
    return jax.tree.map(jnp.logical_and, found[0], finite), jax.tree.map(jnp.maximum, found[1], peaks)

  def written(self, update: PartUpdate, alive: jax.Array) -> Updated:
    """The update, where ``alive``; counters are as they were."""

    def write(first, rows, carry):
      params, state, sums = carry
      piece = self._piece(update, first, rows, params, state, alive)

      def put(x, new):
        share = self._every // x.shape[0] if x.ndim else 1
        return jax.lax.dynamic_update_slice_in_dim(x, new, first // share, 0) if x.ndim else x

      added = None if sums is None else jax.tree.map(jnp.add, sums, piece.survival)
      return jax.tree.map(put, params, piece.params), jax.tree.map(put, state, piece.state), added

    zeros = jax.tree.map(lambda x: jnp.zeros((), jnp.float32), self.params)
    carry = self.params, self.state, (zeros, zeros) if update.step.survival else None
    count, last = divmod(self._every, self.rows)
    carry = jax.lax.fori_loop(0, count, lambda number, carry: write(number * self.rows, self.rows, carry), carry)
    params, state, sums = write(count * self.rows, last, carry) if last else carry
    return Updated(params, state, alive, survival=sums)


class Leaves(NamedTuple):
  """Trees of some leaves of a part, with None in the place of the others."""

  structure: Any

  def some(self, chosen: Collection[int], tree: Tree) -> Tree:
    """Of a tree of this structure."""
    kept = [x if i in chosen else None for i, x in enumerate(self.structure.flatten_up_to(tree))]
    return self.structure.unflatten(kept)

  def of_state(self, chosen: Collection[int], state: Tree) -> Tree:
    """Of each such tree in a state of the optimizer; counters as they are."""
    return in_states(lambda tree: self.some(chosen, tree), state)

  def only(self, chosen: Collection[int], grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree, Tree]:
    """Of all that an update reads."""
    return self.some(chosen, grads), self.of_state(chosen, state), self.some(chosen, params)

  def join(self, trees: Sequence[Tree]) -> Tree:
    """The tree that these are the leaves of."""
    places = zip(*map(self.structure.flatten_up_to, trees), strict=True)
    return self.structure.unflatten([next((x for x in found if x is not None), None) for found in places])

  def join_states(self, states: Sequence[Tree]) -> Tree:
    """Likewise; counters are those of the last."""
    return in_states(lambda *trees: self.join(trees), *states)


def _sound(looked: Sequence[tuple[Tree, Tree]]) -> jax.Array:
  """Bool scalar: all of ``finite`` and ``peaks`` are."""
  finite, peaks = (by_row(list(trees)) for trees in zip(*looked, strict=True))
  return jnp.all(finite) & jnp.all(jnp.isfinite(peaks))
