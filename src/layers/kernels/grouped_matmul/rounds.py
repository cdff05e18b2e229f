"""A grouped product as a few batched products. In each round every group multiplies its next rows.

GPUs are fast at one batched matrix product of all groups. A round takes the same number of rows from every group, so all groups
take as many rounds as the largest one. This is about 1.3 times the needed work for even loads, and G times the needed work if
one group has all rows. Sums over rounds have a fixed order, so every run gives the same numbers.

M rows, D summed, F columns, G groups, C rows of a group in a round.
"""

import math

import jax
import jax.numpy as jnp

from maxtext_like.layers.kernels.grouped_matmul.derivative import differentiable
from maxtext_like.layers.kernels.grouped_matmul.registry import Case, GroupedKernel
from maxtext_like.layers.partition import vary_alike

_FEWEST = 16
"""Minimum rows of a round, which is the size of a matrix unit."""
_LONGER = 4
"""Factor on the rows of a round in the gradient of the matrices, where each round reads and writes a float32 matrix per
group."""


def round_rows(rows: int, groups: int) -> int:
  """Return C, a power of two. It is at most half of the mean group, so that the last round has few unused rows."""
  return max(_FEWEST, 2 ** int(math.log2(max(rows / (2 * groups), 1))))


def product(x_MD: jax.Array, w_GDF: jax.Array, sizes: jax.Array, precision: jax.lax.PrecisionLike = None) -> jax.Array:
  """Return x[m] @ w[group of m] for every row m.

  Args:
    x_MD: rows, sorted by group.
    w_GDF: one matrix for each group, in x's dtype.
    sizes: int32 [G], rows of each group. Rows after the last group belong to no group.
    precision: precision of each product.

  Returns:
    [M, F] in x's dtype, accumulated in float32; zeros for rows without a group.
  """
  return _product(*vary_alike(x_MD, w_GDF, sizes), precision)


def _in_round(number: jax.Array, sizes: jax.Array, C: int, rows: int) -> jax.Array:
  """Return int32 [G, C]: the rows of each group in a round. Each index occurs once. Beyond the end of a group, the indices are
  ``rows`` or larger, which are dropped."""
  # Rows of this round within their group, then in the array.
  G, within = sizes.shape[0], number * C + jnp.arange(C)
  own = (jnp.cumsum(sizes) - sizes)[:, None] + within
  return jnp.where(within < sizes[:, None], own, rows + jnp.arange(G * C).reshape(G, C))


def _rounds(sizes: jax.Array, C: int) -> jax.Array:
  return -(-jnp.max(sizes) // C)


def _rows_times_groups(x, w, sizes, precision, *, transposed):
  """Return [M, F]. With ``transposed``, x is [M, F] and the result [M, D]."""
  spec = "GCF,GDF->GCD" if transposed else "GCD,GDF->GCF"
  M, C = x.shape[0], round_rows(x.shape[0], w.shape[0])

  def one(number, out):
    at = _in_round(number, sizes, C, M)
    # Gather the rows of all groups, multiply, and scatter the results to their places.
    made = jnp.einsum(
      spec, x.at[at].get(mode="fill", fill_value=0), w, precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip
    return out.at[at].set(made.astype(x.dtype), mode="drop", unique_indices=True)  # unique, so a GPU needs no atomic writes

  out, _ = vary_alike(jnp.zeros((M, w.shape[1 if transposed else 2]), x.dtype), x)
  return jax.lax.fori_loop(0, _rounds(sizes, C), one, out)


def _groups_of_rows(x, g, sizes, precision):
  """Compute the gradient of the matrices, float32 [G, D, F]: x.T @ g over the rows of each group."""
  M, G = x.shape[0], sizes.shape[0]
  C = _LONGER * round_rows(M, G)

  def one(number, dw):
    at = _in_round(number, sizes, C, M)
    # Unused rows are read as zeros, so they add nothing.
    left, right = (y.at[at].get(mode="fill", fill_value=0) for y in (x, g))
    return dw + jnp.einsum("GCD,GCF->GDF", left, right, precision=precision, preferred_element_type=jnp.float32)

  dw, _ = vary_alike(jnp.zeros((G, x.shape[1], g.shape[1]), jnp.float32), x)
  return jax.lax.fori_loop(0, _rounds(sizes, C), one, dw)


def _avoided(case: Case) -> str:
  return "" if case.platform == "gpu" else "every group takes as long as the largest one"


_product = differentiable(_rows_times_groups, _groups_of_rows)


KERNEL = GroupedKernel(name="rounds", refuses=lambda case: [], avoided=_avoided, run=product)
