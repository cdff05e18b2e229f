"""The share of the intended updates that the stored weights realise (``update_survival_every``).

    update_survival = <after - before, intended> / <intended, intended>

over the numbers of a layer, ``before`` and ``after`` as they are stored, ``intended`` = -rate x direction in float32, decay of
weights included, behind clipping. It is 1 where all arrives, and 0 where nothing does or what does has nothing to do with what
was meant. With stochastic rounding it is 1 in the mean, as its errors have no direction; the length of what was realised would
count those as an update. Both sums add up over arrays: a layer's share is that of its arrays by what they were meant to move.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.config.schema import Config

Tree = Any

LOW = 0.5
"""A share of all layers together that is told."""
NAME = "update_survival"


def products(before: Tree, after: Tree, direction: Tree, rate: jax.Array) -> tuple[Tree, Tree]:
  """Terms of <after - before, intended> and <intended, intended>, both over the square of the rate, which leaves them the sizes
  of directions; zeros at rate 0, at which nothing is intended.

  Args:
    before, after: parameters as they are stored.
    direction: float32; the parameters are meant to go ``rate`` times it down.
    rate: float32 scalar.
  """
  inverse = jnp.where(rate > 0, 1 / rate, 0)
  wide = lambda x: x.astype(jnp.float32)
  arrived = jax.tree.map(lambda b, a, d: (wide(b) - wide(a)) * inverse * d, before, after, direction)
  return arrived, jax.tree.map(lambda d: jnp.where(rate > 0, jnp.square(d), 0), direction)


def metrics(sums: Mapping[str, Sequence[Any] | np.ndarray], labels: list[str]) -> dict[str, Any]:
  """Of a step, for its row: of all layers together, by layer, and of the rest by name; {} where nothing was intended.

  Args:
    sums: "arrived" and "intended", float32 [R].
    labels: parameter names behind the rows, as ``layers.7.mlp.down``.
  """
  parts: dict[str, np.ndarray] = {}
  for label, *pair in zip(labels, sums["arrived"], sums["intended"], strict=True):
    first, *rest = label.split(".")
    part = rest[0] if first == "layers" else first
    parts[part] = parts.get(part, np.zeros(2)) + np.array(pair, np.float64)
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
  """What is said of a share that is low, and of the key that mends it."""
  if row[NAME] >= LOW:
    return None
  dtype = config.precision.weight_dtype
  said = f"step {step}: the stored weights took {row[NAME]:.1%} of the update (lowest {row[f'{NAME}/lowest']:.1%})"
  if dtype == "float32" or config.training.stochastic_rounding:
    return f"{said}, although they are {'float32' if dtype == 'float32' else 'rounded stochastically'}: see the layers"
  return f"{said}: {dtype} rounds the rest away. stochastic_rounding=true keeps it on average, weight_dtype=float32 to the bit"
