"""Measures the accuracy and the speed of ``matmul_dtype: float8``, compared with bfloat16.

  python benchmarks/float8.py          errors of a product and of its gradients against float64, on any device
  python benchmarks/float8.py --time   and TFLOP/s of an MLP and a projection of gemma4-31b, forward and backward, on a GPU

An error is the norm of the difference divided by the norm. "sums" is the error against float64 products of the same rounded
numbers. It comes from accumulation and from one rounding of the result to bfloat16, which alone is 0.17 %. Times are medians of
back-to-back dispatches. The number of FLOPs is the same for float8 and bfloat16.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.context import Context
from maxtext_like.layers.mlp import MLP, MLPConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.quantization import float8
from maxtext_like.layers.weight import product

KINDS = {"bfloat16": Precision(weight_dtype="bfloat16"), "float8": Precision(weight_dtype="bfloat16", matmul_dtype="float8")}
ROWS, SUMMED, KEPT = 1024, 5376, 1024
D, F, N, H, TOKENS = 5376, 21504, 32, 256, 16384


def draws() -> Iterator[tuple[str, jax.Array, jax.Array, jax.Array]]:
  """Yields a name, activations [ROWS, SUMMED], weights [SUMMED, KEPT] and gradients [ROWS, KEPT], in bfloat16."""
  keys = jax.random.split(jax.random.key(0), 5)
  normal = lambda key, *shape: jax.random.normal(key, shape)
  x, w, g = normal(keys[0], ROWS, SUMMED), normal(keys[1], SUMMED, KEPT) / SUMMED**0.5, normal(keys[2], ROWS, KEPT) * 1e-4
  low = lambda *arrays: tuple(a.astype(jnp.bfloat16) for a in arrays)
  yield "normal", *low(x, w, g)
  loud = jnp.where(jnp.arange(SUMMED) % 384 == 0, 50.0, 1.0)
  yield "14 channels 50 times as large", *low(x * loud, w, g)
  sizes = jnp.exp(3 * normal(keys[3], ROWS, 1))
  yield "gradients of rows e^(3 n)", *low(x, w, g * sizes)


def errors() -> Iterator[str]:
  """Yields the lines of the table of errors."""
  f64 = lambda a: np.asarray(a).astype(np.float64)
  relative = lambda got, exact: float(np.linalg.norm(f64(got) - exact) / np.linalg.norm(exact))
  back = lambda x, dtype: f64(float8.scaled(x, dtype).values) * float(float8.scaled(x, dtype).scale)
  yield "| numbers | operands | product | input gradient | weight gradient | sums |"
  yield "|---|---|---|---|---|---|"
  for name, x, w, g in draws():
    exact = f64(x) @ f64(w), f64(g) @ f64(w).T, f64(x).T @ f64(g)
    for kind, precision in KINDS.items():

      def run(x, w, g, precision=precision):
        out, pull = jax.vjp(lambda x, w: product(precision, "BD,DF->BF", x, w, large=True), x, w)
        return out, *pull(g)

      got = jax.jit(run)(x, w, g)
      rounded = exact
      if kind == "float8":
        x8, w8, g8 = back(x, float8.NUMBERS), back(w, float8.NUMBERS), back(g, float8.GRADIENTS)
        rounded = x8 @ w8, g8 @ w8.T, x8.T @ g8
      sums = max(relative(a, b) for a, b in zip(got, rounded, strict=True))
      cells = [f"{relative(a, b):.2%}" for a, b in zip(got, exact, strict=True)]
      yield f"| {name} | {kind} | {' | '.join(cells)} | {sums:.2%} |"


def cases(precision: Precision) -> Iterator[tuple[str, float, Callable[..., Any], tuple[Any, ...]]]:
  """Yields names, FLOPs, functions of weights and x, and their weights."""
  mlp = MLP(MLPConfig(emb_dim=D, mlp_dim=F), precision)
  small = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) * 0.02
  p = {name: small(i, *param.shape) for i, (name, param) in enumerate(mlp.params().items())}
  yield f"MLP {D} x {F}", 18.0 * TOKENS * D * F, lambda p, x: mlp(p, x, Context.of(x)), (p,)
  q = lambda w, x: product(precision, "BTD,DNH->BTNH", x, w, large=True)
  yield f"projection {D} x {N * H}", 6.0 * TOKENS * D * N * H, q, (small(9, D, N, H),)


def times(kinds: dict[str, Precision], repeats: int = 20) -> Iterator[str]:
  """Yields the lines of the table of times. Ratios compare each kind with the first one."""
  yield f"| {TOKENS} tokens, forward and backward | operands | ms | TFLOP/s | ratio |"
  yield "|---|---|---|---|---|"
  plain: dict[str, float] = {}
  for kind, precision in kinds.items():
    for name, flops, function, weights in cases(precision):
      x = jax.random.normal(jax.random.key(7), (4, TOKENS // 4, D), jnp.bfloat16)

      def step(x, *weights, function=function):
        out, pull = jax.vjp(lambda x, *w: function(*w, x), x, *weights)
        return pull(out)

      compiled = jax.jit(step).lower(x, *weights).compile()
      jax.block_until_ready(compiled(x, *weights))
      found = []
      for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeats):
          out = compiled(x, *weights)
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / repeats)
      seconds = statistics.median(found)
      plain.setdefault(name, seconds)
      yield f"| {name} | {kind} | {seconds * 1e3:.2f} | {flops / seconds / 1e12:.0f} | {plain[name] / seconds:.2f} |"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--time", action="store_true")
  given = parser.parse_args()
  device = jax.devices()[0]
  print(f"{device.device_kind}, jax {jax.__version__}\n")
  with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=[device])):
    for line in errors():
      print(line, flush=True)
    if given.time:
      print()
      for line in times(KINDS):
        print(line, flush=True)


if __name__ == "__main__":
  main()
