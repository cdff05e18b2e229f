"""A grouped product with ``jax.lax.ragged_dot``: a grouped kernel on TPUs, one dense product per group elsewhere."""

import jax

from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel


def product(x_MD: jax.Array, w_GDF: jax.Array, sizes: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
  """Return x[m] @ w[group of m] for every row m, [M, F]; see ``registry.GroupedKernel.run``."""
  return jax.lax.ragged_dot(x_MD, w_GDF, sizes, precision=precision)


def _refuses(case: Case) -> list[str]:
  # Mosaic does not support float16.
  return ["TPUs have no grouped float16 product"] if case.platform == "tpu" and case.dtype == "float16" else []


def _avoided(case: Case) -> str:
  return "" if case.platform == "tpu" else "it multiplies every group by every row"


KERNEL = GroupedKernel(
  name="ragged_dot", refuses=_refuses, avoided=_avoided, run=product, called=lambda path, name: "ragged" in name
)
