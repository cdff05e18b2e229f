"""Tests the kernel for gradients of norms in Pallas' interpreter against XLA, and the cases that it supports.

The kernel that is compiled for a GPU has a self-test, like every fused kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxtext_like.layers.kernels.norm import pallas_gpu
from maxtext_like.layers.kernels.norm.registry import Case, choose, refuses
from maxtext_like.layers.norms import NormConfig, RMSNorm
from maxtext_like.layers.precision import Precision

INTERPRETER: Any = getattr(plgpu, "InterpretGPUParams", None)
interpreted = pytest.mark.skipif(INTERPRETER is None, reason="this JAX has no interpreter for the kernels")  # before JAX 0.11
OLD = jax.__version_info__ < (0, 11)
LATER = (pytest.mark.slow, pytest.mark.newest)


@interpreted
@pytest.mark.parametrize(
  ("dtype", "options", "rows"),
  [
    ("bfloat16", {"scale_plus_one": True}, (1, 5)),
    pytest.param("float16", {}, (7,), marks=LATER),
    pytest.param("float32", {"round_before_scale": True}, (2, 2, 1), marks=LATER),
  ],
)
def test_gradients_are_those_of_xla(dtype, options, rows, monkeypatch):
  """Test the gradient alone, with rows set to zero, and added to the gradient of the residual stream. The kernel runs fewer
  programs than there are rows, and the number of rows need not be a multiple of theirs."""
  monkeypatch.setattr(pallas_gpu, "_BLOCKS", 1)
  jitted: Any = pallas_gpu.gradients  # the jitted function would not see the changed number of programs
  monkeypatch.setattr(pallas_gpu, "gradients", functools.partial(jitted.__wrapped__, interpret=INTERPRETER()))
  D, rng = 256, np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 3, dtype)
  x, g, stream = (draw(*rows, D) for _ in range(3))
  p = {"scale": jnp.asarray(rng.normal(size=D), jnp.float32)}
  real = jnp.asarray(rng.random(rows) > 0.4)

  def found(kernel):
    norm = RMSNorm(NormConfig(dim=D, kernel=kernel, **options), Precision(dtype=dtype))
    alone, back = jax.vjp(norm, p, x)
    zeroed, back_of_zeroed = jax.vjp(lambda p, x: norm(p, x, real=real), p, x)
    pair, back_of_pair = jax.vjp(norm.with_input, p, x)
    return [alone, zeroed, *pair], [*back(g), *back_of_zeroed(g), *back_of_pair((stream, g))]

  (values, gradients), (want, wanted) = found("pallas_gpu"), found("xla")
  for got, expected in zip(values, want, strict=True):
    np.testing.assert_array_equal(got, expected)
  for got, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
    assert got.dtype == expected.dtype
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    # XLA rounds its gradients before it adds the stream to them.
    assert np.linalg.norm(got - expected) <= 2 * float(jnp.finfo(dtype).eps) * np.linalg.norm(expected)


def test_who_gets_the_kernel():
  """``auto`` chooses the kernel for one Hopper GPU and rows of a supported width, and XLA otherwise. Naming the kernel in an
  unsupported case is an error."""
  able: dict[str, Any] = {"platform": "gpu", "capability": "9.0", "devices": 1, "dim": 2560}
  assert choose("auto", Case(**able)) == ("xla" if OLD else "pallas_gpu")
  assert choose("xla", Case(**able)) == "xla"
  for change, why in (
    ({"platform": "tpu"}, "it runs on Hopper GPUs, not on tpu"),
    ({"capability": "10.0"}, "compute capability 9.0, not 10.0"),
    ({"devices": 8}, "one GPU, but the mesh has 8"),
    ({"dim": 2570}, "rows of 2570 elements are not a multiple of 128 from 1024 to 8192"),
    ({"dim": 256}, "rows of 256 elements"),
  ):
    other: dict[str, Any] = {**able, **change}
    case = Case(**other)
    assert any(why in reason for reason in refuses(case))
    assert choose("auto", case) == "xla"
    with pytest.raises(ValueError, match=r"norm_kernel=pallas_gpu .*\n  fix: .*norm_kernel=auto"):
      choose("pallas_gpu", case)
