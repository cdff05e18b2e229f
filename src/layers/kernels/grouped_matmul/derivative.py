"""The derivative of a grouped product, which every grouped kernel here has: two products by the same kernels."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def differentiable(rows_times_groups: Callable[..., jax.Array], groups_of_rows: Callable[..., jax.Array]) -> Callable[..., Any]:
  """Return a function (x, w, sizes, *how) -> [M, C] with a custom derivative. ``how`` has static settings of the kernels.

  Args:
    rows_times_groups: (x, w, sizes, *how, transposed) -> x[m] @ w[group of m] for every row m. With ``transposed``, w is
      [G, C, S] and the matrices are transposed.
    groups_of_rows: (x, g, sizes, *how) -> x.T @ g over the rows of each group, the gradient of the matrices.
  """

  @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
  def _product(x, w, sizes, how):
    return rows_times_groups(x, w, sizes, *how, transposed=False)

  def forward(x, w, sizes, how):
    return _product(x, w, sizes, how), (x, w, sizes)

  def backward(how, saved, g):
    # The cotangent is rounded to the dtype of the operands, as in the forward pass.
    x, w, sizes = saved
    g = g.astype(x.dtype)
    dx = rows_times_groups(g, w, sizes, *how, transposed=True)
    return dx, groups_of_rows(x, g, sizes, *how).astype(w.dtype), None

  _product.defvjp(forward, backward)
  return lambda x, w, sizes, *how: _product(x, w, sizes, how)
