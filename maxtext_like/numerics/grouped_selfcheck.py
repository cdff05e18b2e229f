"""The self-test of a grouped kernel: values and both gradients against products of whole groups in float32.

As for attention (``kernel_test``): a kernel is tried on the device that will run it, in the shapes that it will get. What is
looked at is what tiles get wrong: groups that end inside one, groups without rows, one that takes all, rows that are no one's.

M rows, D summed, F columns, G groups.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.kernels.grouped_matmul.registry import Name, kernel
from maxtext_like.numerics.attention_selfcheck import CaseResult, words_of_error

_GROUPS, _SUMMED, _ROWS = 6, 512, 700
# Relative error of a whole array and of its worst row; float32 products of "default" round as bfloat16 ones do.
_TOLERANCE = {"bfloat16": (1e-2, 0.1), "float16": (2e-3, 2e-2), "rounded": (1e-2, 0.1), "float32": (1e-4, 1e-3)}


@dataclass(frozen=True, kw_only=True)
class GroupedShape:
  """What decides how a kernel works; sizes that do not are small.

  Attributes:
    kernel: its name.
    dtype: of rows and matrices.
    sums: float32 sums are handed on, and rows and cotangents have float32's range.
    precision: ``matmul_precision``.
    summed, columns: D and F, the same modulo 256.
    groups: G.
    rows: M, of which a group has a mean share.
  """

  kernel: Name
  dtype: str
  sums: bool
  precision: str
  summed: int
  columns: int
  groups: int
  rows: int

  def __str__(self) -> str:
    dtype = f"{self.dtype}, float32 sums" if self.sums else self.dtype
    return f"{self.kernel}, {dtype}, [{self.rows}, {self.summed}] times {self.groups} of [{self.summed}, {self.columns}]"


def grouped_shape(
  name: Name, *, dtype: str, sums: bool, precision: str, summed: int, columns: int, groups: int, rows: int
) -> GroupedShape:
  """What the test of a product stands for."""
  small = lambda n: n if n <= _SUMMED else _SUMMED + n % 256
  few = min(groups, _GROUPS)
  mean = max(1, min(rows // groups, _ROWS))
  return GroupedShape(
    kernel=name, dtype=dtype, sums=sums, precision=precision, summed=small(summed), columns=small(columns), groups=few,
    rows=few * mean + 5,
  )  # fmt: skip


def cases(shape: GroupedShape) -> dict[str, np.ndarray]:
  """int32 [G] sizes by the name of the trial."""
  G, M = shape.groups, shape.rows
  rng = np.random.default_rng(0)
  share = lambda total, groups: rng.multinomial(total, np.full(groups, 1 / groups))
  half = np.zeros(G, np.int64)
  half[G % 2 :: 2] = share(M, len(half[G % 2 :: 2])) if G > 1 else M
  alone = np.zeros(G, np.int64)
  alone[G // 2] = M
  found = {"borders in tiles": share(M, G), "groups without rows": half, "one takes all": alone}
  found["rows of no one"] = share(M - M // 5, G)
  return {name: sizes.astype(np.int32) for name, sizes in found.items()}


def self_test(shape: GroupedShape, product: Any = None) -> list[CaseResult]:
  """Tries a kernel on JAX's default device.

  Args:
    shape: of the product.
    product: what to try, as ``GroupedKernel.run``, or with sums as ``GroupedKernel.sums``; None: the kernel of the shape.

  Returns:
    A result for each of ``cases``, in order. A kernel that raises has failed, with its words.
  """
  if product is None:
    product = kernel(shape.kernel).sums if shape.sums else kernel(shape.kernel).run
  of_rows, how = (shape.dtype, ()) if not shape.sums else ("float32", (shape.dtype,))
  tried = _both_ways(lambda x, w, sizes: product(x.astype(of_rows), w.astype(shape.dtype), sizes, *how, shape.precision))
  exact = _both_ways(_written_out)
  rounded = shape.dtype == "float32" and shape.precision == "default"
  tolerances = [_TOLERANCE["rounded" if rounded else shape.dtype]] * 3
  if shape.sums:  # what is multiplied is exact, and only the gradient of the matrices is rounded
    tolerances[:2] = [_TOLERANCE["float32"]] * 2
  powers = np.asarray(_powers(shape), np.float64)
  units = 1 / powers, powers, 1.0  # so that every row counts
  results = []
  for name, sizes in cases(shape).items():
    given = _arguments(shape, sizes)
    try:
      got = [np.asarray(x, np.float64) * unit for x, unit in zip(jax.device_get(tried(*given)), units, strict=True)]
    except Exception as error:
      # Whatever the kernel's libraries raise, it did not run: that is the finding.
      results.append(CaseResult(name=name, problem=words_of_error(error), raised=True))
      continue
    want = [np.asarray(x, np.float64) * unit for x, unit in zip(jax.device_get(exact(*given)), units, strict=True)]
    results.append(_judge(name, int(sizes.sum()), got, want, tolerances))
  return results


def _both_ways(function: Any) -> Any:
  """Compiled (x, w, sizes, cotangent) -> [values, dx, dw], in float32."""

  def run(x, w, sizes, g):
    out, backward = jax.vjp(lambda x, w: function(x, w, sizes).astype(jnp.float32), x, w)
    return [out, *backward(g)]

  return jax.jit(run)


def _written_out(x, w, sizes):
  """Every row times every matrix, of which its own counts."""
  group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")
  every = jnp.einsum("MD,GDF->GMF", x, w, precision="highest")
  own = (group == jnp.arange(w.shape[0])[:, None])[..., None]
  return jnp.sum(jnp.where(own, every, 0), axis=0)


def _arguments(shape: GroupedShape, sizes: np.ndarray) -> tuple[Any, ...]:
  """x, w, sizes and the cotangent, float32 numbers that the dtype holds exactly. No one's rows have no cotangent, as in MoE."""
  rng = np.random.default_rng(1)
  M, G, D, F = shape.rows, shape.groups, shape.summed, shape.columns
  x, w, g = (rng.normal(size=size).astype(np.float32) for size in ((M, D), (G, D, F), (M, F)))
  g[sizes.sum() :] = 0
  x, w, g = (jnp.asarray(a).astype(shape.dtype).astype(jnp.float32) for a in (x, w, g))
  return x * _powers(shape), w, jnp.asarray(sizes), g / _powers(shape)


def _powers(shape: GroupedShape) -> jax.Array:
  """float32 [M, 1], what rows are multiplied with and their cotangents divided by, which leaves the matrices their gradient: of
  sums powers of two that take both beyond float16, up and down; else 1."""
  return jnp.ldexp(jnp.float32(1), 20 * (jnp.arange(shape.rows) % 3 - 1) * shape.sums)[:, None]


def _judge(
  name: str, used: int, got: list[np.ndarray], want: list[np.ndarray], tolerances: list[tuple[float, float]]
) -> CaseResult:
  errors, problems = [], []
  for what, x, y, tolerance in zip(("values", "dx", "dw"), got, want, tolerances, strict=True):
    if what == "values":  # no one's are no one's
      x, y = x[:used], y[:used]
    if bad := int(np.sum(~np.isfinite(x))):
      errors.append(None)
      problems.append(f"{what}: {bad} of {x.size} numbers are not finite")
      continue
    sizes, difference = np.linalg.norm(y, axis=-1), np.linalg.norm(x - y, axis=-1)
    whole = np.linalg.norm(difference) / max(np.linalg.norm(sizes), 1e-30)
    worst = np.max(difference / np.maximum(sizes, max(np.mean(sizes), 1e-30)), initial=0.0)
    errors.append(float(whole))
    if whole > tolerance[0] or worst > tolerance[1]:
      problems.append(f"{what}: relative error {whole:.2g}, {worst:.2g} in one row, where {tolerance[0]:g} is rounding")
  gradients = errors[1:]
  return CaseResult(
    name=name,
    error=errors[0],
    gradient_error=None if None in gradients else max(gradients),
    problem="; ".join(problems),
  )
