"""Bounds hold for random weights and inputs, and are reached where they are tight. Expected sizes equal those of samples."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.analysis.risk import bounds as bounds
from maxtext_like.analysis.risk.bounds import Signal

U = bounds.UNIT_ROUNDOFF["float32"]
SEEDS = st.integers(0, 2**32 - 1)


def rms_normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
  return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def draws(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
  """Draws random directions, sparse ones and single channels, because typical inputs stay far below a bound."""
  x = rng.normal(size=(count, dim)) * 10.0 ** rng.uniform(-2, 3, size=(count, 1))
  x[: count // 3] *= rng.random((count // 3, dim)) < 0.2
  x[:dim] = np.eye(dim)[:count]
  return x


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(2, 24), st.integers(1, 17), st.booleans())
def test_linear_maps_of_normed_inputs(seed: int, dim: int, outputs: int, biased: bool):
  rng = np.random.default_rng(seed)
  scale, w = rng.normal(size=dim) * 3, rng.normal(size=(dim, outputs)).astype(np.float32)
  bias = rng.normal(size=dim) if biased else None
  signal = bounds.through(bounds.normed(scale, U, bias=bias), (w[:, i : i + 1] for i in range(outputs)), U)
  x = rms_normed(draws(rng, 64, dim), scale) + (0 if bias is None else bias)
  y = x @ w
  assert (np.abs(y) <= signal.bounds()).all()
  # The input along scale * w[:, 0] reaches the bound, except for the allowance for rounding.
  if bias is None:
    worst = rms_normed((scale * w[:, 0])[None] * 1e3, scale) @ w[:, 0]
    np.testing.assert_allclose(np.abs(worst[0]), signal.bounds()[0], rtol=1e-4)


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.integers(1, 5), st.integers(1, 6), st.integers(1, 9))
def test_blocks_are_bounded_block_by_block(seed: int, count: int, size: int, outputs: int):
  rng = np.random.default_rng(seed)
  one = bounds.normed(rng.normal(size=size), U)
  w = rng.normal(size=(count * size, outputs)).astype(np.float32)
  signal = bounds.through(bounds.heads(one, count), [w], U)
  x = rms_normed(draws(rng, 60, size).reshape(-1, 1, size)[rng.integers(0, 60, (50, count)), 0], one.scale)
  assert (np.abs(x.reshape(50, -1) @ w) <= signal.bounds() * (1 + 1e-9)).all()
  flat = bounds.through(bounds.heads(one, count).channels(slice(None)), [w], U)
  assert (signal.bounds() <= flat.bounds() * (1 + 1e-5)).all()  # the norm of each block makes the bound smaller


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.sampled_from(["gelu", "silu"]))
def test_gated_product(seed: int, activation: str):
  from maxtext_like.layers.mlp import activate

  rng = np.random.default_rng(seed)
  normed = bounds.normed(rng.normal(size=7) * 5, U)
  g, h = (rng.normal(size=(7, 5)).astype(np.float32) for _ in range(2))
  gate, up = (bounds.through(normed, [w], U) for w in (g, h))
  x = rms_normed(draws(rng, 50, 7), normed.scale)
  act = np.asarray(activate((x @ g).astype(np.float32), activation))  # pyright: ignore[reportArgumentType]
  product = np.abs(act * (x @ h))
  assert (product <= bounds.gated(gate, up, activation, U).bounds() * (1 + 1e-6)).all()


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(1, 6), st.booleans())
def test_scores_of_normed_heads_at_any_rotation(seed: int, half: int, interleave: bool):
  rng = np.random.default_rng(seed)
  dim = 2 * half
  sq, sk = rng.normal(size=dim), rng.normal(size=dim)
  pairs = bounds.rotary_pairs(np.arange(dim), interleave=interleave)
  bound, _ = bounds.normed_scores(sq, sk, U, pairs=pairs)
  q, k = rms_normed(draws(rng, 40, dim), sq), rms_normed(draws(rng, 40, dim), sk)
  angle = rng.uniform(0, 2 * math.pi, size=(40, half))
  a, b = q[:, pairs[:, 0]], q[:, pairs[:, 1]]
  turned = q.copy()
  turned[:, pairs[:, 0]], turned[:, pairs[:, 1]] = (
    a * np.cos(angle) - b * np.sin(angle),
    a * np.sin(angle) + b * np.cos(angle),
  )
  assert (np.abs(turned @ k.T) <= bound).all()


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(2, 6), st.integers(2, 9), st.integers(2, 9))
def test_the_bilinear_bound_is_the_largest_value(seed: int, head: int, left: int, right: int):
  rng = np.random.default_rng(seed)
  sources = bounds.normed(rng.normal(size=left), U), bounds.normed(rng.normal(size=right), U)
  a, b = rng.normal(size=(left, 3, head)).astype(np.float32), rng.normal(size=(right, 3, head)).astype(np.float32)
  found = bounds.bilinear_bound(bounds.gram(a, sources[0]), bounds.gram(b, sources[1]))
  for n in range(3):
    left_n = a[:, n].T * (sources[0].scale * sources[0].radius)
    right_n = b[:, n].T * (sources[1].scale * sources[1].radius)
    np.testing.assert_allclose(found[n], np.linalg.norm(left_n.T @ right_n, 2), rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.floats(-4, 4), st.floats(-4, 4))
def test_clipping_and_adding(seed: int, low: float, high: float):
  rng = np.random.default_rng(seed)
  low, high = min(low, high), max(low, high)
  scale = rng.normal(size=5) * 3
  offset = rng.normal(size=5)
  x = rms_normed(draws(rng, 30, 5), scale) + offset
  signal = bounds.normed(scale, U, bias=offset)
  assert (np.abs(np.clip(x, low, high)) <= signal.clipped(low, high).bounds() * (1 + 1e-9)).all()
  total = signal.added(signal, U).plus(offset, U)
  assert (np.abs(x[:15] + x[15:] + offset) <= total.bounds()).all()


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.sampled_from(["float16", "bfloat16"]), st.integers(2, 40))
def test_a_bound_holds_for_numbers_rounded_at_every_step(seed: int, dtype: str, dim: int):
  import ml_dtypes

  kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
  rng = np.random.default_rng(seed)
  u = bounds.UNIT_ROUNDOFF[dtype]
  rounded = lambda x: x.astype(kind).astype(np.float32)
  scale, w = rng.uniform(0.1, 2, size=dim), rng.normal(size=(dim, 3)).astype(np.float32)
  bias = rng.normal(size=dim)
  signal = bounds.through(bounds.normed(scale, u, roundings=2, bias=bias), [w], u)
  worst = np.concatenate([draws(rng, 40, dim), [scale * w[:, 0]], [scale * w[:, 1]]])
  x = rounded(rounded(rms_normed(worst, np.ones(dim)) * scale) + bias)
  y = rounded(x @ rounded(w))
  assert (np.abs(y) <= signal.bounds()).all()


def test_the_expected_peak_is_the_median_of_drawn_maxima():
  rng = np.random.default_rng(0)
  std = np.array([0.5, 1.0, 3.0, 2.9])
  offset = np.array([0.0, 8.0, 0.0, -1.0])
  maxima = np.abs(rng.normal(size=(400, 1000, 4)) * std + offset).max(axis=(1, 2))
  np.testing.assert_allclose(bounds.expected_peak(std, 1000, offset), np.median(maxima), rtol=0.03)


def test_the_expected_peak_of_a_product_is_the_median_of_drawn_maxima():
  rng = np.random.default_rng(1)
  gate, up = np.array([40.0, 30.0, 10.0]), np.array([20.0, 25.0, 70.0])
  g, h = (rng.normal(size=(400, 1000, 3)) * std for std in (gate, up))
  maxima = np.abs(np.maximum(g, 0) * h).max(axis=(1, 2))
  np.testing.assert_allclose(bounds.expected_product_peak(gate, up, 1000), np.median(maxima), rtol=0.05)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_second_moment_of_an_activation(activation: str):
  from maxtext_like.layers.mlp import activate

  x = np.linspace(-9, 9, 200001, dtype=np.float64)
  density = np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
  for std, offset in ((0.01, 0.0), (1.0, 0.5), (3.0, -1.0)):
    values = np.asarray(activate((x * std + offset).astype(np.float32), activation), np.float64)  # pyright: ignore
    expected = math.sqrt(np.sum(np.square(values) * density))
    found = bounds.activated_moment(np.array([std]), activation, np.array([offset]))
    np.testing.assert_allclose(found, [expected], rtol=1e-2)


def test_a_signal_of_one_channel_blocks_is_bounded_by_absolute_sums():
  signal = bounds.through(Signal(np.array([2.0, 3.0]), np.zeros(2)), [np.array([[1.0, -4.0], [-1.0, 0.0]], np.float32)], 0.0)
  np.testing.assert_allclose(signal.bounds(), [5.0, 8.0], rtol=1e-6)
