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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.errors import is_out_of_memory
from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.registry import Name, attend, kernel
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import RULES

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
    out_of_memory: True if it did not run because memory did not suffice, which says nothing about the kernel.
  """

  name: str
  error: float | None = None
  gradient_error: float | None = None
  problem: str = ""
  raised: bool = False
  out_of_memory: bool = False

  @classmethod
  def of_error(cls, name: str, error: Exception) -> "CaseResult":
    """Return the result of a case in which the kernel did not run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
    return cls(name=name, problem=said, raised=True, out_of_memory=is_out_of_memory(error))


def self_test(shape: ShapeClass, attention: Attention | None = None, in_parts: Attention | None = None) -> list[CaseResult]:
  """Test a kernel on JAX's default device.

  Args:
    shape: the class.
    attention: the function to test; None for the kernel of the class.
    in_parts: the function to test in a case in parts; None for the kernel of the class.

  Returns:
    A result for each of ``cases``, in order. A kernel that raises has failed; its message is the problem.
  """
  tried = {False: attention or _kernel(shape), True: in_parts or _kernel_in_parts(shape)}
  scale = shape.head_dim**-0.5
  # Compile everything at the same time. Cases of the same length share a program.
  programs: dict[tuple[int, bool | None], tuple[Any, tuple[Any, ...]]] = {}  # (length, in parts; None for the reference)
  for case in cases(shape):
    window = case.length // 4 + 1 if shape.window else None
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _arguments(shape, case))
    run = _both_ways(tried[case.in_parts], shape.dtype, window, scale)
    programs.setdefault((case.length, case.in_parts), (run, arguments))
    programs.setdefault((case.length, None), (_reference(window, scale, shape.causal, _cap(shape)), arguments))
  compiled = compile_together(programs)
  results = []
  for case in cases(shape):
    arguments = _arguments(shape, case)
    try:
      got = [np.asarray(x, np.float64) for x in jax.device_get(compiled[case.length, case.in_parts].result()(*arguments))]
    except Exception as error:
      # Any exception means that the kernel did not run, which is the result of the test.
      results.append(CaseResult.of_error(case.name, error))
      continue
    want = [np.asarray(x, np.float64) for x in jax.device_get(compiled[case.length, None].result()(*arguments))]
    tolerance = _ROUNDING_OF_NEGATIVE if case.negative else _TOLERANCE[shape.dtype]
    results.append(_judge(case, arguments[-2], got, want, tolerance))
  return results


def compile_together(programs: Mapping[Any, tuple[Any, tuple[Any, ...]]]) -> dict[Any, Future[Any]]:
  """Compile jitted functions at the same time, for JAX's default device.

  Args:
    programs: (function, shapes of its arguments) by any key.

  Returns:
    The compiled functions by the same keys. The result of a future raises what its compilation raised.
  """
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  (it belongs to a thread)

  def compiled(run: Any, arguments: tuple[Any, ...]) -> Any:
    with jax.default_device(device):
      return run.lower(*arguments).compile()

  with ThreadPoolExecutor(max(1, len(programs)), "compile") as pool:
    return {key: pool.submit(compiled, *program) for key, program in programs.items()}


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


def _both_ways(function: Attention, dtype: str, window: int | None, scale: float) -> Any:
  """Return a compiled (q, k, v, cotangent, segments, images) -> [values, dq, dk, dv], computed in ``dtype`` and returned in
  float32."""

  def run(q, k, v, g, segments, images):
    def forward(q, k, v):
      return function(q, k, v, Tokens(segments, images), window=window, scale=scale)

    out, backward = jax.vjp(forward, *(x.astype(dtype) for x in (q, k, v)))
    return [x.astype(jnp.float32) for x in (out, *backward(g.astype(out.dtype)))]

  return jax.jit(run)


@functools.cache
def _reference(window: int | None, scale: float, causal: bool, soft_cap: float | None = None) -> Any:
  """Return attention written out in float32, with products that no backend may round."""
  exact = Precision(dtype="float32", matmul_precision="highest")

  def written_out(q, k, v, tokens, *, window, scale):
    mask = attention_mask(tokens, *q.shape[:2], window=window, bidirectional_images=True, causal=causal)
    return dot_product_attention(q, k, v, mask, scale=scale, precision=exact, soft_cap=soft_cap)[0]

  return _both_ways(written_out, "float32", window, scale)


def _arguments(shape: ShapeClass, case: Case) -> tuple[Any, ...]:
  """Return q, k, v and the cotangent as float32 arrays that the dtype represents exactly, segments (None without documents),
  and images."""
  rng = np.random.default_rng(0)
  T, K, H, V = case.length, shape.kv_heads, shape.head_dim, shape.value_dim
  N = K * shape.groups
  sizes = ((N, H), (K, H), (K, V), (N, V))
  q, k, v, g = (rng.normal(size=(2, T, *size)).astype(np.float32) for size in sizes)
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
    power = math.floor(math.log2(2e4 * H**0.5))
    for document in range(1, segments.max() + 1):
      inside = (segments == document)[:, :, None]
      q[..., document - 1] = np.where(inside, -(2.0 ** (power // 2)), 0)
      k[..., document - 1] = np.where(inside, 2.0 ** (power - power // 2), 0)
  arrays = [jnp.asarray(x).astype(shape.dtype).astype(jnp.float32) for x in (q, k, v, g)]
  images = np.zeros((2, T), np.int32)
  if case.images:
    for row, begin, end in _images(T):
      images[row, begin:end] = images[row].max() + 1
  # A batch that may contain images passes them even if there are none: that is another program than text alone.
  return *arrays, jnp.asarray(segments) if shape.segments else None, jnp.asarray(images) if shape.images else None


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


def _judge(case: Case, segments: Any, got: list[np.ndarray], want: list[np.ndarray], tolerance: Sequence[float]) -> CaseResult:
  """Compare values, dq, dk and dv, all [B, T, heads, H]."""
  errors, problems = [], []
  padding = np.zeros(got[0].shape[:2], bool) if segments is None else np.asarray(segments) == 0
  for name, x, y in zip(("values", "dq", "dk", "dv"), got, want, strict=True):
    if case.negative and name in ("dq", "dk"):
      # In these dimensions the exact gradient is a difference of large equal terms, so only rounding remains.
      x, y = x[..., 3:], y[..., 3:]
    if bad := int(np.sum(~np.isfinite(x))):
      errors.append(None)
      problems.append(f"{name}: {bad} of {x.size} numbers are not finite")
      continue
    sizes, difference = np.linalg.norm(y, axis=-1), np.linalg.norm(x - y, axis=-1)
    if case.negative and not sizes.any():  # all scores are at their soft cap, which has no gradient
      sizes = np.ones_like(sizes)
    whole = np.linalg.norm(difference) / max(np.linalg.norm(sizes), 1e-30)
    worst = np.max(difference / np.maximum(sizes, max(np.mean(sizes), 1e-30)))
    errors.append(float(whole))
    if (blind := np.any(x[padding] != 0, axis=(1, 2))).any():
      problems.append(f"{name}: not zero at {int(blind.sum())} of {blind.size} padding positions")
    elif whole > tolerance[0]:
      problems.append(f"{name}: relative error {whole:.2g}, above the tolerance {tolerance[0]:g}")
    elif worst > tolerance[1]:
      problems.append(f"{name}: relative error {worst:.2g} in one head, above the tolerance {tolerance[1]:g}")
  gradients = errors[1:]
  return CaseResult(
    name=case.name,
    error=errors[0],
    gradient_error=None if None in gradients else max(gradients),
    problem="; ".join(problems),
  )
