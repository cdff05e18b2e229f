"""Self-test of the kernel for products of few rows with a quantized weight: compared with the dequantized weight in float64."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.quantization.quantized import CODES, FORMS, FormName, MatrixView
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.selfcheck_programs import compile_together, run_alone

# Rows, inputs, outputs: incomplete blocks of each; and a sum in several parts.
_SIZES = ((3, 200, 150), (64, 1600, 256))
# Largest relative error of a row. Values of nf4 codes are rounded to bfloat16.
_TOLERANCE = {"int8": 1e-5, "fp8_block": 1e-5, "nf4": 5e-3}


@dataclass(frozen=True, kw_only=True)
class QuantizedShape:
  """The properties that decide how the kernel works: the form of the weight, and the dtype of the product."""

  form: FormName
  dtype: str

  def __str__(self) -> str:
    return f"quantized_matmul, weights in {self.form}, products in {self.dtype}"


def self_test(shape: QuantizedShape, multiply: Any = None) -> list[CaseResult]:
  """Test the kernel on JAX's default device.

  Args:
    shape: the shape to test.
    multiply: the function to test, with the signature of ``quantized_matmul``; None for that function.

  Returns:
    One result for each size. A kernel that raises has failed; its message is the problem.
  """
  if multiply is None:
    from maxtext_like.layers.kernels.quantized_matmul import quantized_matmul as multiply
  form, rng = FORMS[shape.form], np.random.default_rng(0)
  abstract = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

  def stored_and_exact(view: Any, w: Any) -> tuple[Any, Any]:
    """The arrays as the kernel reads them, and the dequantized weight."""
    stored = form.quantize(view, w)
    return stored | {CODES: jnp.swapaxes(stored[CODES], 0, 1)}, form.values(view, stored, "float32")

  # Compile everything at the same time.
  given, programs = {}, {}
  for R, K, M in _SIZES:
    name, view = f"{R} rows, {K} x {M}", MatrixView((), (K,), (M,), (None, None))
    draw = lambda *size: rng.standard_normal(size, np.float32)
    x, w = draw(R, K).astype(jnp.dtype(shape.dtype)), draw(K, M) * draw(K, 1)
    given[name], make = (x, w), functools.partial(stored_and_exact, view)
    run = lambda x, stored, M=M: multiply(shape.form, x, stored, M, values=form.table)
    programs[name, "exact"] = jax.jit(make), abstract((w,))
    programs[name, "tried"] = jax.jit(run), (abstract(x), jax.eval_shape(make, w)[0])
  compiled, results = compile_together(programs), []
  for name, (x, w) in given.items():
    stored, values = run_alone(compiled[name, "exact"], w)
    try:
      got = np.asarray(run_alone(compiled[name, "tried"], x, stored), np.float64)
    except Exception as error:
      # Any exception means that the kernel did not run, which is the result of the test.
      results.append(CaseResult.of_error(name, error))
      continue
    results.append(_judge(name, _TOLERANCE[shape.form], got, np.asarray(x, np.float64) @ np.asarray(values, np.float64)))
  return results


def _judge(name: str, most: float, got: np.ndarray, want: np.ndarray) -> CaseResult:
  if bad := int(np.sum(~np.isfinite(got))):
    return CaseResult(name=name, problem=f"{bad} of {got.size} numbers are not finite")
  error = float(np.max(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)))
  problem = f"relative error {error:.2g} of a row; the tolerance is {most:g}" if error > most else ""
  return CaseResult(name=name, error=error, problem=problem)
