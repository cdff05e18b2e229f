"""Self-test of a grouped kernel: values and both gradients, compared with products of complete groups in float32.

As for attention (``attention_selfcheck``), a kernel is tested on the device that will run it, in the shapes that it will get.
The cases cover common errors of tiled kernels: groups that end inside a tile, groups without rows, one group with all rows, and
rows that belong to no group.

M rows, D summed, F columns, G groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.kernels.grouped_matmul.registry import Name, kernel
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.selfcheck_programs import Programs, compile_together, run_alone

_GROUPS, _SUMMED, _ROWS = 6, 512, 700
# Largest relative error of a complete array and of its worst row. float32 products with precision "default" round like bfloat16
# products.
_TOLERANCE = {"bfloat16": (1e-2, 0.1), "float16": (2e-3, 2e-2), "rounded": (1e-2, 0.1), "float32": (1e-4, 1e-3)}


@dataclass(frozen=True, kw_only=True)
class GroupedShape:
  """The properties that decide how a kernel works. Sizes that do not matter are small.

  Attributes:
    kernel: its name.
    dtype: dtype of rows and matrices.
    sums: the float32 sums are returned, and rows and cotangents have float32's range.
    precision: ``matmul_precision``.
    summed, columns: D and F, the same modulo 256.
    groups: G.
    rows: M, of which each group has the mean share.
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
  """Return the shape whose test represents a product."""
  small = lambda n: n if n <= _SUMMED else _SUMMED + n % 256
  few = min(groups, _GROUPS)
  mean = max(1, min(rows // groups, _ROWS))
  return GroupedShape(
    kernel=name, dtype=dtype, sums=sums, precision=precision, summed=small(summed), columns=small(columns), groups=few,
    rows=few * mean + 5,
  )  # fmt: skip


def cases(shape: GroupedShape) -> dict[str, np.ndarray]:
  """Return the group sizes, int32 [G], by the name of the case."""
  G, M = shape.groups, shape.rows
  rng = np.random.default_rng(0)
  share = lambda total, groups: rng.multinomial(total, np.full(groups, 1 / groups))
  half = np.zeros(G, np.int64)
  half[G % 2 :: 2] = share(M, len(half[G % 2 :: 2])) if G > 1 else M
  alone = np.zeros(G, np.int64)
  alone[G // 2] = M
  found = {"borders inside tiles": share(M, G), "groups without rows": half, "one group has all rows": alone}
  found["rows of no group"] = share(M - M // 5, G)
  return {name: sizes.astype(np.int32) for name, sizes in found.items()}


def self_test(shape: GroupedShape, product: Any = None) -> list[CaseResult]:
  """Test a kernel on JAX's default device.

  Args:
    shape: the shape to test.
    product: the function to test, with the signature of ``GroupedKernel.run``, or of ``GroupedKernel.sums`` with sums; None for
      the kernel of the shape.

  Returns:
    A result for each of ``cases``, in order. A kernel that raises has failed; its message is the problem.
  """
  rounded = shape.dtype == "float32" and shape.precision == "default"
  tolerances = [_TOLERANCE["rounded" if rounded else shape.dtype]] * 3
  if shape.sums:  # the operands are exact, and only the gradient of the matrices is rounded
    tolerances[:2] = [_TOLERANCE["float32"]] * 2
  powers = _powers(shape).astype(np.float64)
  units = 1 / powers, powers, 1.0  # undo the powers, so that every row counts equally
  given = {name: _arguments(shape, sizes) for name, sizes in cases(shape).items()}
  if product is None:
    product = kernel(shape.kernel).sums if shape.sums else kernel(shape.kernel).run
  tried = compile_together(_programs(shape, product))
  exact = compile_together({"exact": (_both_ways(_written_out), _shapes(shape))})

  def computed(compiled: Mapping[Any, Any], arguments: tuple[Any, ...]) -> list[np.ndarray]:
    found = [run_alone(program, *arguments) for program in compiled.values()]
    arrays = jax.device_get([x for results in found for x in results])
    return [np.asarray(x, np.float64) * unit for x, unit in zip(arrays, units, strict=True)]

  results = []
  for name, arguments in given.items():
    try:
      got = computed(tried, arguments)
    except Exception as error:
      # Any exception means that the kernel did not run, which is the result of the test.
      results.append(CaseResult.of_error(name, error))
      continue
    results.append(_judge(name, int(arguments[2].sum()), got, computed(exact, arguments), tolerances))
  return results


def _programs(shape: GroupedShape, product: Any) -> Programs:
  """Return a program for each of the three kernels, because they take seconds to compile. product: as for ``self_test``."""
  of_rows, how = (shape.dtype, ()) if not shape.sums else ("float32", (shape.dtype,))
  function = lambda x, w, sizes: product(x.astype(of_rows), w.astype(shape.dtype), sizes, *how, shape.precision)
  runs = {"values": _values(function), "dx": _gradient(function, 0), "dw": _gradient(function, 1)}
  return {name: (run, _shapes(shape)) for name, run in runs.items()}


def _shapes(shape: GroupedShape) -> tuple[Any, ...]:
  """Return the shapes of ``_arguments``."""
  M, G, D, F = shape.rows, shape.groups, shape.summed, shape.columns
  of = lambda *size: jax.ShapeDtypeStruct(size, jnp.float32)
  return of(M, D), of(G, D, F), jax.ShapeDtypeStruct((G,), jnp.int32), of(M, F)


def _values(function: Any) -> Any:
  """Return a jitted (x, w, sizes, cotangent) -> [values], in float32."""
  return jax.jit(lambda x, w, sizes, g: [function(x, w, sizes).astype(jnp.float32)])


def _gradient(function: Any, which: int) -> Any:
  """Return a jitted (x, w, sizes, cotangent) -> [gradient of x (0) or w (1)], in float32."""

  def run(x, w, sizes, g):
    of = lambda array: function(*(array if i == which else a for i, a in enumerate((x, w))), sizes).astype(jnp.float32)
    return [*jax.vjp(of, (x, w)[which])[1](g)]

  return jax.jit(run)


def _both_ways(function: Any) -> Any:
  """Return a jitted (x, w, sizes, cotangent) -> [values, dx, dw], in float32."""
  runs = _values(function), _gradient(function, 0), _gradient(function, 1)
  return jax.jit(lambda *arguments: [run(*arguments)[0] for run in runs])


def _written_out(x, w, sizes):
  """Multiply every row by every matrix and select the row's own group."""
  group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")
  every = jnp.einsum("MD,GDF->GMF", x, w, precision="highest")
  own = (group == jnp.arange(w.shape[0])[:, None])[..., None]
  return jnp.sum(jnp.where(own, every, 0), axis=0)


def _arguments(shape: GroupedShape, sizes: np.ndarray) -> tuple[Any, ...]:
  """Return x, w, sizes and the cotangent: float32 numbers that the dtype represents exactly. Rows of no group have no
  cotangent, as in an MoE layer."""
  rng = np.random.default_rng(1)
  M, G, D, F = shape.rows, shape.groups, shape.summed, shape.columns
  # NumPy draws and rounds, because JAX would compile a program for each operation and shape.
  draw = lambda *size: rng.standard_normal(size, np.float32).astype(jnp.dtype(shape.dtype)).astype(np.float32)
  x, w, g = draw(M, D), draw(G, D, F), draw(M, F)
  g[sizes.sum() :] = 0
  return x * _powers(shape), w, sizes, g / _powers(shape)


def _powers(shape: GroupedShape) -> np.ndarray:
  """Return float32 [M, 1]: factors of the rows, by which their cotangents are divided, so that the gradient of the matrices is
  unchanged. With sums they are powers of two that leave the range of float16 in both directions; otherwise 1."""
  return np.ldexp(np.float32(1), 20 * (np.arange(shape.rows) % 3 - 1) * shape.sums)[:, None]


def _judge(
  name: str, used: int, got: list[np.ndarray], want: list[np.ndarray], tolerances: list[tuple[float, float]]
) -> CaseResult:
  errors, problems = [], []
  for what, x, y, tolerance in zip(("values", "dx", "dw"), got, want, tolerances, strict=True):
    if what == "values":  # rows of no group are not compared
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
      problems.append(
        f"{what}: relative error {whole:.2g}, {worst:.2g} in one row; the tolerances are {tolerance[0]:g} and {tolerance[1]:g}"
      )
  gradients = errors[1:]
  return CaseResult(
    name=name,
    error=errors[0],
    gradient_error=None if None in gradients else max(gradients),
    problem="; ".join(problems),
  )
