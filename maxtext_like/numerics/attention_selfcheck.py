"""Self-test of a fused attention kernel: values and gradients, compared with attention written out in float32.

A fused kernel is a binary that was built and tested on other hardware. cuDNN's bfloat16 backward pass gave NaN gradients with a
finite loss on rows whose length modulo 128 is 64 (pytorch issue 196678). Therefore a kernel is tested on the device that will
run it, in the shapes that it will get, before a model uses it. The cases cover common errors of masks: windows, packed
documents, images, fully masked rows, scores far below any "masked" value, and odd lengths. They also cover code that only runs
for large arguments, if a kernel can split small ones into as many parts.

B batch, T position, N query heads, K key-value heads, H head.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.registry import Name, attend, kernel
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import RULES
from maxtext_like.numerics.selfcheck_programs import Programs, compile_together, run_alone

Attention = Callable[..., Any]
"""(q, k, v, tokens, *, window, scale) -> [B, T, N, H], like ``splash_attention``. Tokens of one image attend to each other."""

LANES = 128
_LONGEST = 3 * 512  # three of the largest tiles, so that one of them is completely outside the window
# Largest relative error of a complete array and of its worst head vector. Rounding alone causes about 3e-3 (values) and 4e-3
# (gradients) of an array with bfloat16, and an eighth of that with float16. One extra key in a window of 400 causes 5e-2.
_TOLERANCE = {"bfloat16": (1e-2, 0.15), "float16": (2e-3, 0.03), "float32": (1e-4, 2e-3)}
_CAP = 2.0  # soft cap of the test: its scores are 1 on average, and a model's own cap would not change them
_ROUNDING_OF_NEGATIVE = (2e-2, 0.3)  # float32 represents a score of -20000 * sqrt(head_dim), before scaling, to within 0.03


@dataclass(frozen=True, kw_only=True)
class ShapeClass:
  """The properties that decide how a kernel works. Sizes that do not matter are small.

  Attributes:
    kernel: name of a fused kernel.
    dtype: dtype of q, k and v.
    head_dim: H.
    value_dim: width of values, which is smaller in latent attention.
    kv_heads: K, at most 2. A case in parts processes one at a time, as a plan for many heads may.
    groups: query heads per key-value head.
    window: True with a sliding window.
    segments: True if rows hold documents and padding.
    images: True if batches hold images, whose tokens attend to each other in both directions.
    causal: True if a query sees no later key; False if it sees all of its document.
    soft_cap: True if the scores have a soft cap.
    length: T. Rows of three tiles represent all longer rows with the same remainder.
  """

  kernel: Name
  dtype: str
  head_dim: int
  value_dim: int
  kv_heads: int
  groups: int
  window: bool
  segments: bool
  images: bool
  causal: bool
  soft_cap: bool
  length: int

  def __str__(self) -> str:
    heads = "1 query head" if self.groups == 1 else f"{self.groups} query heads"
    values = "" if self.value_dim == self.head_dim else f" and values of {self.value_dim}"
    mask = "a window" if self.window else "no window" if self.causal else "not causal"
    what = [f"heads of {self.head_dim}{values}", f"{heads} a key-value head", mask]
    what += ["documents" if self.segments else "no documents", *["images"] * self.images, *["a soft cap"] * self.soft_cap]
    what.append(f"{self.length} positions")
    return f"{self.kernel}, {self.dtype}, {', '.join(what)}"


def shape_class(
  kernel: Name,
  *,
  dtype: str,
  head_dim: int,
  query_heads: int,
  kv_heads: int,
  window: bool,
  segments: bool,
  length: int,
  images: bool = False,
  causal: bool = True,
  value_dim: int | None = None,
  soft_cap: bool = False,
) -> ShapeClass:
  """Return the class of a layer, which its test represents. ``value_dim`` defaults to the width of the keys."""
  if length > _LONGEST:
    length = _LONGEST + length % 512
  return ShapeClass(
    kernel=kernel, dtype=dtype, head_dim=head_dim, value_dim=value_dim or head_dim, kv_heads=min(kv_heads, 2),
    groups=query_heads // kv_heads, window=window, segments=segments, images=images, causal=causal,
    soft_cap=soft_cap, length=length,
  )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
  """One case of the test.

  Attributes:
    name: description of the case.
    length: positions of a row.
    rows: content of the rows.
    negative: visible scores are below -10000.
    images: there are images.
    in_parts: the kernel works in many small parts, as it does for large arguments.
  """

  name: str
  length: int
  rows: Literal["whole", "packed", "masked"]
  negative: bool = False
  images: bool = False
  in_parts: bool = False


def cases(shape: ShapeClass) -> list[Case]:
  """Return the cases of a class. An odd length has a separate case, so that its name identifies the problem."""
  rest = shape.length % LANES
  even = max(shape.length - rest, LANES)
  documents: Literal["whole", "packed"] = "packed" if shape.segments else "whole"
  found = [Case(name="window" if shape.window else "causal" if shape.causal else "not causal", length=even, rows="whole")]
  if shape.segments:
    found.append(Case(name="segments", length=even, rows="packed"))
    found.append(Case(name="fully masked rows", length=even, rows="masked"))
  if shape.images:
    found.append(Case(name="images", length=even, rows=documents, images=True))
  found.append(Case(name="strongly negative scores", length=even, rows=documents, negative=True))
  if kernel(shape.kernel).in_parts is not None:
    found.append(Case(name="in parts", length=even, rows=documents, images=shape.images, in_parts=True))
    if shape.segments:  # some parts have nothing to compute
      found.append(Case(name="in parts, masked rows", length=even, rows="masked", in_parts=True))
  if rest:
    rows: Literal["whole", "masked"] = "masked" if shape.segments else "whole"
    found.append(Case(name=f"length % 128 == {rest}", length=shape.length, rows=rows))
  return found


@dataclass(frozen=True, kw_only=True)
class CaseResult:
  """The result of a case.

  Attributes:
    name: name of the case.
    error, gradient_error: relative errors of the values and of the worst gradient; None if numbers are not finite.
    problem: description of the problem; "" if there is none.
    raised: True if the kernel did not run; ``problem`` is then its error message.
  """

  name: str
  error: float | None = None
  gradient_error: float | None = None
  problem: str = ""
  raised: bool = False

  @classmethod
  def of_error(cls, name: str, error: Exception) -> "CaseResult":
    """Return the result of a case in which the kernel did not run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
    return cls(name=name, problem=said, raised=True)


def self_test(shape: ShapeClass, attention: Attention | None = None, in_parts: Attention | None = None) -> list[CaseResult]:
  """Test a kernel on JAX's default device.

  Args:
    shape: the class.
    attention: the function to test; None for the kernel of the class.
    in_parts: the function to test in a case in parts; None for the kernel of the class.

  Returns:
    A result for each of ``cases``, in order. A kernel that raises has failed; its message is the problem.
  """
  by_length: dict[int, list[Case]] = {}
  for case in cases(shape):
    by_length.setdefault(case.length, []).append(case)
  # Compile everything at the same time. Cases of the same length share two programs: one with all tested functions, because
  # variants of a kernel have parts in common, and the reference.
  tried = compile_together(_programs(shape, {False: attention or _kernel(shape), True: in_parts or _kernel_in_parts(shape)}))
  references = {}
  for length in by_length:
    given = _shapes_of_arguments(shape, length)
    outputs = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (given[3], *given[:3])]
    references[length] = reference(_scale(shape), shape.causal, _cap(shape)), for_reference(shape, given, outputs)
  exact = compile_together(references)
  results = {}
  for length, found in by_length.items():
    numbers = _random_numbers(shape, length)
    for case in found:
      arguments = arguments_of(shape, case, numbers)
      try:
        got = run_alone(tried[length], *arguments)[_variants(found).index(case.in_parts)]
      except Exception as error:
        # Any exception means that the kernel did not run, which is the result of the test.
        results[case] = CaseResult.of_error(case.name, error)
        continue
      errors = run_alone(exact[length], *for_reference(shape, arguments, got, negative=case.negative))
      results[case] = judge(case, shape.dtype, jax.device_get(errors))
  return [results[case] for case in cases(shape)]


def _programs(shape: ShapeClass, functions: Mapping[bool, Any]) -> Programs:
  """Return the programs with the tested functions by ``Case.in_parts``."""
  found = {}
  for length in dict.fromkeys(case.length for case in cases(shape)):
    used = [functions[x] for x in _variants(case for case in cases(shape) if case.length == length)]
    tried = both_ways(used, shape.dtype, _window(shape, length), _scale(shape))
    found[length] = jax.jit(tried), _shapes_of_arguments(shape, length)
  return found


def _variants(found: Iterable[Case]) -> list[bool]:
  """Return the different values of ``Case.in_parts``, in the order of the results of a program."""
  return list(dict.fromkeys(case.in_parts for case in found))


def _cap(shape: ShapeClass) -> float | None:
  return _CAP if shape.soft_cap else None


def _kernel(shape: ShapeClass) -> Attention:
  precision = Precision(dtype=shape.dtype)  # pyright: ignore[reportArgumentType]

  def attention(q, k, v, tokens, *, window, scale):
    return attend(
      shape.kernel, q, k, v, tokens, window=window, bidirectional_images=shape.images, scale=scale, precision=precision,
      causal=shape.causal, soft_cap=_cap(shape),
    )  # fmt: skip

  return attention


def _kernel_in_parts(shape: ShapeClass) -> Attention | None:
  run = kernel(shape.kernel).in_parts
  if run is None:
    return None
  how = {"bidirectional_images": shape.images, "precision": Precision(dtype=shape.dtype), "rules": RULES}  # pyright: ignore[reportArgumentType]
  return functools.partial(run, **how, soft_cap=_cap(shape))


def both_ways(functions: Sequence[Attention], dtype: str, window: int | None, scale: float) -> Any:
  """Return (q, k, v, cotangent, segments, images) -> [values, dq, dk, dv] of each function, computed in ``dtype`` and returned
  in float32."""

  def run(q, k, v, g, segments, images):
    results = []
    for function in functions:

      def forward(q, k, v, function=function):
        return function(q, k, v, Tokens(segments, images), window=window, scale=scale)

      out, backward = jax.vjp(forward, *(x.astype(dtype) for x in (q, k, v)))
      results.append([x.astype(jnp.float32) for x in (out, *backward(g.astype(out.dtype)))])
    return results

  return run


@functools.cache
def reference(scale: float, causal: bool, soft_cap: float | None = None) -> Any:
  """Return a jitted function that compares the results of a kernel with attention written out in float32, with products that no
  backend may round. Its arguments are those of ``for_reference``, its result is ``_differences`` of values, dq, dk and dv.

  Segments, images and the window are arguments, so that all cases of a length and all classes with equal heads share a program.
  """
  exact = Precision(dtype="float32", matmul_precision="highest")

  def written_out(q, k, v, tokens, *, window, scale):
    mask = attention_mask(tokens, *q.shape[:2], window=window if causal else None, bidirectional_images=True, causal=causal)
    return dot_product_attention(q, k, v, mask, scale=scale, precision=exact, soft_cap=soft_cap)[0]

  def run(q, k, v, g, segments, images, window, left_out, size_of_zero, got):
    (want,) = both_ways([written_out], "float32", window, scale)(q, k, v, g, segments, images)
    skipped = (0, left_out, left_out, 0)
    return [_differences(x, y, segments == 0, n, size_of_zero) for x, y, n in zip(got, want, skipped, strict=True)]

  return jax.jit(run)


def for_reference(shape: ShapeClass, arguments: tuple[Any, ...], got: Any, *, negative: bool = False) -> tuple[Any, ...]:
  """Return the arguments of ``reference`` for the arguments of a kernel and its results. negative: as in ``Case``."""
  *arrays, segments, images = arguments
  length = arrays[0].shape[1]
  segments = np.ones((2, length), np.int32) if segments is None else segments
  images = np.zeros((2, length), np.int32) if images is None else images
  window = _window(shape, length) or length  # a window of all positions hides none
  # In the first dimensions of q and k of a case with negative scores, the exact gradient is a difference of large equal terms,
  # so only rounding remains. All of these scores may be at their soft cap, which has no gradient.
  left_out, size_of_zero = (3, 1.0) if negative else (0, 1e-30)
  return *arrays, segments, images, np.int32(window), np.int32(left_out), np.float32(size_of_zero), got


def _differences(x: jax.Array, y: jax.Array, padding_BT: jax.Array, left_out: Any, size_of_zero: Any) -> dict[str, jax.Array]:
  """Compare an array [B, T, heads, H] with its reference.

  Args:
    x, y: the array and the reference.
    padding_BT: which positions are padding.
    left_out: number of dimensions of a head that are not compared, the first ones.
    size_of_zero: norm of a head of the reference if the complete reference is zero.

  Returns:
    Scalars: ``bad``, the number of elements of x that are not finite, out of ``count``; ``whole`` and ``worst``, the norm of
    the difference of the arrays and of the worst head, relative to the reference; ``blind``, the number of positions out of
    ``padding`` where x is not zero.
  """
  compared = jnp.arange(x.shape[-1]) >= left_out
  x, y = jnp.where(compared, x, 0), jnp.where(compared, y, 0)
  # Squares of very small or large numbers do not fit float32, so divide by the largest number first.
  largest = jnp.max(jnp.abs(y))
  unit = jnp.where(largest > 0, largest, 1)
  norms = lambda a: jnp.sqrt(jnp.sum(jnp.square(a / unit), axis=-1))
  sizes, difference = jnp.where(largest > 0, norms(y), size_of_zero), norms(x - y)
  return {
    "bad": jnp.sum(~jnp.isfinite(x)),
    "count": jnp.sum(compared) * (x.size // x.shape[-1]),
    "whole": jnp.sqrt(jnp.mean(jnp.square(difference))) / jnp.sqrt(jnp.mean(jnp.square(sizes))),
    "worst": jnp.max(difference / jnp.maximum(sizes, jnp.mean(sizes))),
    "blind": jnp.sum(jnp.any(x != 0, axis=(2, 3)) & padding_BT),
    "padding": jnp.sum(padding_BT),
  }


def _scale(shape: ShapeClass) -> float:
  return shape.head_dim**-0.5


def _window(shape: ShapeClass, length: int) -> int | None:
  return length // 4 + 1 if shape.window else None


def _sizes(shape: ShapeClass, length: int) -> list[tuple[int, ...]]:
  """Return the shapes of q, k, v and the cotangent."""
  K, H, V = shape.kv_heads, shape.head_dim, shape.value_dim
  return [(2, length, *size) for size in ((K * shape.groups, H), (K, H), (K, V), (K * shape.groups, V))]


def _shapes_of_arguments(shape: ShapeClass, length: int) -> tuple[Any, ...]:
  arrays = [jax.ShapeDtypeStruct(size, jnp.float32) for size in _sizes(shape, length)]
  rows = jax.ShapeDtypeStruct((2, length), jnp.int32)
  return *arrays, rows if shape.segments else None, rows if shape.images else None


def _random_numbers(shape: ShapeClass, length: int) -> list[np.ndarray]:
  """Return q, k, v and the cotangent: float32 numbers that the dtype represents exactly. NumPy draws and rounds them, because
  JAX would compile a program for each operation and shape."""
  rng = np.random.default_rng(0)
  draw = lambda size: rng.standard_normal(size, np.float32).astype(jnp.dtype(shape.dtype)).astype(np.float32)
  return [draw(size) for size in _sizes(shape, length)]


def arguments_of(shape: ShapeClass, case: Case, numbers: Sequence[np.ndarray] | None = None) -> tuple[Any, ...]:
  """Return q, k, v and the cotangent (float32), segments (None without documents), and images (None without images) of a case.
  numbers: ``_random_numbers`` of this length; None to draw them here."""
  T, H = case.length, shape.head_dim
  q, k, v, g = numbers or _random_numbers(shape, T)
  segments = np.ones((2, T), np.int32)
  at = np.arange(T)
  if case.rows == "packed":
    segments[0] += (at >= T // 3 + 1).astype(np.int32) + (at >= T // 2 + 3)
    segments[1] += at >= 2 * T // 3 + 1
  elif case.rows == "masked":
    segments[0] += at >= T // 2 + 3
    segments[0, T - T // 5 :] = 0
    segments[1] = 0
  if case.negative:
    # One dimension per document: within a document the scores are between -20000 and -10000, across documents near 0. A mask
    # that lowers scores by less than that, or replaces them by larger values, lets the other document or the future through.
    q, k = q.copy(), k.copy()
    power = math.floor(math.log2(2e4 * H**0.5))
    for document in range(1, segments.max() + 1):
      inside = (segments == document)[:, :, None]
      q[..., document - 1] = np.where(inside, -(2.0 ** (power // 2)), 0)
      k[..., document - 1] = np.where(inside, 2.0 ** (power - power // 2), 0)
  images = np.zeros((2, T), np.int32)
  if case.images:
    for row, begin, end in _images(T):
      images[row, begin:end] = images[row].max() + 1
  # A batch that may contain images passes them even if there are none: that is another program than text alone.
  return q, k, v, g, segments if shape.segments else None, images if shape.images else None


def _images(T: int) -> list[tuple[int, int, int]]:
  """Return (row, begin, end) of a case's images, none across two documents of "packed" rows. They are side by side, at the end
  and the beginning of a document, across tiles, longer than the window, and at both ends of a row."""
  first = [
    (0, T // 16, T // 5 + 1),
    (0, T // 5 + 1, T // 3 + 1),
    (0, T // 3 + 1, T // 3 + T // 16),
    (0, T // 2 + 20, T - T // 9),
  ]
  return [*first, (1, 0, T // 8 + 7), (1, T // 3, 2 * T // 3 + 1), (1, T - T // 6 - 3, T)]


def judge(case: Case, dtype: str, differences: Sequence[Mapping[str, Any]]) -> CaseResult:
  """Return the result of a case. differences: those of values, dq, dk and dv, as numbers."""
  tolerance = _ROUNDING_OF_NEGATIVE if case.negative else _TOLERANCE[dtype]
  errors, problems = [], []
  for name, found in zip(("values", "dq", "dk", "dv"), differences, strict=True):
    if found["bad"]:
      errors.append(None)
      problems.append(f"{name}: {found['bad']} of {found['count']} numbers are not finite")
      continue
    whole, worst = float(found["whole"]), float(found["worst"])
    errors.append(whole)
    if found["blind"]:
      problems.append(f"{name}: not zero at {found['blind']} of {found['padding']} padding positions")
    elif not whole <= tolerance[0]:
      problems.append(f"{name}: relative error {whole:.2g}, above the tolerance {tolerance[0]:g}")
    elif not worst <= tolerance[1]:
      problems.append(f"{name}: relative error {worst:.2g} in one head, above the tolerance {tolerance[1]:g}")
  gradients = errors[1:]
  return CaseResult(
    name=case.name,
    error=errors[0],
    gradient_error=None if None in gradients else max(gradients),
    problem="; ".join(problems),
  )
