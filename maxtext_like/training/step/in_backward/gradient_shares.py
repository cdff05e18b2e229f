"""Each layer's share of the squared gradient norm, kept across steps to clip in one backward pass (``clip: running``).

The backward pass visits layers from last to first, and each is updated before the next layer's gradients exist. The layers
visited so far and their shares in earlier steps give an estimate of the global norm. Shares differ widely: an embedding may
have four fifths of the sum and a layer one hundredth. The state keeps them as ``gradient_shares``, float32 [L + 1]: one per
layer, and the last for all parameters outside the stacks.
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
  """Shares of a model whose parts are updated one by one.

  Attributes:
    places: index into the shares for each row of a part, int32 [rows].
    first: shares before the first step, float32 [L + 1], the same for everything that is trained.
  """

  places: dict[Part, np.ndarray]
  first: np.ndarray

  @classmethod
  def of(cls, decoder: Decoder, trained: dict[Part, np.ndarray]) -> "GradientShares":
    """Args: trained: bool [rows] per part, True for the rows that have a gradient."""
    # Rows outside the stacks share the last index; rows of a stack have the index of their layer.
    places = {part: np.full(len(rows), len(decoder.layers), np.int32) for part, rows in trained.items()}
    for i in range(len(decoder.layers)):
      stack, row, layer = decoder.locate(i)
      places[stack, layer][row] = i
    # Before the first step, each trained row has the same share.
    counts = np.zeros(len(decoder.layers) + 1)
    for part, rows in trained.items():
      counts[places[part]] = rows
    return cls(places, (counts / counts.sum()).astype(np.float32))

  def of_row(self, shares: jax.Array, part: Part, row: jax.Array | None) -> jax.Array:
    """Return the share of one row of a part; ``row`` is None for parameters outside the stacks."""
    return shares[jnp.asarray(self.places[part])[0 if row is None else row]]

  def updated(self, shares: jax.Array, squares: tuple[Tree, Tree], applied: jax.Array) -> jax.Array:
    """Return the average of the old shares and those of this step, or the old shares if the step was not applied.

    Args:
      shares: shares of the state.
      squares: squared gradients by row, as the two parts of ``Squares``. Numbers beyond 2^40 leave the shares unchanged.
      applied: bool scalar.
    """
    # Sum the squares of each layer.
    small, large = squares
    found = jnp.zeros_like(shares)
    for part, place in self.places.items():
      of_part = functools.reduce(jnp.add, map(jnp.atleast_1d, jax.tree.leaves(take(small, part))), jnp.zeros(len(place)))
      found = found.at[place].add(of_part)
    # Keep the old shares if the step was skipped or if its sums are not ordinary numbers.
    total = jnp.sum(found)
    usable = applied & jnp.isfinite(total) & (total > 0)
    for beyond in jax.tree.leaves(large):
      usable &= ~jnp.any(beyond > 0)
    return jnp.where(usable, 0.5 * shares + 0.5 * found / jnp.where(usable, total, 1), shares)
