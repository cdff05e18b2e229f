"""A grouped product by ``jax.lax.ragged_dot``: a grouped kernel on TPU, one dense product a group elsewhere."""

import jax

from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel


def product(x_MD: jax.Array, w_GDF: jax.Array, sizes: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
  """x[m] @ w[group of m] for every row m, [M, F]; see ``registry.GroupedKernel.run``."""
  return jax.lax.ragged_dot(x_MD, w_GDF, sizes, precision=precision)


def _refuses(case: Case) -> list[str]:
  # Mosaic has no float16.
  return ["there is no grouped float16 product on TPU"] if case.platform == "tpu" and case.dtype == "float16" else []


def _avoided(case: Case) -> str:
  return "" if case.platform == "tpu" else "every group is multiplied with every row"


KERNEL = GroupedKernel(
  name="ragged_dot", refuses=_refuses, avoided=_avoided, run=product, called=lambda path, name: "ragged" in name
)
