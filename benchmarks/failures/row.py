"""The report of a known failure, and functions that draw arrays."""

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
    failure: the failure, and the project in which it was seen.
    theirs: the result of the failing policy, in words.
    ours: the result of this project's code, in words.
    numbers: the measured numbers, for tests.
  """

  failure: str
  theirs: str
  ours: str
  numbers: dict[str, float] = field(default_factory=dict)


def normal(seed: int, *shape: int, size: float = 1.0) -> np.ndarray:
  """Returns float32 normal numbers with standard deviation ``size``. numpy draws them, so no program is compiled."""
  return (np.random.default_rng(seed).normal(size=shape) * size).astype(np.float32)


def drawn(spec: Any, seed: int = 0) -> Any:
  """Returns arrays for declared parameters: constants as declared, otherwise normal numbers of variance 1 / the first size."""

  def leaf(number: int, p: Param) -> np.ndarray:
    if isinstance(p.init, Constant):
      return np.full(p.shape, p.init.value, np.float32)
    return normal(seed + number, *p.shape, size=p.shape[0] ** -0.5)

  leaves, tree = jax.tree.flatten(spec)
  return jax.tree.unflatten(tree, [leaf(number, p) for number, p in enumerate(leaves)])


def finite_share(x) -> float:
  """Returns the share of finite numbers of an array."""
  return float(jnp.mean(jnp.isfinite(x)))
