"""Times the backward pass of a norm on this machine, with XLA and with the kernel, at the shapes of models.

python benchmarks/norm_gradients.py [--shape gemma3-4b ...] [--sizes ROWS DIM] [--dtype bfloat16] [--kernels xla pallas_gpu]

It measures a norm next to the residual stream, as before each part of a layer, whose gradient is added to that of the stream,
and a norm alone, as after a part. Each call has eight sets of arrays, so that none of them is still in a cache. TB/s count the
arrays that must be read and written: x, the gradient, the gradient of the stream if there is one, and the result.
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
  """Returns a line of the table."""
  norm = RMSNorm(NormConfig(dim=dim, kernel=kernel), Precision(dtype=dtype))
  p = {"scale": jnp.ones(dim, jnp.float32)}
  keys = jax.random.split(jax.random.key(0), 3 * SETS)
  arrays = [jax.random.normal(key, (rows, dim), dtype) for key in keys]
  x, g, stream = (arrays[i::3] for i in range(3))
  # The forward pass runs once here, because only the backward pass is measured.
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
      choose(kernel, Case(platform=device.platform, capability=capability, devices=1, dim=dim))  # raises if it cannot run here
      print(row(name, rows, dim, kernel, options.dtype), flush=True)


if __name__ == "__main__":
  main()
