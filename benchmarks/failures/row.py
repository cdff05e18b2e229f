"""What a known failure reports."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.param import Constant, Param


@dataclass(frozen=True)
class Row:
  """One known failure.

  Attributes:
    failure: what goes wrong, and where it was seen.
    theirs: what the failing policy gives, in words.
    ours: what this project's code gives.
    numbers: the measurements behind the words, for tests.
  """

  failure: str
  theirs: str
  ours: str
  numbers: dict[str, float] = field(default_factory=dict)


def normal(seed: int, *shape: int, size: float = 1.0) -> np.ndarray:
  """float32 normal numbers of this standard deviation; numpy's, which need no compiled program."""
  return (np.random.default_rng(seed).normal(size=shape) * size).astype(np.float32)


def drawn(spec: Any, seed: int = 0) -> Any:
  """Arrays for declared parameters: constants as declared, else normal numbers of variance 1 / the first size."""

  def leaf(number: int, p: Param) -> np.ndarray:
    if isinstance(p.init, Constant):
      return np.full(p.shape, p.init.value, np.float32)
    return normal(seed + number, *p.shape, size=p.shape[0] ** -0.5)

  leaves, tree = jax.tree.flatten(spec)
  return jax.tree.unflatten(tree, [leaf(number, p) for number, p in enumerate(leaves)])


def finite_share(x) -> float:
  """Share of finite numbers of an array."""
  return float(jnp.mean(jnp.isfinite(x)))
