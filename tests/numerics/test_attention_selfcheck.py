"""Tests the self-test of attention kernels: correct kernels pass, and a kernel with a known fault fails the cases that cover
this fault."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.layers.attention.masks import Tokens, attention_mask, masked_softmax
from maxtext_like.layers.kernels.attention.registry import Name, attend
from maxtext_like.layers.kernels.attention.splash import splash_attention
from maxtext_like.layers.precision import Precision
from maxtext_like.numerics.attention_selfcheck import _CAP, arguments_of, cases, self_test, shape_class
from tests.tiers import slow


def shape(
  length=128, dtype="bfloat16", window=True, segments=True, head_dim=8, kv_heads=2, images=False, causal=True,
  name: Name = "cudnn_flash", soft_cap=False,
):  # fmt: skip
  return shape_class(
    name, dtype=dtype, head_dim=head_dim, query_heads=2 * kv_heads, kv_heads=kv_heads,
    window=window, segments=segments, images=images, causal=causal, length=length, soft_cap=soft_cap,
  )  # fmt: skip


def kernel(q, k, v, tokens, *, window, scale, fault=""):
  """Compute attention in plain XLA, with operands in their own dtype and a float32 softmax. ``fault`` selects one typical fault
  of kernels."""
  B, T = q.shape[:2]
  groups = q.shape[2] // k.shape[2]
  if fault == "heads in another order":
    k, v = jnp.tile(k, (1, 1, groups, 1)), jnp.tile(v, (1, 1, groups, 1))
  else:
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
  if fault == "ignores the window":
    window = None
  if fault == "one key too many" and window is not None:
    window = window + 1
  if fault == "leaks between documents" and tokens.segments is not None:
    tokens = Tokens(jnp.minimum(tokens.segments, 1), tokens.images)
  if fault == "images see only what is before them":
    tokens = Tokens(tokens.segments)
  if fault == "joins images side by side" and tokens.images is not None:
    tokens = Tokens(tokens.segments, jnp.minimum(tokens.images, 1))
  mask = attention_mask(tokens, B, T, window=window, bidirectional_images=True)[:, None]
  scores = jnp.einsum("BTNH,BSNH->BNTS", q, k, preferred_element_type=jnp.float32) * scale
  if fault == "a mask of -10000":
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e4), axis=-1)
  elif fault == "an added mask of -10000":
    probs = jax.nn.softmax(scores + jnp.where(mask, 0, -1e4), axis=-1)
  elif fault == "the mean where nothing is seen":
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
  else:
    probs = masked_softmax(scores, mask)
  out = jnp.einsum("BNTS,BSNH->BTNH", probs.astype(q.dtype), v)
  if fault == "NaN gradients at 64" and T % 128 == 64:
    out = _nan_backwards(out)
  if fault == "raises":
    raise NotImplementedError("head_dim must be <= 128\nand more lines")
  return out


@jax.custom_vjp
def _nan_backwards(x):
  return x


_nan_backwards.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.nan,))


def failed(shape, attention) -> dict[str, str]:
  return {r.name: r.problem for r in self_test(shape, attention) if r.problem}


# (fault, row length, the cases that fail, a pattern for the problem of the first one)
EVERY = ["window", "segments", "fully masked rows", "strongly negative scores"]
FAULTS = [
  ("ignores the window", 128, EVERY, "values: relative error"),
  ("one key too many", 128, EVERY, "values: relative error"),
  ("heads in another order", 128, EVERY, "values: relative error"),
  ("leaks between documents", 128, ["segments", "fully masked rows", "strongly negative scores"], "values: relative error"),
  ("the mean where nothing is seen", 128, ["fully masked rows"], r"values: not zero at \d+ of \d+ padding positions"),
  ("a mask of -10000", 128, ["fully masked rows", "strongly negative scores"], "not zero"),
  ("an added mask of -10000", 128, ["fully masked rows", "strongly negative scores"], "not zero"),
  ("NaN gradients at 64", 192, ["length % 128 == 64"], r"dv: (\d+) of \1 numbers are not finite"),
]


@pytest.mark.parametrize(("fault", "length", "names", "words"), FAULTS, ids=[f[0] for f in FAULTS])
def test_each_planted_fault_is_caught_by_name(fault, length, names, words):
  problems = failed(shape(length), functools.partial(kernel, fault=fault))
  assert list(problems) == names
  assert re.search(words, problems[names[0]])


@pytest.mark.parametrize("window", [True, slow(False)])
@pytest.mark.parametrize("segments", [True, slow(False)])
@pytest.mark.parametrize("fault", ["", "images see only what is before them", "joins images side by side"])
def test_what_is_wrong_with_images_alone_fails_the_case_of_images(fault, segments, window):
  of = shape(256, window=window, segments=segments, images=True)
  problems = failed(of, functools.partial(kernel, fault=fault))
  assert list(problems) == (["images"] if fault else [])
  assert "images" in str(of)


def test_the_images_of_a_case_cross_tiles_and_lie_within_documents():
  of = shape(4096, images=True)
  case = next(c for c in cases(of) if c.images)
  *_, segments, images = arguments_of(of, case)
  segments, images = np.asarray(segments), np.asarray(images)
  sizes = []
  for row in range(2):
    for number in range(1, images[row].max() + 1):
      at = np.flatnonzero(images[row] == number)
      assert at[-1] - at[0] == len(at) - 1
      assert len(set(segments[row, at])) == 1
      sizes.append((len(at), at[-1] // 256 - at[0] // 256))
  assert len(sizes) == 7
  assert sum(tiles > 0 for _, tiles in sizes) >= 4
  assert max(size for size, _ in sizes) > case.length // 4 + 1  # the window
  assert all(x is None for x in arguments_of(shape(segments=False), cases(shape())[0])[-2:])


def test_only_a_kernel_with_parts_is_tried_in_parts_and_by_its_own_program():
  assert not any(c.in_parts for c in cases(shape()))
  of = shape(head_dim=256, name="mosaic_flash", images=True)
  assert [c.name for c in cases(of)][-4:] == ["images", "strongly negative scores", "in parts", "in parts, masked rows"]
  results = self_test(of, kernel, functools.partial(kernel, fault="one key too many"))
  assert [r.name for r in results if r.problem] == ["in parts", "in parts, masked rows"]


@pytest.mark.parametrize(("dtype", "length"), [("bfloat16", 192), ("float16", 128)])
def test_rounding_alone_passes(dtype, length):
  results = self_test(shape(length, dtype), kernel)
  assert [r.name for r in results] == [c.name for c in cases(shape(length, dtype))]
  assert not any(r.problem for r in results)
  assert all(r.error and r.gradient_error for r in results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.slow
def test_a_kernel_that_does_not_cap_scores_fails_every_case_of_a_class_with_a_soft_cap(dtype):
  of = shape(256, dtype, soft_cap=True)
  assert "a soft cap" in str(of)
  how = {"bidirectional_images": False, "precision": Precision(dtype=dtype)}
  assert failed(of, functools.partial(attend, "dot_product", soft_cap=_CAP, **how)) == {}
  assert list(failed(of, kernel)) == EVERY


def test_a_kernel_that_raises_has_failed_with_its_words():
  results = self_test(shape(), functools.partial(kernel, fault="raises"))
  assert {r.problem for r in results} == {"NotImplementedError: head_dim must be <= 128"}
  assert all(r.raised for r in results)


def test_splash_in_the_interpreter_passes():
  attention = functools.partial(splash_attention, interpret=True)
  assert failed(shape(128, "float32", head_dim=128, kv_heads=1), attention) == {}


@pytest.mark.parametrize("length", [128, 200])
@pytest.mark.slow
def test_rows_that_are_not_causal(length):
  """Patches of an image see each other in both directions. A kernel whose queries see no later keys fails every case, including
  that of an odd length, which has padding."""
  of = shape(length, window=False, kv_heads=1, causal=False)
  assert "not causal, documents" in str(of)
  names = [c.name for c in cases(of)]
  assert (
    names == ["not causal", "segments", "fully masked rows", "strongly negative scores", "length % 128 == 72"][: len(names)]
  )
  how = {"bidirectional_images": False, "precision": Precision(dtype="bfloat16")}
  good = functools.partial(attend, "dot_product", causal=False, **how)
  assert failed(of, good) == {}
  assert list(failed(of, functools.partial(attend, "dot_product", **how))) == names


def test_the_cases_of_a_class():
  assert [c.name for c in cases(shape(2048))] == ["window", "segments", "fully masked rows", "strongly negative scores"]
  assert [c.name for c in cases(shape(320, window=False, segments=False))] == [
    "causal", "strongly negative scores", "length % 128 == 64",
  ]  # fmt: skip
  assert [c.length for c in cases(shape(320))] == [256] * 4 + [320]
  assert [c.length for c in cases(shape(100))] == [128] * 4 + [100]


def test_long_rows_share_a_class_by_remainder():
  assert shape(4096) == shape(8192)
  assert shape(4096).length == 1536
  assert shape(4096 + 64).length == 1600
  assert shape(4096 + 64) != shape(4096 + 128)
  assert "2 query heads a key-value head, a window, documents, 1536 positions" in str(shape(4096))
