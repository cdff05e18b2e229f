"""What ``StepInBackward`` sees of the parts of a model as the backward pass goes through them, and of all parts together."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_like.training.optimizers.by_layer import Part, join, join_states

Tree = Any


class Seen(NamedTuple):
  """What is known of a part once the backward pass has been there, by leaf; without an update only of its gradients.

  Attributes:
    gradients: sums of squares in the two parts of ``Squares``.
    clipped: bool scalar, the part's own gradients were clipped.
    updated: bool, the updated numbers are finite, where that was looked at.
    parameters: sums of squares of what is stored now, as ``gradients``.
    peaks: largest magnitudes in the updated state of the optimizer, infinite where a number is not finite, likewise.
    survival: sums of ``update_survival.products``, where they are asked for.
  """

  gradients: tuple[Tree, Tree]
  clipped: Any = None
  updated: Tree = None
  parameters: tuple[Tree, Tree] | None = None
  peaks: Tree = None
  survival: tuple[Tree, Tree] | None = None


def by_row(tree: Tree) -> jax.Array:
  """The leaves side by side: numbers of rows [R], in the order of ``row_labels``."""
  leaves = [jnp.atleast_1d(x) for x in jax.tree.leaves(tree)]
  return jnp.concatenate(leaves) if leaves else jnp.zeros(0)


def together(seen: dict[Part, list[Seen]]) -> Seen:
  """Of all parts, each of which was seen in one run of rows or several."""
  parts = {part: jax.tree.map(lambda *x: jnp.concatenate([*map(jnp.atleast_1d, x)]), *found) for part, found in seen.items()}
  pairs = lambda of: tuple(join([of(s)[i] for s in parts.values()]) for i in (0, 1))
  gradients = pairs(lambda s: s.gradients)
  found = parts[()]
  if found.parameters is None:
    return Seen(gradients)
  return Seen(
    gradients,
    {part: s.clipped for part, s in parts.items()},
    None if found.updated is None else join([s.updated for s in parts.values()]),
    pairs(lambda s: s.parameters),
    None if found.peaks is None else join_states([s.peaks for s in parts.values()]),
    None if found.survival is None else pairs(lambda s: s.survival),
  )
