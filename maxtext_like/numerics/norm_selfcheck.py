"""Self-test of the kernel for gradients of norms: compared with the same sums in float64, on the device that will run it.

R rows, D normalized dimension.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.selfcheck_programs import compile_together, run_alone

_ROWS = 1003  # several rows for each program, and one more for some of them
# Largest relative error of dx, which is rounded to the dtype, and of its worst row. Sums over rows are float32.
_TOLERANCE = {"bfloat16": (4e-3, 1e-2), "float16": (5e-4, 2e-3), "float32": (1e-5, 1e-4)}
_SUMS = 1e-4


@dataclass(frozen=True, kw_only=True)
class NormShape:
  """The properties that decide how the kernel works: the dtypes of the input and of the gradient, and D."""

  dtype: str
  gradient: str
  dim: int

  def __str__(self) -> str:
    return f"pallas_gpu, {self.dtype}, gradients in {self.gradient}, rows of {self.dim}"


def self_test(shape: NormShape, gradients: Any = None) -> list[CaseResult]:
  """Test the kernel on JAX's default device.

  Args:
    shape: the shape to test.
    gradients: the function to test, with the signature of ``pallas_gpu.gradients``; None for that function.

  Returns:
    One result each for a norm alone, a norm with the gradient of a residual stream, and a norm with rows set to zero. A kernel
    that raises has failed; its message is the problem.
  """
  if gradients is None:
    from maxtext_like.layers.kernels.norm.pallas_gpu import gradients
  # NumPy draws and rounds, because JAX would compile a program for each operation and shape.
  rng = np.random.default_rng(0)
  draw = lambda dtype, *size: rng.standard_normal(size, np.float32).astype(jnp.dtype(dtype))
  x, stream = ((draw("float32", _ROWS, shape.dim) * 3).astype(jnp.dtype(shape.dtype)) for _ in range(2))
  g, factor = draw(shape.gradient, _ROWS, shape.dim), draw("float32", shape.dim) + 1
  real = rng.random(_ROWS) > 0.3
  inverse = 1 / np.sqrt(np.mean(np.square(x.astype(np.float32)), axis=-1))
  cases = {"alone": (None, None), "with a stream": (stream, None), "with zeroed rows": (None, real)}
  given = (x, inverse, factor, g), [*cases.values()]
  run = jax.jit(lambda of_all, optional: [gradients(*of_all, *more) for more in optional])
  shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
  try:
    got = jax.device_get(run_alone(compile_together({"all": (run, shapes)})["all"], *given))
  except Exception as error:
    # Any exception means that the kernel did not run, which is the result of the test.
    return [CaseResult.of_error(name, error) for name in cases]
  return [
    _judge(name, shape, [np.asarray(a, np.float64) for a in pair], _written_out(x, inverse, factor, g, *more))
    for (name, more), pair in zip(cases.items(), got, strict=True)
  ]


def _written_out(x: Any, inverse: Any, factor: Any, g: Any, stream: Any, real: Any) -> list[np.ndarray]:
  x, inverse, factor, g = (np.asarray(a, np.float64) for a in (x, inverse, factor, g))
  u, inverse = x * inverse[:, None], inverse[:, None]
  g = g if real is None else np.where(np.asarray(real)[:, None], g, 0)
  du = g * factor
  dx = inverse * (du - u * np.mean(u * du, axis=-1, keepdims=True))
  return [dx if stream is None else dx + np.asarray(stream, np.float64), np.sum(g * u, axis=0)]


def _judge(name: str, shape: NormShape, got: list[np.ndarray], want: list[np.ndarray]) -> CaseResult:
  errors: list[float | None] = []
  problems = []
  for what, x, y in zip(("dx", "dscale"), got, want, strict=True):
    if bad := int(np.sum(~np.isfinite(x))):
      errors.append(None)
      problems.append(f"{what}: {bad} of {x.size} numbers are not finite")
      continue
    rows, wrong = np.atleast_2d(y), np.atleast_2d(x - y)
    sizes = np.maximum(np.linalg.norm(rows, axis=-1), np.mean(np.linalg.norm(rows, axis=-1)))
    whole, worst = np.linalg.norm(wrong) / np.linalg.norm(rows), float(np.max(np.linalg.norm(wrong, axis=-1) / sizes))
    errors.append(float(whole))
    most = _TOLERANCE[shape.dtype] if what == "dx" else (_SUMS, _SUMS)
    if whole > most[0] or worst > most[1]:
      problems.append(
        f"{what}: relative error {whole:.2g}, {worst:.2g} in one row; the tolerances are {most[0]:g} and {most[1]:g}"
      )
  known = [e for e in errors if e is not None]
  return CaseResult(name=name, gradient_error=max(known) if len(known) == len(errors) else None, problem="; ".join(problems))
