"""Separates the arrays of a ``jax.vjp`` pull-back from its structure, so that one loop can pass it to another loop without the
arrays that the other loop already has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.core

Tree = Any


@dataclass(frozen=True, eq=False)
class Residuals:
  """The structure of a pull-back of ``jax.vjp``, without its arrays.

  Attributes:
    structure: the pull-back's structure as a pytree.
    places: for each of its leaves the index of an array that is passed in again, or None for the next of the kept arrays.
    constants: leaves that are not tracers, by their indices.
  """

  structure: Any
  places: tuple[int | None, ...]
  constants: dict[int, Any]

  @classmethod
  def of(cls, pull: Callable[..., Any], given: Tree) -> "tuple[Residuals, list[jax.Array]]":
    """Return a pull-back's structure, and its arrays that are not leaves of ``given``.

    Args:
      pull: returned by ``jax.vjp``, under a transformation.
      given: arrays that ``Residuals.pull`` will receive again: inputs of the function and arrays that it closed over.
    """
    leaves, structure = jax.tree.flatten(pull)
    number = {id(x): n for n, x in reversed([*enumerate(jax.tree.leaves(given))])}
    constants = {i: x for i, x in enumerate(leaves) if not isinstance(x, jax.core.Tracer)}
    places = tuple(None if i in constants else number.get(id(x)) for i, x in enumerate(leaves))
    kept = [x for i, x in enumerate(leaves) if places[i] is None and i not in constants]
    return cls(structure, places, constants), kept

  def pull(self, kept: list[jax.Array], given: Tree) -> Callable[..., Any]:
    """Return the pull-back.

    Args:
      kept: as ``of`` returned them.
      given: a tree with the structure that ``of`` received, with equal arrays.
    """
    theirs, mine = jax.tree.leaves(given), iter(kept)
    leaves = [
      self.constants[i] if i in self.constants else next(mine) if place is None else theirs[place]
      for i, place in enumerate(self.places)
    ]
    return jax.tree.unflatten(self.structure, leaves)
