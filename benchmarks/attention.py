"""Measures every fused attention kernel that this machine can run, and plain XLA: time, memory and errors at models' shapes.

  python benchmarks/attention.py [--length 4096] [--shape "gemma4-31b global" ...] [--dtype bfloat16] [--soft-cap 50]

Milliseconds, TFLOP/s and GiB of temporaries are for forward and backward together. TFLOP/s count only the query-key pairs that
the mask allows: two products forward and five backward, without recomputation in a kernel. "x full" is the time divided by that
of the fastest kernel on rows of one document. Errors are the norm of the difference from float64 divided by the norm, for the
values and for the worst gradient. They are measured on the first row and its first key-value head, with all query heads that
read it. With a soft cap of the scores, kernels without a soft cap are left out.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.attention.masks import Tokens, attention_mask
from maxtext_like.layers.kernels.attention.registry import Case, Name, attend, choose, fused_kernels
from maxtext_like.layers.precision import Dtype, Precision


class Shape(NamedTuple):
  """Rows, query heads, key-value heads, head dimension of queries and keys, that of values, and the sliding window."""

  B: int
  N: int
  K: int
  H: int
  V: int
  window: int | None


SHAPES = {
  "gemma3-4b local": Shape(2, 8, 4, 256, 256, 1024),
  "gemma3-4b global": Shape(2, 8, 4, 256, 256, None),
  "gemma4-31b local": Shape(2, 32, 16, 256, 256, 1024),
  "gemma4-31b global": Shape(2, 32, 4, 512, 512, None),
  "gemma3-27b local": Shape(2, 32, 16, 128, 128, 1024),
  "gemma3-27b global": Shape(2, 32, 16, 128, 128, None),
  "deepseek3": Shape(1, 128, 128, 192, 128, None),
}
HEAD = (
  f"{'shape':18} {'dtype':9} {'rows':7} {'kernel':12} {'forward':>8} {'ms':>8} {'TFLOP/s':>7} {'x full':>6} {'GiB':>6} "
  f"{'error':>8} {'of grads':>8}"
)


class Measured(NamedTuple):
  """Seconds of forward, seconds of forward and backward, GiB of temporaries, errors of values and of the worst gradient."""

  forward: float
  both: float
  memory: float
  error: float
  gradients: float


def packed(batch: int, length: int) -> jax.Array:
  """Returns segments of three documents and some padding at the end. Documents have other lengths in each row."""
  at = jnp.arange(length)
  rows = [1 + (at > length // 3 + 7 * b) + (at > length // 2 + 11 * b) for b in range(batch)]
  return jnp.where(at < length - 5, jnp.stack(rows), 0).astype(jnp.int32)


def seconds(function, *args) -> float:
  """Returns the median seconds of 10 calls after 2 warm-up calls."""
  times = []
  for i in range(12):
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    if i >= 2:
      times.append(time.perf_counter() - start)
  return sorted(times)[len(times) // 2]


def written_out(q_TGH, k_TH, v_TV, g_TGV, seen_TT, scale: float, soft_cap: float | None = None) -> tuple[np.ndarray, ...]:
  """Computes attention of a row to one key-value head in float64.

  Args:
    seen_TT: bool, the keys that each query sees. A query that sees none gets values of 0.
    scale: factor of the scores.
    soft_cap: soft cap of the scaled scores, or None.

  Returns:
    Values [T, G, V], and the gradients of q, k and v for the cotangent g.
  """
  q, k, v, g = (np.asarray(x).astype(np.float64) for x in (q_TGH, k_TH, v_TV, g_TGV))
  out, dq, dk, dv = np.zeros_like(g), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
  for head in range(q.shape[1]):
    s, slope = scale * q[:, head] @ k.T, 1.0
    if soft_cap is not None:
      tanh = np.tanh(s / soft_cap)
      s, slope = soft_cap * tanh, 1 - tanh**2
    s = np.where(seen_TT, s, -np.inf)
    p = np.exp(s - np.maximum(s.max(-1, keepdims=True), np.finfo(s.dtype).min))
    p /= np.maximum(p.sum(-1, keepdims=True), 1)
    dp = g[:, head] @ v.T
    ds = scale * slope * p * (dp - np.sum(p * dp, -1, keepdims=True))
    out[:, head], dq[:, head] = p @ v, ds @ k
    dk += ds.T @ q[:, head]
    dv += p.T @ g[:, head]
  return out, dq, dk, dv


def measured(kernel: Name, arrays, cotangent, tokens: Tokens, how: dict[str, Any], exact: tuple[np.ndarray, ...]) -> Measured:
  """Measures a kernel on (q, k, v). ``exact`` is the result of ``written_out`` for the first row and head."""

  def attention(q, k, v, tokens):
    return attend(kernel, q, k, v, tokens, **how)

  def both(q, k, v, tokens, g):
    out, backward = jax.vjp(lambda q, k, v: attention(q, k, v, tokens), q, k, v)
    return out, *backward(g)

  step = jax.jit(both).lower(*arrays, tokens, cotangent).compile()
  heads = exact[0].shape[1]
  parts = [x[0, :, :n] for x, n in zip(step(*arrays, tokens, cotangent), (heads, heads, 1, 1), strict=True)]
  errors = [relative(x, np.reshape(e, x.shape)) for x, e in zip(parts, exact, strict=True)]
  analysis = step.memory_analysis()
  assert analysis is not None
  memory = analysis.temp_size_in_bytes / 2**30
  forward, both_ways = seconds(jax.jit(attention), *arrays, tokens), seconds(step, *arrays, tokens, cotangent)
  return Measured(forward, both_ways, memory, errors[0], max(errors[1:]))


def relative(x: jax.Array, exact: np.ndarray) -> float:
  """Returns the norm of the difference divided by the norm of ``exact``."""
  return float(np.linalg.norm(np.asarray(x).astype(np.float64) - exact) / np.linalg.norm(exact))


def table(name: str, shape: Shape, dtype: Dtype, length: int, soft_cap: float | None = None) -> None:
  """Prints the rows of the table for a shape and a dtype, with one document and with packed documents."""
  B, N, K, H, V, window = shape
  precision, device = Precision(dtype=dtype), jax.devices()[0]
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, g = (
    jax.random.normal(key, (B, length, *of), jnp.float32).astype(dtype)
    for key, of in zip(keys, ((N, H), (K, H), (K, V), (N, V)), strict=True)
  )
  how: dict[str, Any] = {"window": window, "bidirectional_images": False, "scale": H**-0.5, "precision": precision}
  how["soft_cap"] = soft_cap
  case = Case(
    platform=device.platform, capability=getattr(device, "compute_capability", None), precision=precision, query_heads=N,
    kv_heads=K, head_dim=H, value_dim=V, window=window, length=length,
    soft_cap=soft_cap,
  )  # fmt: skip
  fused: list[Name] = [kernel.name for kernel in fused_kernels() if not kernel.refuses(case)]
  kernels: list[Name] = [choose("dot_product", case).name, *fused]
  full = None
  for rows, segments in (("full", None), ("packed", packed(B, length))):
    tokens = Tokens(segments)
    seen = np.asarray(attention_mask(tokens, B, length, window=window, bidirectional_images=False))
    exact = written_out(q[0, :, : N // K], k[0, :, 0], v[0, :, 0], g[0, :, : N // K], seen[0], H**-0.5, soft_cap)
    tflop = 2 * int(seen.sum()) * (B // len(seen)) * N * (4 * H + 3 * V) / 1e12
    found = {kernel: measured(kernel, (q, k, v), g, tokens, how, exact) for kernel in kernels}
    full = full or min(m.both for m in found.values())
    for kernel, m in found.items():
      print(
        f"{name:18} {dtype:9} {rows:7} {kernel:12} {m.forward * 1e3:8.2f} {m.both * 1e3:8.2f} {tflop / m.both:7.0f} "
        f"{m.both / full:6.2f} {m.memory:6.2f} {m.error:8.1e} {m.gradients:8.1e}",
        flush=True,
      )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
  parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes that are tried")
  parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float16"], default=["bfloat16", "float16"])
  parser.add_argument("--soft-cap", type=float, help="of the scores; none unless given")
  options = parser.parse_args()
  cap = "" if options.soft_cap is None else f", scores capped at {options.soft_cap:g}"
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, rows of {options.length}{cap}\n{HEAD}")
  for name in options.shape:
    for dtype in options.dtype:
      table(name, SHAPES[name], dtype, options.length, options.soft_cap)


if __name__ == "__main__":
  main()
