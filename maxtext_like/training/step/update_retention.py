"""Measures how much of the intended updates survives rounding to the stored weights (``update_survival_every``).

    update_survival = <after - before, intended> / <intended, intended>

The products run over the numbers of a layer. ``before`` and ``after`` are the stored weights; ``intended`` = -rate x direction
in float32, after clipping and with weight decay. The value is 1 if all updates arrive, and 0 if none does or if the changes are
unrelated to the intended ones. Stochastic rounding gives 1 on average, because its errors have no direction. A ratio of lengths
would count these errors as updates. Both products are sums over arrays, so a layer's value weights its arrays by their
intended change.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.config.schema import Config

Tree = Any

LOW = 0.5
"""A value of all layers together below this one is reported."""
NAME = "update_survival"


def products(before: Tree, after: Tree, direction: Tree, rate: jax.Array) -> tuple[Tree, Tree]:
  """Terms of <after - before, intended> and <intended, intended>, both divided by the squared rate, so that their sizes are
  those of directions. Zeros at rate 0.

  Args:
    before, after: stored parameters.
    direction: float32 descent direction, without the learning rate.
    rate: float32 scalar, the learning rate.
  """
  inverse = jnp.where(rate > 0, 1 / rate, 0)
  wide = lambda x: x.astype(jnp.float32)
  arrived = jax.tree.map(lambda b, a, d: (wide(b) - wide(a)) * inverse * d, before, after, direction)
  return arrived, jax.tree.map(lambda d: jnp.where(rate > 0, jnp.square(d), 0), direction)


def metrics(sums: Mapping[str, Sequence[Any] | np.ndarray], labels: list[str]) -> dict[str, Any]:
  """Return the metrics of one step: for all layers together, by layer, and for the other parameters by name. {} if no update
  was intended.

  Args:
    sums: "arrived" and "intended", float32 [R].
    labels: parameter names of the rows, such as ``layers.7.mlp.down``.
  """
  # Sum the rows of each layer, and of each parameter outside the layers.
  parts: dict[str, np.ndarray] = {}
  for label, *pair in zip(labels, sums["arrived"], sums["intended"], strict=True):
    first, *rest = label.split(".")
    part = rest[0] if first == "layers" else first
    parts[part] = parts.get(part, np.zeros(2)) + np.array(pair, np.float64)
  # Divide the sums.
  share = lambda pair: float(pair[0] / pair[1]) if pair[1] > 0 else None
  if (total := share(sum(parts.values()))) is None:
    return {}
  layers = [share(parts.get(str(i), np.zeros(2))) for i in range(1 + max((int(p) for p in parts if p.isdecimal()), default=-1))]
  found = {
    f"{NAME}/{part}": value for part, pair in parts.items() if not part.isdecimal() and (value := share(pair)) is not None
  }
  shares = [value for value in (*layers, *found.values()) if value is not None]
  return {NAME: total, f"{NAME}/lowest": min(shares), f"{NAME}/layers": layers} | found


def warning(step: int, row: Mapping[str, Any], config: Config) -> str | None:
  """Return a warning if the value is low, with the key that fixes it; otherwise None."""
  if row[NAME] >= LOW:
    return None
  # Name the key that helps, unless rounding is not the cause.
  dtype = config.precision.weight_dtype
  said = f"step {step}: only {row[NAME]:.1%} of the update reached the stored weights (lowest {row[f'{NAME}/lowest']:.1%})"
  if dtype == "float32" or config.training.stochastic_rounding:
    how = "float32" if dtype == "float32" else "rounded stochastically"
    return f"{said}, although they are {how}. {NAME}/layers in metrics.jsonl has the share of each layer"
  return f"{said}: {dtype} rounds the rest away. stochastic_rounding=true keeps it on average, weight_dtype=float32 exactly"
