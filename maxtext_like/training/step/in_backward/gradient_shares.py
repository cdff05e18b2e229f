"""What each layer has of the sum of squares of all gradients, remembered from step to step, so that one backward pass can clip
by the norm of all of them (``clip: running``).

Layers come from the last to the first, and each is updated before the next one's gradients are there. Those that are there say
how large all will be, by what they had of the sum in the steps before: an embedding may have four fifths of it and a layer a
hundredth. The state keeps these shares as ``gradient_shares``, float32 [L + 1]: of each layer, and in the end of all that lies
in no stack.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.decoder import Decoder
from maxtext_like.training.optimizers.by_layer import Part, take

Tree = Any


@dataclass(frozen=True, eq=False)
class GradientShares:
  """Of a model whose parts are updated one by one.

  Attributes:
    places: where the rows of a part lie among the shares, int32 [rows].
    first: before the first step, float32 [L + 1]: what is trained has one as much as another.
  """

  places: dict[Part, np.ndarray]
  first: np.ndarray

  @classmethod
  def of(cls, decoder: Decoder, trained: dict[Part, np.ndarray]) -> "GradientShares":
    """``trained``: which rows of a part have a gradient, bool [rows]."""
    places = {part: np.full(len(rows), len(decoder.layers), np.int32) for part, rows in trained.items()}
    for i in range(len(decoder.layers)):
      stack, row, layer = decoder.locate(i)
      places[stack, layer][row] = i
    counts = np.zeros(len(decoder.layers) + 1)
    for part, rows in trained.items():
      counts[places[part]] = rows
    return cls(places, (counts / counts.sum()).astype(np.float32))

  def of_row(self, shares: jax.Array, part: Part, row: jax.Array | None) -> jax.Array:
    """That of a row of a part; None: of what has no rows."""
    return shares[jnp.asarray(self.places[part])[0 if row is None else row]]

  def updated(self, shares: jax.Array, squares: tuple[Tree, Tree], applied: jax.Array) -> jax.Array:
    """Half of what they were and half of this step's, if it was applied.

    Args:
      shares: of the state.
      squares: of the gradients by row, in the two parts of ``Squares``. With numbers beyond 2^40 the shares stay as they are.
      applied: bool scalar.
    """
    small, large = squares
    found = jnp.zeros_like(shares)
    for part, place in self.places.items():
      of_part = functools.reduce(jnp.add, map(jnp.atleast_1d, jax.tree.leaves(take(small, part))), jnp.zeros(len(place)))
      found = found.at[place].add(of_part)
    total = jnp.sum(found)
    usable = applied & jnp.isfinite(total) & (total > 0)
    for beyond in jax.tree.leaves(large):
      usable &= ~jnp.any(beyond > 0)
    return jnp.where(usable, 0.5 * shares + 0.5 * found / jnp.where(usable, total, 1), shares)
