"""Times products of few rows with quantized weights: with the kernel, and with XLA and a dequantized copy.

python benchmarks/quantized_matmul.py                        the weights of gemma4-31b, on one GPU
python benchmarks/quantized_matmul.py --rows 1 16 64 --forms nf4

Each number is the mean of products with different weights, which do not fit the caches of the GPU together. "share" is the time
to read the stored bytes once at the bandwidth of the memory, divided by the time of the kernel.
"""

import argparse
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.capacity.chips import find_chip
from maxtext_like.layers.kernels.quantized_matmul import quantized_matmul
from maxtext_like.layers.quantization.quantized import CODES, FORMS, MatrixView

SIZES = {"gate, up": (5376, 21504), "down": (21504, 5376), "q": (5376, 8192), "k, v": (5376, 4096), "o": (8192, 5376)}
WEIGHTS = 8
REPEATS = 5


def weights(form: str, K: int, M: int) -> list[dict[str, jax.Array]]:
  """Returns the stored arrays of several random weights."""
  of, view = FORMS[form], MatrixView((), (K,), (M,), (None, None))  # pyright: ignore[reportArgumentType]
  make = jax.jit(lambda seed: of.quantize(view, jax.random.normal(jax.random.key(seed), (K, M))))
  return [make(seed) for seed in range(WEIGHTS)]


def by_output(stored: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the arrays in the order in which the kernel reads them."""
  return stored | {CODES: jnp.swapaxes(stored[CODES], 0, 1)}


def by_kernel(form: str, x: jax.Array, stored: Any, M: int, *, interpret: bool) -> jax.Array:
  """Computes the product with the kernel."""
  values = FORMS[form].table  # pyright: ignore[reportArgumentType]
  return quantized_matmul(form, x, stored, M, values=values, interpret=interpret)


def by_xla(form: str, x: jax.Array, stored: Any, M: int) -> jax.Array:
  """Computes the product with the dequantized weight."""
  of, view = FORMS[form], MatrixView((), (x.shape[1],), (M,), (None, None))  # pyright: ignore[reportArgumentType]
  x, stored = jax.lax.optimization_barrier((x, stored))
  return jnp.dot(x, of.values(view, stored, "bfloat16"), preferred_element_type=jnp.float32)


def seconds(multiply: Any, form: str, x: jax.Array, stored: list[Any], M: int) -> float:
  """Returns the seconds of a product."""
  every = jax.jit(lambda x, stored: [multiply(form, x, own, M) for own in stored])
  jax.block_until_ready(every(x, stored))
  found = []
  for _ in range(REPEATS):
    begin = time.perf_counter()
    jax.block_until_ready([every(x, stored) for _ in range(10)])
    found.append((time.perf_counter() - begin) / 10 / len(stored))
  return statistics.median(found)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--rows", type=int, nargs="+", default=[2, 16, 64])
  parser.add_argument("--forms", nargs="+", choices=["int8", "nf4", "fp8_block"], default=["int8", "nf4", "fp8_block"])
  parser.add_argument("--interpret", action="store_true", help="a small weight on a CPU, for a look")
  args = parser.parse_args()
  chip = find_chip(jax.local_devices()[0].device_kind)
  print(f"jax {jax.__version__}, {jax.local_devices()[0].device_kind}\n")
  print("| form | weight | inputs x outputs | rows | us, kernel | GB/s | share | us, XLA | XLA / kernel |\n" + "|---" * 9 + "|")
  sizes = {"small": (200, 150)} if args.interpret else SIZES
  multiply = functools.partial(by_kernel, interpret=args.interpret)
  for form in args.forms:
    for name, (K, M) in sizes.items():
      stored = weights(form, K, M)
      ordered, size = [by_output(own) for own in stored], sum(x.nbytes for x in stored[0].values())
      for rows in args.rows:
        x = jax.random.normal(jax.random.key(1), (rows, K)).astype(jnp.bfloat16)
        ours = seconds(multiply, form, x, ordered, M)
        theirs = seconds(by_xla, form, x, stored, M)
        share = f"{size / chip.memory / ours:.0%}" if chip and chip.memory else ""
        times = f"{ours * 1e6:.1f} | {size / ours / 1e9:.0f} | {share} | {theirs * 1e6:.1f} | {theirs / ours:.1f}"
        print(f"| {form} | {name} | {K} x {M} | {rows} | {times} |", flush=True)


if __name__ == "__main__":
  main()
