"""Tests splash attention, in the interpreter, against plain attention."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.splash import splash_attention
from maxtext_like.layers.precision import Precision
from tests.processes import environment

FLOAT32 = Precision(dtype="float32")
SCALE = 0.07


def arrays(B, T, N, K, H, V):
  keys = jax.random.split(jax.random.key(3), 4)
  shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, N, V)]
  return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def packed(T):
  """Return two rows of segments: two documents and padding, and a row of padding."""
  first = np.concatenate([np.full(T // 3, 1), np.full(T // 3, 2), np.zeros(T - 2 * (T // 3))])
  return jnp.asarray(np.stack([first, np.zeros(T)]), jnp.int32)


# 100 is not a multiple of the 128 lanes. 384 is three tiles, so the kernel skips a tile outside the window. The last case has
# the sizes of latent attention.
@pytest.mark.parametrize(
  ("T", "window", "with_segments", "sizes", "soft_cap"),
  [
    (100, None, True, (2, 1, 128, 128), None),
    (384, 100, True, (2, 1, 128, 128), None),
    (384, None, False, (2, 2, 192, 128), None),
    (200, 100, True, (2, 1, 128, 128), 0.6),
  ],
)
@pytest.mark.slow
def test_values_and_gradients_are_those_of_attention_written_out(T, window, with_segments, sizes, soft_cap):
  q, k, v, g = arrays(2, T, *sizes)
  tokens = Tokens(packed(T) if with_segments else None)
  mask = attention_mask(tokens, 2, T, window=window, bidirectional_images=False)

  def fused(q, k, v):
    return splash_attention(q, k, v, tokens, window=window, scale=SCALE, soft_cap=soft_cap, interpret=True)

  def plain(q, k, v):
    return dot_product_attention(q, k, v, mask, scale=SCALE, precision=FLOAT32, soft_cap=soft_cap)[0]

  def both(attention):
    out, backward = jax.vjp(attention, q, k, v)
    return out, *backward(g)

  results = jax.jit(lambda: both(fused))()
  for name, got, want in zip(["out", "dq", "dk", "dv"], results, both(plain), strict=True):
    np.testing.assert_allclose(got, want, atol=1e-5, err_msg=name)
  if with_segments:
    padding = np.asarray(tokens.segments) == 0
    assert padding.any()
    assert all(not np.asarray(x)[padding].any() for x in results)


_ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np
from maxtext_like.layers.attention.masks import Tokens
from maxtext_like.layers.kernels.attention.splash import splash_attention

def fused(x, segments):
  return splash_attention(x, x, x, Tokens(segments), window=50, scale=0.07, interpret=True)

mesh = jax.make_mesh((1, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
for rows in (2, 3):  # 3 rows do not divide among 2 devices
  x, segments = jax.random.normal(jax.random.key(0), (rows, 128, 1, 128)), jnp.ones((rows, 128), jnp.int32)
  alone = jax.jit(fused)(x, segments)
  with jax.set_mesh(mesh):
    np.testing.assert_array_equal(jax.jit(fused)(x, segments), alone)
"""


@pytest.mark.slow
def test_on_a_mesh_every_device_takes_its_rows():
  done = subprocess.run([sys.executable, "-c", _ON_A_MESH], env=environment(2), capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
