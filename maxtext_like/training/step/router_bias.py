"""DeepSeek V3's balancing of experts without an auxiliary loss (Wang et al. 2024, arXiv:2408.15664)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys


@dataclass(frozen=True)
class RouterBias:
  """After each update, raises an expert's bias by ``rate`` if its load was below the mean and lowers it if above.

  Attributes:
    rate: ``routed_bias_update_rate``.
    layers: position of the bias for each row of "moe_load": (stack, row, layer name).
  """

  rate: float
  layers: tuple[tuple[str, int, str], ...]

  def __call__(self, frozen: Any, load_LE: jax.Array, applied: jax.Array) -> Any:
    """Return the frozen parameters with updated biases.

    Args:
      frozen: parameter tree in which the biases are not None.
      load_LE: share of routing choices of each expert, in the order of the layers.
      applied: bool scalar; if False, the biases stay the same.
    """
    # Only the sign of the load's deviation counts, so that the rate is the size of each change.
    change_LE = self.rate * jnp.sign(jnp.mean(load_LE, axis=-1, keepdims=True) - load_LE)
    change_LE = jnp.where(applied, change_LE, 0)
    # Map each stacked bias array to the rows of its layers in the load.
    rows: dict[tuple[str, str], list[int]] = {}
    for number, (stack, row, layer) in enumerate(self.layers):
      rows.setdefault((stack, layer), []).append(number)
      if row != len(rows[stack, layer]) - 1:
        raise ValueError(f"{stack}.{layer}: loads are not in the order of the rows")

    # Add the changes to the bias arrays.
    def leaf(path, x):
      keys = path_keys(path)
      if keys[2:] != ("moe", "router", "bias"):
        return x
      return x + change_LE[jnp.asarray(rows[keys[0], keys[1]])].astype(x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, frozen)


def find_router_bias(decoder: Decoder, rate: float) -> RouterBias | None:
  """Return the bias update for a decoder, or None if no expert has a bias or the rate is 0."""
  # List the layers with experts, in the order of the load's rows.
  spec = decoder.params()
  layers = []
  for number in range(len(decoder.layers)):
    stack, row, name = decoder.locate(number)
    router = spec[stack][name].get("moe", {}).get("router", {})
    if router:
      layers.append(((stack, row, name), "bias" in router))
  # Layers without a bias are listed too, because the load has a row for each layer with experts.
  if rate == 0 or not any(has_bias for _, has_bias in layers):
    return None
  return RouterBias(rate, tuple(place for place, _ in layers))
