"""What a pull-back holds, taken apart: so that a loop can hand it to another loop without what that one has anyway."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.core

Tree = Any


@dataclass(frozen=True, eq=False)
class Residuals:
  """The shape of a pull-back of ``jax.vjp``, without its arrays.

  Attributes:
    structure: of the pull-back as a pytree.
    places: for each of its leaves the number of an array that was given, or None: the next of the kept ones.
    constants: leaves that are no tracers, by their numbers.
  """

  structure: Any
  places: tuple[int | None, ...]
  constants: dict[int, Any]

  @classmethod
  def of(cls, pull: Callable[..., Any], given: Tree) -> "tuple[Residuals, list[jax.Array]]":
    """A pull-back's shape, and the arrays of it that are none of ``given``'s leaves.

    Args:
      pull: of ``jax.vjp``, under a transformation.
      given: what ``pull`` of the result will be given the equivalent of: inputs of the function, arrays that it closed over.
    """
    leaves, structure = jax.tree.flatten(pull)
    number = {id(x): n for n, x in reversed([*enumerate(jax.tree.leaves(given))])}
    constants = {i: x for i, x in enumerate(leaves) if not isinstance(x, jax.core.Tracer)}
    places = tuple(None if i in constants else number.get(id(x)) for i, x in enumerate(leaves))
    kept = [x for i, x in enumerate(leaves) if places[i] is None and i not in constants]
    return cls(structure, places, constants), kept

  def pull(self, kept: list[jax.Array], given: Tree) -> Callable[..., Any]:
    """The pull-back again.

    Args:
      kept: as ``of`` returned them.
      given: a tree of the structure that ``of`` saw, of arrays equal to those.
    """
    theirs, mine = jax.tree.leaves(given), iter(kept)
    leaves = [
      self.constants[i] if i in self.constants else next(mine) if place is None else theirs[place]
      for i, place in enumerate(self.places)
    ]
    return jax.tree.unflatten(self.structure, leaves)
