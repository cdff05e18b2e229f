"""Measures the cost of x-ray: the processor time of a training step with and without it, and of compiling both.

python benchmarks/xray.py [--layers 4] [--width 64]     the library on a small transformer step, every tensor measured
python benchmarks/xray.py gemma4-tiny [key=value ...] [--all]   `maxtext-like xray`: the train step of a model
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxtext_like.numerics.xray import xray


def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
  """Computes norm, attention and a gated MLP for x [B, T, D]."""
  h = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
  a = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h @ w["a"], h))
  x = x + jnp.einsum("bts,bsd->btd", a, h)
  return x + (jax.nn.gelu(x @ w["b"]) * (x @ w["c"])) @ w["d"], None


def cpu_seconds(f: Callable[..., Any], *args: Any) -> float:
  """Returns the smallest processor time of 20 calls, which other programs on the machine do not affect."""
  jax.block_until_ready(f(*args))
  best = float("inf")
  for _ in range(20):
    start = time.process_time()
    jax.block_until_ready(f(*args))
    best = min(best, time.process_time() - start)
  return best


def of_a_model(model: str, *words: str, with_all: bool) -> None:
  """Prints the times and ratios for the train step of a configuration on its first batch."""
  import numpy as np
  from step_cost import DRAWN

  from maxtext_like.analysis.step_xray import step_xray
  from maxtext_like.config.load import load_config
  from maxtext_like.sharding.mesh import use_mesh
  from maxtext_like.training.run.batches import first_batch
  from maxtext_like.training.step.program import make_program

  config = load_config(model, words).config
  program = make_program(config)
  state = program.lower_init().compile()(np.uint32(0))
  program, batch = first_batch(program, config.checkpoint, Path("none"))
  with use_mesh(program.model.mesh):
    start = time.process_time()
    plain = jax.jit(program.step).lower(state, batch, DRAWN).compile()
    plain_compile = time.process_time() - start
    plain_run = cpu_seconds(plain, state, batch, DRAWN)
    print(f"{model}: plain step {plain_run * 1e3:.0f} ms, compiled in {plain_compile:.1f} s of processor time", flush=True)
    for name, everything in (("x-ray", False), ("x-ray --all", True))[: 2 if with_all else 1]:
      start = time.process_time()
      seen = step_xray(program, everything=everything).lower(state, batch).compile()
      compiled = time.process_time() - start
      run = cpu_seconds(seen, jax.tree.leaves((state, batch)))
      print(
        f"{name} {run * 1e3:.0f} ms, {run / plain_run:.2f} times; compiled in {compiled:.1f} s, "
        f"{compiled / plain_compile:.1f} times",
        flush=True,
      )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("config", nargs="*", help="a model and its key=value")
  parser.add_argument("--all", action="store_true", help="of a model: with every tensor measured too; compiles for minutes")
  parser.add_argument("--layers", type=int, default=4)
  parser.add_argument("--width", type=int, default=64)
  options = parser.parse_args()
  if options.config:
    of_a_model(*options.config, with_all=options.all)
    return
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
