"""Updates one part of the parameters in the fused backward pass, and collects statistics of all parts.

A part is a layer, or everything outside the stacks. The embedding of a large vocabulary has more numbers than a layer, and its
float32 updates would be as large as the gradients of several layers. If moments are stored in fewer bits, the update is not
fused completely. Such an array is therefore updated piece by piece: each piece is written before the next one is read.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.models.row_norms import peaks_of_arrays
from maxtext_like.training.optimizers.by_layer import Part, in_states, join, join_states
from maxtext_like.training.optimizers.moments import piece_rows
from maxtext_like.training.optimizers.optimizer import Optimizer
from maxtext_like.training.step import update_retention
from maxtext_like.training.step.rounding import stays_finite
from maxtext_like.training.step.train_step import TrainStep

Tree = Any


class Updated(NamedTuple):
  """Result of an update.

  Attributes:
    params, state: the next ones, or the previous ones if the update was not applied.
    allowed: bool scalar, True if it was applied.
    finite: bool per leaf of the updated parameters; None if not checked.
    peaks: largest magnitudes of the updated state, see ``peaks_of_arrays``; None if not checked.
    survival: sums of ``update_retention.products``; None if not requested.
  """

  params: Tree
  state: Tree
  allowed: jax.Array
  finite: Tree = None
  peaks: Tree = None
  survival: tuple[Tree, Tree] | None = None


@dataclass(frozen=True, eq=False)
class PartUpdate:
  """The update of one part in a step.

  Attributes:
    step: the train step.
    optimizer: optimizer of the part.
    number: int32 scalar, step index of the state.
    rate: float32 scalar, the learning rate.
    row: int32 scalar, row of the stack; None for parameters outside the stacks.
    clipped: clips gradients, elementwise, float32.
    masked: zeroes directions of parameters that are not trained, elementwise.
  """

  step: TrainStep
  optimizer: Optimizer
  number: jax.Array
  rate: jax.Array
  row: jax.Array | None
  clipped: Callable[[Tree], Tree]
  masked: Callable[[Tree], Tree]

  def __call__(self, grads: Tree, state: Tree, params: Tree, allowed: jax.Array) -> Updated:
    """Update the part.

    Args:
      grads: gradients of the part before clipping.
      state, params: optimizer state and parameters before the update.
      allowed: bool scalar, True if the update may be applied.
    """
    # Usually no array is large enough to be updated in pieces.
    pieces = self._pieces(params)
    if not pieces:
      return self._at_once(self.optimizer, grads, state, params, allowed)
    # Separate the arrays that are updated in pieces from the others.
    leaves = Leaves(jax.tree.structure(params))
    large = [_InPieces(self._of(leaves, [i]), rows, *leaves.only([i], grads, state, params)) for i, rows in pieces.items()]
    rest = [i for i in range(leaves.structure.num_leaves) if i not in pieces]
    checks: list[tuple[Tree, Tree]] = []
    if self.step.checked:  # check all pieces before the first one is written
      checks = [one.check(self) for one in large]
      allowed = allowed & _all_finite(checks)
    # Update the other arrays, then write the pieces without checking them again.
    others = self._at_once(self._of(leaves, rest), *leaves.only(rest, grads, state, params), allowed)
    write = replace(self, step=replace(self.step, checked=False))
    found = [*(one.apply(write, others.allowed) for one in large), others]  # step counters come from the last one
    return Updated(
      leaves.join([u.params for u in found]),
      leaves.join_states([u.state for u in found]),
      others.allowed,
      leaves.join([*(finite for finite, _ in checks), others.finite]) if checks else None,
      leaves.join_states([*(peaks for _, peaks in checks), others.peaks]) if checks else None,
      None if others.survival is None else tuple(map(leaves.join, zip(*(u.survival for u in found), strict=True))),
    )

  def _pieces(self, params: Tree) -> dict[int, int]:
    """{leaf index: rows of a piece} of the leaves that are updated in pieces."""
    if self.row is not None or not self.optimizer.in_pieces:
      return {}
    both = zip(jax.tree.leaves(self.optimizer.spec), jax.tree.leaves(params), strict=True)
    return {i: rows for i, (p, x) in enumerate(both) if x.ndim and (rows := piece_rows(p, x)) < x.shape[0]}

  def _of(self, leaves: "Leaves", chosen: Collection[int]) -> Optimizer:
    """Return the optimizer of some leaves."""
    given = {f.name: getattr(self.optimizer, f.name) for f in fields(Optimizer)}
    return Optimizer(**given | {"spec": leaves.some(chosen, self.optimizer.spec)})

  def _at_once(
    self, optimizer: Optimizer, grads: Tree, state: Tree, params: Tree, allowed: jax.Array, begin: jax.Array | int = 0
  ) -> Updated:
    """Update some leaves, or one piece of a leaf that starts after ``begin`` numbers."""
    # The update in float32, and rounded to the stored dtype.
    step = self.step
    direction, new_state = optimizer.update(self.clipped(grads), state, params)
    direction = self.masked(direction)
    updated = step.updated(params, direction, self.rate)
    new = step.rounded(updated, params, self.number, self.row, begin)
    finite = peaks = survival = None
    # How much of the update survives rounding.
    if step.survival:
      survival = jax.tree.map(jnp.sum, update_retention.products(params, new, direction, self.rate))
    if step.checked:
      # Decide before writing. This check needs no random bits, so it does not change the rounding.
      stays = stays_finite if step.rounding else lambda x, dtype: jnp.isfinite(x.astype(dtype))
      finite = jax.tree.map(lambda x, p: jnp.all(stays(x, p.dtype)), updated, params)
      peaks = peaks_of_arrays(new_state)
      allowed = allowed & _all_finite([(finite, peaks)])
    # Keep the old numbers if the update may not be applied.
    new, new_state = jax.tree.map(lambda x, old: jnp.where(allowed, x, old), (new, new_state), (params, state))
    return Updated(new, new_state, allowed, finite, peaks, survival)


class _InPieces(NamedTuple):
  """A leaf that is updated piece by piece: its optimizer, the rows of a piece, and trees with only this leaf."""

  optimizer: Optimizer
  rows: int
  grads: Tree
  state: Tree
  params: Tree

  @property
  def _every(self) -> int:
    """Number of rows of the leaf."""
    (leaf,) = jax.tree.leaves(self.params)
    return leaf.shape[0]

  def _piece(self, update: PartUpdate, first: Any, rows: int, params: Tree, state: Tree, allowed: jax.Array) -> Updated:
    """Update ``rows`` rows, starting at row ``first``."""

    def cut(x):
      share = self._every // x.shape[0] if x.ndim else 1  # 1, or the rows that share one block scale
      return jax.lax.dynamic_slice_in_dim(x, first // share, rows // share) if x.ndim else x

    # Slice gradients, state and parameters to the same rows.
    grads, state, params = jax.tree.map(cut, (self.grads, state, params))
    (leaf,) = jax.tree.leaves(params)
    # The position of the piece, so that its random bits do not depend on how the array is cut.
    begin = jnp.asarray(first, jnp.uint32) * jnp.uint32(leaf.size // rows)
    return update._at_once(self.optimizer, grads, state, params, allowed, begin)

  def check(self, update: PartUpdate) -> tuple[Tree, Tree]:
    """Compute ``finite`` and ``peaks`` of the update without writing it."""

    def check_piece(first, rows):
      piece = self._piece(update, first, rows, self.params, self.state, jnp.ones((), bool))
      return piece.finite, piece.peaks

    count, last = divmod(self._every, self.rows)
    # Check complete pieces in a loop, then the shorter last one.
    finite, peaks = jax.lax.map(lambda number: check_piece(number * self.rows, self.rows), jnp.arange(count))
    found = jax.tree.map(jnp.all, finite), jax.tree.map(jnp.max, peaks)
    if not last:
      return found
    finite, peaks = check_piece(count * self.rows, last)
    return jax.tree.map(jnp.logical_and, found[0], finite), jax.tree.map(jnp.maximum, found[1], peaks)

  def apply(self, update: PartUpdate, allowed: jax.Array) -> Updated:
    """Write the update if ``allowed``. Step counters stay unchanged."""

    def write(first, rows, carry):
      params, state, sums = carry
      piece = self._piece(update, first, rows, params, state, allowed)

      # Write the piece into its array. Step counters have no rows and stay.
      def put(x, new):
        share = self._every // x.shape[0] if x.ndim else 1
        return jax.lax.dynamic_update_slice_in_dim(x, new, first // share, 0) if x.ndim else x

      added = None if sums is None else jax.tree.map(jnp.add, sums, piece.survival)
      return jax.tree.map(put, params, piece.params), jax.tree.map(put, state, piece.state), added

    zeros = jax.tree.map(lambda x: jnp.zeros((), jnp.float32), self.params)
    carry = self.params, self.state, (zeros, zeros) if update.step.survival else None
    count, last = divmod(self._every, self.rows)
    # Complete pieces in a loop, then the shorter last one.
    carry = jax.lax.fori_loop(0, count, lambda number, carry: write(number * self.rows, self.rows, carry), carry)
    params, state, sums = write(count * self.rows, last, carry) if last else carry
    return Updated(params, state, allowed, survival=sums)


class Leaves(NamedTuple):
  """Selects some leaves of a part's trees. The other leaves become None."""

  structure: Any

  def some(self, chosen: Collection[int], tree: Tree) -> Tree:
    """Select from a tree of this structure."""
    kept = [x if i in chosen else None for i, x in enumerate(self.structure.flatten_up_to(tree))]
    return self.structure.unflatten(kept)

  def of_state(self, chosen: Collection[int], state: Tree) -> Tree:
    """Select from each such tree in an optimizer state. Step counters stay."""
    return in_states(lambda tree: self.some(chosen, tree), state)

  def only(self, chosen: Collection[int], grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree, Tree]:
    """Select from everything that an update reads."""
    return self.some(chosen, grads), self.of_state(chosen, state), self.some(chosen, params)

  def join(self, trees: Sequence[Tree]) -> Tree:
    """Merge trees that each have some of the leaves."""
    places = zip(*map(self.structure.flatten_up_to, trees), strict=True)
    return self.structure.unflatten([next((x for x in found if x is not None), None) for found in places])

  def join_states(self, states: Sequence[Tree]) -> Tree:
    """Merge optimizer states in the same way. Step counters come from the last one."""
    return in_states(lambda *trees: self.join(trees), *states)


def _all_finite(checks: Sequence[tuple[Tree, Tree]]) -> jax.Array:
  """Bool scalar: True if all ``finite`` flags are set and all ``peaks`` are finite."""
  finite, peaks = (by_row(list(trees)) for trees in zip(*checks, strict=True))
  return jnp.all(finite) & jnp.all(jnp.isfinite(peaks))


class PartStats(NamedTuple):
  """Statistics of one part after the backward pass visited it, per leaf. Without an update only ``gradients`` is set.

  Attributes:
    gradients: sums of squares, as the two parts of ``Squares``.
    clipped: bool scalar, True if the part's own gradients were clipped.
    updated: bool, True if the updated numbers are finite; None if not checked.
    parameters: sums of squares of the stored parameters, as in ``gradients``.
    peaks: largest magnitudes in the updated optimizer state, infinite for non-finite numbers; None if not checked.
    survival: sums of ``update_retention.products``; None if not requested.
  """

  gradients: tuple[Tree, Tree]
  clipped: Any = None
  updated: Tree = None
  parameters: tuple[Tree, Tree] | None = None
  peaks: Tree = None
  survival: tuple[Tree, Tree] | None = None


def by_row(tree: Tree) -> jax.Array:
  """Concatenate the leaves: one number per row [R], in the order of ``row_labels``."""
  leaves = [jnp.atleast_1d(x) for x in jax.tree.leaves(tree)]
  return jnp.concatenate(leaves) if leaves else jnp.zeros(0)


def combined(stats: dict[Part, list[PartStats]]) -> PartStats:
  """Combine the statistics of all parts. A part has one entry for each run of rows."""
  # Join the runs of rows of each part.
  parts = {part: jax.tree.map(lambda *x: jnp.concatenate([*map(jnp.atleast_1d, x)]), *found) for part, found in stats.items()}
  pairs = lambda of: tuple(join([of(s)[i] for s in parts.values()]) for i in (0, 1))
  gradients = pairs(lambda s: s.gradients)
  # A measuring pass has only gradients.
  found = parts[()]
  if found.parameters is None:
    return PartStats(gradients)
  return PartStats(
    gradients,
    {part: s.clipped for part, s in parts.items()},
    None if found.updated is None else join([s.updated for s in parts.values()]),
    pairs(lambda s: s.parameters),
    None if found.peaks is None else join_states([s.peaks for s in parts.values()]),
    None if found.survival is None else pairs(lambda s: s.survival),
  )
