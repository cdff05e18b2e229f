"""8-bit codes of moments against a search of the complete table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_like.layers.param import Param
from maxtext_like.layers.quantization.quantized import dynamic_map
from maxtext_like.training.optimizers.dynamic8 import (
  Blocks,
  Layout,
  decode,
  encode,
  from_blocks,
  in_blocks,
  layout,
  scale_sharding,
)

LENGTH = 24
WHERE = Layout(-1, LENGTH)
KINDS = pytest.mark.parametrize("signed", [True, False])


def table(signed: bool) -> np.ndarray:
  """Return the 256 fractions in ascending order (Dettmers et al. 2022, section 2.1), float64."""
  shares = [0.0, 1.0]
  for power in range(7):
    ends = np.linspace(0.1, 1, 2**power * (1 if signed else 2) + 1)
    middles = 10.0 ** (power - 6) * (ends[1:] + ends[:-1]) / 2
    shares += [*middles, *(-middles if signed else ())]
  return np.sort(shares)


def written(x: np.ndarray, signed: bool) -> np.ndarray:
  """Return the codes of blocks [..., n] by a search of the complete table."""
  most = np.abs(x.astype(np.float64)).max(-1, keepdims=True)
  codes = np.abs((x / np.where(most > 0, most, 1))[..., None] - table(signed)).argmin(-1)
  return codes if signed else np.where(x > 0, np.maximum(codes, 1), codes)


@jax.jit
def coded(x):
  signed = encode(in_blocks(x, WHERE), WHERE, signed=True)
  unsigned = encode(in_blocks(jnp.abs(x), WHERE), WHERE, signed=False)
  return {s: (c, from_blocks(decode(c, WHERE, signed=s), WHERE)) for s, c in ((True, signed), (False, unsigned))}


@KINDS
def test_the_codes_are_those_of_the_table_and_of_bitsandbytes(signed):
  """All numbers of ``create_dynamic_map(signed)`` in float32 of bitsandbytes 0.50.2, with a relative tolerance of 3e-7."""
  every = Blocks(jnp.arange(256, dtype=jnp.uint8), jnp.ones(1))
  found = jax.jit(lambda c: from_blocks(decode(c, Layout(-1, 256), signed=signed), Layout(-1, 256)))(every)
  np.testing.assert_allclose(found, table(signed), rtol=3e-7)
  if signed:
    np.testing.assert_allclose(found, dynamic_map(), rtol=3e-7)  # equals bitsandbytes bit for bit
  theirs = {True: (0, 127, 128, 254, 255), False: (0, 1, 128, 254, 255)}[signed]
  said = {True: (-0.99296874, 0, 5.5e-07, 0.99296874, 1), False: (0, 3.25e-07, 0.11054687, 0.9964844, 1)}[signed]
  np.testing.assert_allclose(np.asarray(found)[list(theirs)], said, rtol=3e-7)


@KINDS
def test_codes_are_the_nearest(signed):
  rng = np.random.default_rng(0)
  x = (rng.standard_normal((1000, LENGTH)) * 10.0 ** rng.uniform(-8, 0, (1000, LENGTH))).astype(np.float32)
  x = x if signed else np.abs(x)
  codes, back = (np.asarray(y) for y in (coded(x)[signed][0].codes, coded(x)[signed][1]))
  expected = written(x, signed)
  exact = (x.astype(np.float64) / np.abs(x).max(-1, keepdims=True))[..., None]
  distances = np.abs(exact - table(signed)[np.stack([codes, expected], -1)])
  assert np.all((codes == expected) | (np.abs(np.diff(distances)[..., 0]) < 1e-7))  # halfway between two codes
  assert np.mean(codes == expected) > 0.9999
  # Decoded numbers encode to the same codes. Blocks whose largest magnitude is negative are excluded, because the code has no
  # -1.
  same = np.abs(back).max(-1) == np.abs(x).max(-1)
  assert np.mean(same) > 0.4
  np.testing.assert_array_equal(coded(back)[signed][0].codes[same], codes[same])


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=40)
@given(hnp.arrays(np.float32, (3, LENGTH), elements=NUMBERS), st.sampled_from([1.0, 1e-20, 1e-38]))
def test_what_comes_back_is_near(x, unit):
  x = (x * np.float32(unit)).astype(np.float32)
  # Most machines flush numbers below `tiny` to zero. The smallest numbers kept here decode to numbers above it.
  x = np.where(np.abs(x) < 2 * np.finfo(np.float32).tiny, 0, x)
  most = np.abs(x.astype(np.float64)).max(-1, keepdims=True)
  for signed, (stored, back) in coded(x).items():
    exact, back = (x if signed else np.abs(x)).astype(np.float64), np.asarray(back, np.float64)
    np.testing.assert_array_equal(stored.scale, most)
    assert np.all(np.abs(back) <= most)
    half = 0.9 / (128 if signed else 256) + 1e-6  # half of the widest spacing
    assert np.all(np.abs(back - exact) <= half * most + 2e-38)
    assert np.all(back[exact == 0] == 0)
    tenth = np.abs(exact) >= 0.1 * most  # in this decade the relative spacing is smallest
    assert np.all(np.abs(back - exact)[tenth] <= half * most.repeat(LENGTH, -1)[tenth])
    if signed:
      assert np.all(back * exact >= 0)
      assert np.all((back == exact) | (exact != -most) | (exact == most) | (back / np.where(most > 0, most, 1) < -0.99))
    else:
      assert np.all((np.asarray(stored.codes) > 0) == (exact > 0))  # no second moment above 0 becomes 0
      assert np.all((back == most) | (exact != most))  # the largest is exact


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen_in_the_scale_of_its_block_alone(bad):
  x = np.ones((2, LENGTH), np.float32)
  x[1, 3] = bad
  for stored, _ in coded(x).values():
    assert np.isfinite(stored.scale).tolist() == [[True], [False]]


def test_blocks_lie_where_no_device_has_a_part_of_one():
  cases: list[tuple[tuple[int, ...], tuple[str | None, ...], Any]] = [
    ((5376, 21504), ("embed", "mlp"), Layout(-1, 224)),  # 1344 on each of 16 devices
    ((21504, 5376), ("mlp", "embed"), Layout(-2, 224)),
    ((60, 5376, 32, 256), ("layers", "embed", "heads", "head_dim"), Layout(-1, 256)),  # head_dim is never split
    ((32, 512, 5376), ("heads", "head_dim", "embed"), Layout(-2, 256)),
    ((262144, 5376), ("vocab", "embed"), Layout(-1, 168)),
    ((128, 2816, 704), ("expert", "embed", "mlp"), Layout(-1, 44)),
    ((2816, 128), ("embed", "expert"), Layout(-2, 176)),
    ((5376, 16), ("embed", None), Layout(-2, 168)),  # a factor of an adapter
    ((262144, 35 * 256), ("vocab", "per_layer"), Layout(-1, 140)),
    ((60, 7168), ("layers", None), None),  # norms
    ((60, 63, 65), ("layers", "embed", "mlp"), None),  # 4095 numbers per layer, too few
    ((64, 64), ("embed", "mlp"), Layout(-2, 4)),
  ]
  for shape, axes, expected in cases:
    assert layout(Param(shape, axes)) == expected, shape


def test_scales_lie_as_the_codes_but_where_there_are_too_few():
  mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "tensor"))
  place = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
  assert scale_sharding(place, (8, 4)).spec == PartitionSpec("fsdp", "tensor")
  assert scale_sharding(place, (8, 6)).spec == PartitionSpec("fsdp", None)
  both = NamedSharding(mesh, PartitionSpec(("fsdp", "tensor")))
  assert scale_sharding(both, (16, 3)).spec == PartitionSpec(("fsdp", "tensor"), None)
  assert scale_sharding(both, (4, 3)).spec == PartitionSpec(None, None)
