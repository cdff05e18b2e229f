"""Tests the self-test of gradients of norms: those of XLA pass, and a kernel with a known fault fails the case that covers this
fault."""

import functools

import jax.numpy as jnp
import pytest

from maxtext_like.numerics.norm_selfcheck import NormShape, self_test

SHAPE = NormShape(dtype="bfloat16", gradient="bfloat16", dim=256)


def by_xla(x, inverse, factor, g, stream, real, *, fault=""):
  if fault == "raises":
    raise NotImplementedError("no such layout\nand more lines")
  u, du = x.astype(jnp.float32) * inverse[:, None], g.astype(jnp.float32)
  if real is not None and fault != "rows that are zeroed":
    du = jnp.where(real[:, None], du, 0)
  dscale = jnp.sum((du * u)[:-1] if fault == "the last row's sum" else du * u, axis=0)
  du = du * factor
  dx = inverse[:, None] * (du - u * jnp.mean(u * du, axis=-1, keepdims=True))
  if stream is not None and fault != "the stream":
    dx = dx + stream.astype(jnp.float32)
  if fault == "a row":
    dx = dx.at[17].set(jnp.nan)
  return dx.astype(x.dtype), dscale


@pytest.mark.parametrize(("dtype", "gradient"), [("bfloat16", "bfloat16"), ("float32", "float16"), ("float16", "float32")])
def test_xla_passes(dtype, gradient):
  results = self_test(NormShape(dtype=dtype, gradient=gradient, dim=384), by_xla)
  assert [r.problem for r in results] == ["", "", ""]


@pytest.mark.parametrize(
  ("fault", "failed", "words"),
  [
    ("the stream", "with a stream", "dx: relative error"),
    ("rows that are zeroed", "with zeroed rows", "dx: relative error"),
    ("the last row's sum", "alone", "dscale: relative error"),
    ("a row", "alone", "dx: 256 of 256768 numbers are not finite"),
    ("raises", "alone", "NotImplementedError: no such layout"),
  ],
)
def test_faults_are_found_and_named(fault, failed, words):
  results = {r.name: r for r in self_test(SHAPE, functools.partial(by_xla, fault=fault))}
  assert words in results[failed].problem
  assert results[failed].raised == (fault == "raises")
