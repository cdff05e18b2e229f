"""Every fused attention kernel that this machine's GPU can run against the reference: values, gradients and time, at the shapes
of the models.

python benchmarks/attention.py [--length 4096] [--shape "gemma4-31b global" ...] [--dtype bfloat16]

TFLOP/s are those of the pairs that the mask leaves: two products forward, five backward, whatever a kernel makes again.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.kernels.attention.registry import Case, Name, attend, choose, fused_kernels
from maxtext_like.layers.masks import Tokens, attention_mask
from maxtext_like.layers.precision import Precision

SHAPES = {  # name: (batch, query heads, key-value heads, head dimension, that of values, window)
  "gemma3-4b local": (2, 8, 4, 256, 256, 1024),
  "gemma3-4b global": (2, 8, 4, 256, 256, None),
  "gemma4-31b local": (2, 32, 16, 256, 256, 1024),
  "gemma4-31b global": (2, 32, 4, 512, 512, None),
  "gemma3-27b local": (2, 32, 16, 128, 128, 1024),
  "gemma3-27b global": (2, 32, 16, 128, 128, None),
  "deepseek3": (1, 128, 128, 192, 128, None),
}


def packed(batch: int, length: int) -> jax.Array:
  """Segments of three documents and some padding at the end, other cuts in each row."""
  at = jnp.arange(length)
  rows = [1 + (at > length // 3 + 7 * b) + (at > length // 2 + 11 * b) for b in range(batch)]
  return jnp.where(at < length - 5, jnp.stack(rows), 0).astype(jnp.int32)


def seconds(function, *args) -> float:
  """Median of 10 runs after 2 to warm up."""
  times = []
  for i in range(12):
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    if i >= 2:
      times.append(time.perf_counter() - start)
  return sorted(times)[len(times) // 2]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
  parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes that are tried")
  parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float16"], default=["bfloat16", "float16"])
  options = parser.parse_args()
  length = options.length
  device = jax.devices()[0]
  print(f"{device.device_kind}, jax {jax.__version__}, length {length}; ms, TFLOP/s and speed-up are of forward + backward")
  times = f"{'forward':>8} {'ms':>8} {'TFLOP/s':>7} {'speed-up':>8}"
  print(f"{'shape':18} {'dtype':9} {'rows':7} {'kernel':12} {times} {'error':>9} {'grad error':>10}")
  for name in options.shape:
    B, N, K, H, V, window = SHAPES[name]
    for dtype in options.dtype:
      precision = Precision(dtype=dtype)
      keys = jax.random.split(jax.random.key(0), 4)
      q, k, v, g = (
        jax.random.normal(key, (B, length, *of), jnp.float32).astype(dtype)
        for key, of in zip(keys, ((N, H), (K, H), (K, V), (N, V)), strict=True)
      )
      for rows, segments in (("full", None), ("packed", packed(B, length))):
        tokens = Tokens(segments)
        results = {}
        case = Case(
          platform=device.platform, capability=getattr(device, "compute_capability", None), precision=precision, query_heads=N,
          kv_heads=K, head_dim=H, value_dim=V, window=window, length=length,
        )  # fmt: skip
        pairs = int(attention_mask(tokens, B, length, window=window, bidirectional_images=False).sum()) * (
          B if segments is None else 1
        )
        tflop = 2 * pairs * N * (4 * H + 3 * V) / 1e12
        plain = choose("dot_product", case).name
        kernels: list[Name] = [plain, *(kernel.name for kernel in fused_kernels() if not kernel.refuses(case))]
        for kernel in kernels:
          how: Any = {"window": window, "bidirectional_images": False, "scale": H**-0.5, "precision": precision}

          def attention(q, k, v, tokens, kernel: Name = kernel, how=how):
            return attend(kernel, q, k, v, tokens, **how)

          def both(q, k, v, tokens, g, attention=attention):
            out, backward = jax.vjp(lambda *qkv: attention(*qkv, tokens), q, k, v)
            return out, backward(g)

          step = jax.jit(both)
          out, grads = step(q, k, v, tokens, g)
          results[kernel] = (seconds(jax.jit(attention), q, k, v, tokens), seconds(step, q, k, v, tokens, g), out, grads)
        _, base, ref, ref_grads = results[plain]
        for kernel, (forward, t, out, grads) in results.items():
          error = relative(out, ref)
          grad_error = max(relative(a, b) for a, b in zip(grads, ref_grads, strict=True))
          print(
            f"{name:18} {dtype:9} {rows:7} {kernel:12} {forward * 1e3:8.2f} {t * 1e3:8.2f} {tflop / t:7.0f} {base / t:8.2f} "
            f"{error:9.1e} {grad_error:10.1e}",
            flush=True,
          )


def relative(a: jax.Array, b: jax.Array) -> float:
  """Norm of the difference over the norm of b, in float32."""
  a32, b32 = a.astype(jnp.float32), b.astype(jnp.float32)
  return float(jnp.linalg.norm(a32 - b32) / jnp.linalg.norm(b32))


if __name__ == "__main__":
  main()
