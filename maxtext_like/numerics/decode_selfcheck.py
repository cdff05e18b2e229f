"""Self-test of the kernel for a single new token: compared with attention in float64, on the device that will run it.

B rows, N query heads, K key-value heads, S slots, H head.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers import cache
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.selfcheck_programs import compile_together, run_alone

_SLOTS, _ROWS = 1100, 5  # several parts of each row, and an incomplete block
# Largest relative error of the output of any row and head: scores are exact, and probabilities and the output are rounded to
# the dtype, which causes about 3e-3 with bfloat16. Norms over all rows hide errors of long rows: their outputs are small.
_TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3}


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
  """The properties that decide how the kernel works.

  Attributes:
    dtype: dtype of the queries and the cache.
    query_heads, kv_heads, head_dim: N, K, H.
    soft_cap: soft cap of the scores; None: no cap.
  """

  dtype: str
  query_heads: int
  kv_heads: int
  head_dim: int
  soft_cap: float | None = None

  def __str__(self) -> str:
    return f"decode_attention, {self.dtype}, {self.query_heads} query and {self.kv_heads} key-value heads of {self.head_dim}"


def self_test(shape: DecodeShape, attention: Any = None) -> list[CaseResult]:
  """Test the kernel on JAX's default device.

  Args:
    shape: the shape to test.
    attention: the function to test, with the signature of ``decode_attention``; None for that function.

  Returns:
    One result each for a cache in the dtype and an 8-bit cache. A kernel that raises has failed; its message is the problem.
  """
  if attention is None:
    from maxtext_like.layers.kernels.attention.decode import decode_attention as attention
  # NumPy draws and rounds, because JAX would compile a program for each operation and shape.
  rng = np.random.default_rng(0)
  draw = lambda *size: rng.standard_normal(size, np.float32).astype(jnp.dtype(shape.dtype))
  q = draw(_ROWS, shape.query_heads, shape.head_dim)
  k, v = (draw(_ROWS, shape.kv_heads, _SLOTS, shape.head_dim) for _ in range(2))
  # A row without tokens, one token, a complete cache, and lengths within blocks. Nothing reads the slots behind them.
  lengths = np.array([0, 1, _SLOTS, 77, 641], np.int32)[:_ROWS]
  unused = (np.arange(_SLOTS) >= lengths[:, None])[:, None, :, None]
  scale = shape.head_dim**-0.5
  abstract = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  in_8_bits = compile_together({"all": (jax.jit(lambda k, v: (cache.in_8_bits(k), cache.in_8_bits(v))), abstract((k, v)))})
  (k8, k_scale), (v8, v_scale) = jax.device_get(run_alone(in_8_bits["all"], k, v))
  hidden = lambda x: np.where(unused, np.nan, x.astype(np.float32)).astype(x.dtype)
  # The arrays of the cache, and the keys and values that they encode.
  given: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "plain": ({"k": hidden(k), "v": hidden(v)}, k, v),
    "8 bits": ({"k": k8, "v": v8, "k_scale": hidden(k_scale), "v_scale": hidden(v_scale)}, k8 * k_scale, v8 * v_scale),
  }

  def run(q: Any, lengths: Any, stored: dict[str, Any]) -> Any:
    scales = {name: x for name, x in stored.items() if name not in ("k", "v")}
    return attention(q, stored["k"], stored["v"], lengths, scale=scale, soft_cap=shape.soft_cap, **scales)

  programs = {name: (jax.jit(run), abstract((q, lengths, stored))) for name, (stored, _, _) in given.items()}
  compiled, results = compile_together(programs), []
  for name, (stored, keys, values) in given.items():
    try:
      got = np.asarray(run_alone(compiled[name], q, lengths, stored), np.float64)
    except Exception as error:
      # Any exception means that the kernel did not run, which is the result of the test.
      results.append(CaseResult.of_error(name, error))
      continue
    results.append(_judge(name, shape, got, _written_out(q, keys, values, lengths, scale, shape.soft_cap)))
  return results


def _written_out(q: Any, k: Any, v: Any, lengths: np.ndarray, scale: float, cap: float | None) -> np.ndarray:
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  B, N, H = q.shape
  scores = np.einsum("bkgh,bksh->bkgs", q.reshape(B, k.shape[1], -1, H), k) * scale
  scores = scores if cap is None else cap * np.tanh(scores / cap)
  seen = (np.arange(k.shape[2]) < lengths[:, None])[:, None, None]
  weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
  probs = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
  return np.einsum("bkgs,bksh->bkgh", probs, v).reshape(B, N, H)


def _judge(name: str, shape: DecodeShape, got: np.ndarray, want: np.ndarray) -> CaseResult:
  if bad := int(np.sum(~np.isfinite(got))):
    return CaseResult(name=name, problem=f"{bad} of {got.size} numbers are not finite")
  size = np.linalg.norm(want, axis=-1)
  error = float(np.max(np.linalg.norm(got - want, axis=-1)[size > 0] / size[size > 0]))
  most = _TOLERANCE[shape.dtype]
  problem = f"relative error {error:.2g} of a head; the tolerance is {most:g}" if error > most else ""
  if got[want == 0].any():
    problem = "a row without tokens is not zero"
  return CaseResult(name=name, error=error, problem=problem)
