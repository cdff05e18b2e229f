"""What x-ray costs: processor time of a small transformer step, looked through and plain, in one run.

python benchmarks/xray.py [--layers 4] [--width 64]
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxtext_like.numerics.xray import xray


def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
  """Norm, attention, gated MLP: x [B, T, D]."""
  h = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
  a = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h @ w["a"], h))
  x = x + jnp.einsum("bts,bsd->btd", a, h)
  return x + (jax.nn.gelu(x @ w["b"]) * (x @ w["c"])) @ w["d"], None


def cpu_seconds(f: Callable[..., Any], *args: Any) -> float:
  """Least processor time of 20 calls: other programs on the machine do not count."""
  jax.block_until_ready(f(*args))
  best = float("inf")
  for _ in range(20):
    start = time.process_time()
    jax.block_until_ready(f(*args))
    best = min(best, time.process_time() - start)
  return best


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--layers", type=int, default=4)
  parser.add_argument("--width", type=int, default=64)
  options = parser.parse_args()
  keys = jax.random.split(jax.random.key(0), 4)
  shape = (options.layers, options.width, options.width)
  ws = {name: jax.random.normal(key, shape) / options.width**0.5 for name, key in zip("abcd", keys, strict=True)}
  x = jax.random.normal(jax.random.key(1), (4, 64, options.width))
  step = jax.value_and_grad(lambda ws, x: (lax.scan(jax.checkpoint(block), x, ws)[0] ** 2).mean())
  plain = cpu_seconds(jax.jit(step), ws, x)
  print(f"plain step {plain * 1e3:.1f} ms")
  for name, light in (("light", True), ("full", False)):
    seen = cpu_seconds(xray(step, light=light).run, ws, x)
    print(f"{name} x-ray {seen * 1e3:.1f} ms, {seen / plain:.2f} times")


if __name__ == "__main__":
  main()
