"""Measures how the memory limit of TPU kernels affects compilation: CPU seconds, code size and the estimated cycles.

python benchmarks/kernel_code.py 24576 32768 49152 65536 98304     values of xla_tpu_scoped_vmem_limit_kib; up to 4 minutes

Compiles the three kinds of matrix products of an MLP (5376 x 21504, 2048 tokens): gate times up, down, and the gradient of a
weight. The compiler estimates the cycles. Needs the extra [tpu], but no TPU.
"""

import argparse
import re
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from maxtext_like.capacity.aot_tpu import prepare_environment, xla_flags
from maxtext_like.capacity.topologies import find_topology

T, D, F = 2048, 5376, 21504


def times(x, w):
  """Returns the product x w in bfloat16, as layers compute it."""
  return jnp.einsum("td,df->tf", x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


PRODUCTS = {
  "gate, up": (lambda x, gate, up: jax.nn.gelu(times(x, gate)) * times(x, up), [(T, D), (D, F), (D, F)]),
  "down": (times, [(T, F), (F, D)]),
  "gradient": (lambda x, g: jnp.einsum("td,tf->df", x, g, preferred_element_type=jnp.float32), [(T, D), (T, F)]),
}


def main() -> None:
  """Prints a row for every limit."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("limits", nargs="+", type=int, help="KiB")
  limits = parser.parse_args().limits
  prepare_environment()
  name = find_topology("v6e-1").libtpu_name
  device = topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=(1, 1, 1)).devices[0]
  place = SingleDeviceSharding(device)
  print("| limit, KiB | CPU s | code, MB | million cycles, estimated: " + ", ".join(PRODUCTS) + " |\n|---|---|---|---|")
  for limit in limits:
    seconds, code, cycles = 0.0, 0, []
    for function, shapes in PRODUCTS.values():
      arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
      lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
      begin = time.process_time()
      compiled = lowered.compile(compiler_options=xla_flags() | {"xla_tpu_scoped_vmem_limit_kib": str(limit)})
      seconds += time.process_time() - begin
      known = compiled.memory_analysis()
      assert known is not None, "libtpu tells it"
      code += known.generated_code_size_in_bytes
      cycles.append(sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text() or ""))))
    estimated = ", ".join(f"{x / 1e6:.3f}" for x in cycles)
    print(f"| {limit} | {seconds:.1f} | {code / 1e6:.2f} | {estimated}; {sum(cycles) / 1e6:.3f} |", flush=True)


if __name__ == "__main__":
  main()
