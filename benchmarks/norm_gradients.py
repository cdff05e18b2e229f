"""The gradients of a norm between layers on this machine: XLA's and those of the kernel, at the shapes of models.

python benchmarks/norm_gradients.py [--shape gemma3-4b ...] [--sizes ROWS DIM] [--dtype bfloat16] [--kernels xla pallas_gpu]

Of a norm beside a stream, as before each part of a layer, whose gradient is that of both, and of one alone, as behind a part.
Each call has eight sets of arrays, so that none is in a cache when its turn comes. TB/s are those of what has to be read and
written: x, the gradient, the stream's where there is one, and the result.
"""

import argparse
from typing import Any, get_args

import jax
import jax.numpy as jnp
from grouped import seconds

from maxtext_like.layers.kernels.norm.registry import Case, Name, choose
from maxtext_like.layers.norms import NormConfig, RMSNorm
from maxtext_like.layers.precision import Precision

SHAPES = {"gemma3-4b": (8192, 2560), "gemma4-31b": (4096, 5376), "deepseek3-671b": (4096, 7168)}
SETS = 8


def row(name: str, rows: int, dim: int, kernel: Name, dtype: Any) -> str:
  """A line of the table."""
  norm = RMSNorm(NormConfig(dim=dim, kernel=kernel), Precision(dtype=dtype))
  p = {"scale": jnp.ones(dim, jnp.float32)}
  keys = jax.random.split(jax.random.key(0), 3 * SETS)
  arrays = [jax.random.normal(key, (rows, dim), dtype) for key in keys]
  x, g, stream = (arrays[i::3] for i in range(3))
  # The forward pass once; what is measured is the backward pass alone.
  alone = [jax.vjp(norm, p, a)[1] for a in x]
  beside = [jax.vjp(norm.with_input, p, a)[1] for a in x]
  of_alone = seconds(jax.jit(lambda pulls, g: [pull(b) for pull, b in zip(pulls, g, strict=True)]), alone, g, budget=0.5)
  of_beside = seconds(
    jax.jit(lambda pulls, s, g: [pull((a, b)) for pull, a, b in zip(pulls, s, g, strict=True)]), beside, stream, g, budget=0.5
  )
  cells = []
  for taken, arrays_moved in ((of_beside / SETS, 4), (of_alone / SETS, 3)):
    cells += [f"{1e6 * taken:.1f}", f"{arrays_moved * x[0].nbytes / taken / 1e12:.2f}"]
  return f"| {name} | {rows} x {dim} | {kernel} | {' | '.join(cells)} |"


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
  parser.add_argument("--sizes", nargs=2, type=int, metavar=("ROWS", "DIM"), help="in place of the shapes")
  parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
  parser.add_argument("--kernels", nargs="+", choices=get_args(Name), default=["xla", "pallas_gpu"])
  options = parser.parse_args()
  shapes = {"given": tuple(options.sizes)} if options.sizes else {name: SHAPES[name] for name in options.shape}
  device = jax.local_devices()[0]
  print(f"{device.device_kind}, jax {jax.__version__}, {options.dtype}; us and TB/s of a norm's gradients\n")
  print("| model | rows | by | beside a stream, us | TB/s | alone, us | TB/s |\n|---|---|---|---|---|---|---|", flush=True)
  for name, (rows, dim) in shapes.items():
    for kernel in options.kernels:
      capability = getattr(device, "compute_capability", None)
      choose(kernel, Case(platform=device.platform, capability=capability, devices=1, dim=dim))  # says why it cannot
      print(row(name, rows, dim, kernel, options.dtype), flush=True)


if __name__ == "__main__":
  main()
