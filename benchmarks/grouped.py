"""Times the kernels that multiply tokens with their experts on this machine, at the shapes of models.

python benchmarks/grouped.py [--shape gemma4-26b ...] [--kernels pallas_gpu rounds] [--dtype bfloat16] [--sums]
python benchmarks/grouped.py --sizes 96 64 32 8      any rows, summed, columns and groups

Rows go to groups evenly (as from a router without a preference), unevenly (from less than a tenth of the mean to several times
the mean) or all to one group. TFLOP/s count the useful work: two operations for each number of a row and each column of its
group, and three times as many for forward and backward. "one matrix" is a plain product of the same size with a single matrix,
which shows the best that the device can do.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.layers.kernels.grouped_matmul.registry import NAMES, Case, Name, choose, kernel

SHAPES = {  # name: (rows, summed, columns, groups), the first of an expert's products for 4096 tokens
  "gemma4-26b": (32768, 2816, 704, 128),
  "gemma4-26b, 4 rows": (131072, 2816, 704, 128),
  "deepseek3-671b": (32768, 7168, 2048, 256),
}


def loads(rows: int, groups: int) -> dict[str, np.ndarray]:
  """Returns the number of rows of each group, int32 [G], by the name of the load."""
  rng = np.random.default_rng(0)
  one = np.zeros(groups, np.int64)
  one[groups // 2] = rows
  found = {
    "even": rng.multinomial(rows, np.full(groups, 1 / groups)),
    "uneven": rng.multinomial(rows, rng.dirichlet(np.full(groups, 2.0))),
    "one": one,
  }
  return {name: sizes.astype(np.int32) for name, sizes in found.items()}


def seconds(function: Any, *args: Any, budget: float) -> float:
  """Returns the seconds of a call: the best of three groups of back-to-back calls, which take ``budget`` seconds together."""
  jax.block_until_ready(function(*args))
  begin = time.perf_counter()
  jax.block_until_ready(function(*args))
  calls = int(np.clip(budget / 3 / (time.perf_counter() - begin), 1, 100))
  best = np.inf
  for _ in range(3):
    begin, out = time.perf_counter(), None
    for _ in range(calls):
      out = function(*args)
    jax.block_until_ready(out)
    best = min(best, (time.perf_counter() - begin) / calls)
  return float(best)


def measure(shape: tuple[int, int, int, int], name: Name, dtype: str, budget: float, sums: bool) -> list[str]:
  """Returns a row of the table for each load. ``sums``: float32 results and cotangents, as in experts of a float16 model."""
  M, S, C, G = shape
  found = kernel(name)
  product = (lambda x, w, sizes: found.sums(x, w, sizes, dtype, "default")) if sums else found.run

  def both(x, w, sizes, g):
    out, backward = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    return out, *backward(g)

  of = jax.ShapeDtypeStruct
  x_, w_, n_, g_ = of((M, S), dtype), of((G, S, C), dtype), of((G,), jnp.int32), of((M, C), "float32" if sums else dtype)
  forward, whole = jax.jit(product).lower(x_, w_, n_).compile(), jax.jit(both).lower(x_, w_, n_, g_).compile()
  x, w, g = (jax.random.normal(jax.random.key(i), a.shape, a.dtype) for i, a in enumerate((x_, w_, g_)))
  useful, rows = 2 * M * S * C / 1e12, []
  for load, sizes in loads(M, G).items():
    n = jnp.asarray(sizes)
    f, b = seconds(forward, x, w, n, budget=budget), seconds(whole, x, w, n, g, budget=budget)
    times = f"{f * 1e3:9.3f} {useful / f:8.4g} {b * 1e3:9.3f} {3 * useful / b:8.4g}"
    rows.append(f"{name:12} {load:7} {f'{sizes.min()} to {sizes.max()}':>14} {times}")
  return rows


def plainly(shape: tuple[int, int, int, int], dtype: str, budget: float) -> str:
  """Returns the row of a plain product."""
  M, S, C, _ = shape
  x, w = (jax.random.normal(jax.random.key(i), a, dtype) for i, a in enumerate(((M, S), (S, C))))
  s = seconds(jax.jit(jnp.matmul), x, w, budget=budget)
  return f"{'one matrix':12} {'':7} {M:>14} {s * 1e3:9.3f} {2 * M * S * C / 1e12 / s:8.4g}"


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes that are tried")
  parser.add_argument("--sizes", nargs=4, type=int, metavar=("M", "S", "C", "G"), help="another shape in place of all")
  parser.add_argument("--kernels", nargs="+", choices=NAMES, help="in place of auto's and rounds")
  parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
  parser.add_argument("--sums", action="store_true", help="hand on float32 sums, as float16 experts need them")
  parser.add_argument("--seconds", type=float, default=0.5, help="for a measurement")
  options = parser.parse_args()
  device = jax.devices()[0]
  capability = getattr(device, "compute_capability", None)
  case = Case(platform=device.platform, dtype=options.dtype, sums=options.sums, capability=capability)
  names: dict[Name, None] = dict.fromkeys(choose(name, case).name for name in options.kernels or ("auto", "rounds"))
  shapes = {"asked for": tuple(options.sizes)} if options.sizes else {name: SHAPES[name] for name in options.shape}
  print(f"{device.device_kind}, jax {jax.__version__}, {options.dtype}{', float32 sums' if options.sums else ''}")
  for name, shape in shapes.items():
    print(f"\n{name}: {shape[0]} rows of {shape[1]}, {shape[3]} groups of [{shape[1]}, {shape[2]}]")
    print(
      f"{'kernel':12} {'load':7} {'rows a group':>14} {'fwd ms':>9} {'TFLOP/s':>8} {'both ms':>9} {'TFLOP/s':>8}", flush=True
    )
    for one in names:
      for row in measure(shape, one, options.dtype, options.seconds, options.sums):
        print(row, flush=True)
    print(plainly(shape, options.dtype, options.seconds), flush=True)


if __name__ == "__main__":
  main()
