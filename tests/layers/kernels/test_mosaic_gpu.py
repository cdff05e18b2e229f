"""Tests that a program with kernels for NVIDIA GPUs is always lowered to the same text. The compilation cache would not find it
otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.kernels.grouped_matmul.pallas_gpu import KERNEL, product
from maxtext_like.layers.kernels.grouped_matmul.registry import Case

pytestmark = [
  pytest.mark.newest,
  pytest.mark.skipif(bool(KERNEL.refuses(Case(platform="gpu", dtype="bfloat16"))), reason="this JAX cannot compile the kernel"),
]


def lowered(rows: int) -> str:
  x, w = jnp.zeros((rows, 64), jnp.bfloat16), jnp.zeros((2, 64, 64), jnp.bfloat16)
  run = jax.jit(lambda x, w: product(x, w, jnp.asarray(np.array([rows - 3, 3], np.int32))))
  return run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()


def test_a_program_does_not_depend_on_what_was_lowered_before():
  """The first start of a run lowers the self-tests of kernels before the train step, the second start does not. Both must lower
  the same train step, so that the second start finds it in the compilation cache."""
  first = lowered(16)
  lowered(24)
  jax.clear_caches()
  assert lowered(16) == first
  assert "mosaic_gpu" in first
