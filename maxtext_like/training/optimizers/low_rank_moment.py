r"""A first moment of low rank: momentum for the directions that most gradients share, at almost no memory cost.

Momentum matters in the few directions in which gradients are large and the loss is curved: without it, steps along them
overshoot (docs/results/low-memory-training.md has loss curves). This module keeps the moving average of a matrix's updates only
within a subspace of R dimensions, as two factors. Inside the subspace an update is replaced by the average; outside it is
unchanged:

  M = b1 P Q^T + (1 - b1) U          moving average: the kept part and the update U of this step
  P' = orthonormal columns of M Q    one step of subspace iteration that starts from the last one's result
  Q' = M^T P'
  U - P' P'^T U + P' Q'^T / (1 - b1^t)

If P' has all dimensions, this is the ordinary first moment with bias correction. The subspace iteration is that of PowerSGD
(Vogels et al. 2019, arXiv:1905.13727), which uses it to compress communication between devices.

Arrays without an axis that is summed over (norms, biases, positions, B of an adapter), and matrices that are no larger than
their factors, keep the complete moment.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_like.layers.param import Param
from maxtext_like.layers.quantization.low_rank import Layout, one_layer

Tree = Any

# Updates are divided by this before they are averaged. It is the largest value of an element in an array with an RMS of at most
# 1 and at most 1e12 elements. So no element of the factors exceeds 1, however the array's norm is divided between the matrices
# of a stack.
_LARGEST = 1e6
# Added to the diagonal of the Gram matrix (squared lengths of 1), once for each 128 columns. It is far above the rounding
# errors of float32 sums and of R columns that are the same, so that a Cholesky factor exists. A column that depends almost
# completely on the others becomes short. It recovers its length in the next steps, which start with columns of equal length.
_RIDGE = 1e-4
_TINY = 1e-18  # a shorter column counts as 0: the squares of its elements are subnormal in float32


class Factors(NamedTuple):
  """Factors of the part of a moment that is kept, float32. The leading axes are those of a stack's rows and of experts.

  Attributes:
    rows: P [..., *summed, R]; no element is above 1.
    columns: Q [..., *kept, R], computed from updates divided by ``_LARGEST``; no element is above 1.
  """

  rows: jax.Array
  columns: jax.Array


class LowRankState(NamedTuple):
  """The state of ``low_rank_moment``: the number of steps so far, and for each parameter its factors, or its complete moment of
  updates divided by ``_LARGEST``."""

  count: jax.Array
  moment: Tree


class _Matrix(NamedTuple):
  """How an array is viewed as a batch of matrices.

  Attributes:
    order: the array's axes in the order batch, rows of a matrix, columns of a matrix.
    batch, rows, columns: sizes of these axes.
  """

  order: tuple[int, ...]
  batch: tuple[int, ...]
  rows: tuple[int, ...]
  columns: tuple[int, ...]

  @classmethod
  def of(cls, p: Param, shape: tuple[int, ...], rank: int) -> "_Matrix | None":
    """Return the view of a parameter, or None if its complete moment is kept.

    Args:
      p: the parameter.
      shape: of all its layers, or of one layer.
      rank: rank of the factors.
    """
    # Only weights that multiply have rows and columns.
    if not one_layer(p).contracts:
      return None
    layout = Layout.of(p)
    lead = len(shape) - layout.rank
    axes = lambda own: tuple(lead + i for i in own)
    parts = (*range(lead), *axes(layout.group)), axes(layout.summed), axes(layout.kept)
    batch, rows, columns = (tuple(shape[i] for i in part) for part in parts)
    a, b = math.prod(rows), math.prod(columns)
    return cls(sum(parts, ()), batch, rows, columns) if rank * (a + b) < a * b else None

  def matrices(self, x: jax.Array) -> jax.Array:
    """Reshape an array to [*batch, a, b]."""
    return x.transpose(self.order).reshape(*self.batch, math.prod(self.rows), math.prod(self.columns))

  def array(self, x: jax.Array) -> jax.Array:
    """Undo ``matrices``."""
    back = sorted(range(len(self.order)), key=self.order.__getitem__)
    return x.reshape(*self.batch, *self.rows, *self.columns).transpose(back)

  def factors(self, rows: jax.Array, columns: jax.Array) -> Factors:
    """Reshape [*batch, a, R] and [*batch, b, R] to the factors as they are stored."""
    named = (rows, self.rows), (columns, self.columns)
    return Factors(*(x.reshape(*self.batch, *sizes, x.shape[-1]) for x, sizes in named))

  def of_factors(self, factors: Factors) -> tuple[jax.Array, jax.Array]:
    """Undo ``factors``."""
    return tuple(x.reshape(*self.batch, -1, x.shape[-1]) for x in factors)  # pyright: ignore[reportReturnType]


def low_rank_moment(b1: float, rank: int, spec: Tree) -> optax.GradientTransformation:
  """Return a transformation that clips float32 updates to an RMS of 1 (as ``optax.clip_by_block_rms`` does) and applies
  momentum of low rank.

  Products with an update round it to bfloat16, as accelerators do with float32 operands, and accumulate in float32. The change
  that momentum adds to an update is rounded to bfloat16 too.

  Args:
    b1: decay of the moving average.
    rank: R, above 0.
    spec: Params of the leaves (None elsewhere).
  """
  leaves, structure = jax.tree.flatten(spec)

  def init(params: Tree) -> LowRankState:
    def started(p: Param, x: jax.Array) -> Factors | jax.Array:
      m = _Matrix.of(p, x.shape, rank)
      zeros = lambda sizes: jnp.zeros((*m.batch, *sizes, rank), jnp.float32)  # pyright: ignore[reportOptionalMemberAccess]
      return jnp.zeros(x.shape, jnp.float32) if m is None else Factors(zeros(m.rows), zeros(m.columns))

    return LowRankState(jnp.zeros((), jnp.int32), jax.tree.map(started, spec, params))

  def update(directions: Tree, state: LowRankState, params: Tree = None) -> tuple[Tree, LowRankState]:
    del params
    count = state.count + 1
    # Bias correction 1 - b1^t, which is never 0.
    unbiased = -jnp.expm1(count.astype(jnp.float32) * (math.log(b1) if b1 else -math.inf))
    made, moments = [], []
    given = structure.flatten_up_to(directions), structure.flatten_up_to(state.moment)
    matrices = [_Matrix.of(p, x.shape, rank) for p, x in zip(leaves, given[0], strict=True)]
    # 0 if the squares overflow float32: such an update does not enter the momentum.
    scales = [1 / jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(x))), 1) for x in given[0]]
    each = zip(matrices, given[0], scales, given[1], strict=True)
    fallback = _random_columns({math.prod(m.columns) for m in matrices if m is not None}, rank, count)
    started = [None if m is None else _Started.of(m, x, scale, old, b1, fallback) for m, x, scale, old in each]
    # Single matrices are orthonormalized together, because each call waits for a sequence of small kernels. A stack has enough
    # matrices to be processed alone; waiting for the others would keep everything that its update reads in memory.
    single = [found for found in started if found is not None and not found.matrix.batch]
    together = iter(_orthonormal([found.sketch for found in single]))
    for found, u, scale, old in zip(started, given[0], scales, given[1], strict=True):
      if found is None:
        new = b1 * old + (1 - b1) * (u * scale / _LARGEST)
        direction = new * (_LARGEST / unbiased)
      else:
        basis = _orthonormal([found.sketch])[0] if found.matrix.batch else next(together)
        direction, new = found.finished(basis, b1, unbiased)
      # Without factors the complete moment is averaged; otherwise the basis of the subspace completes the update.
      made.append(direction)
      moments.append(new)
    return structure.unflatten(made), LowRankState(count, structure.unflatten(moments))

  return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


class _Started(NamedTuple):
  """The update of one moment before the basis of its subspace is known.

  Attributes:
    matrix, direction: view and unclipped update of the array.
    scale: float32 scalar, the factor that clips the direction to U.
    rounded: bfloat16 [*batch, a, b], the unclipped direction. It does not depend on the scale, so a GPU computes it and the sum
      of squares in one pass.
    rows, columns: P, Q.
    sketch: M Q [*batch, a, R], with the columns of Q scaled to length 1.
  """

  matrix: _Matrix
  direction: jax.Array
  scale: jax.Array
  rounded: jax.Array
  rows: jax.Array
  columns: jax.Array
  sketch: jax.Array

  @classmethod
  def of(
    cls,
    matrix: _Matrix,
    direction: jax.Array,
    scale: jax.Array,
    factors: Factors,
    b1: float,
    fallback: dict[int, jax.Array],
  ) -> "_Started":
    rows, columns = matrix.of_factors(factors)
    rounded = matrix.matrices(direction).astype(jnp.bfloat16)
    length = jnp.linalg.norm(columns, axis=-2, keepdims=True)
    # If nothing was kept yet, any column will do: a random one is used.
    towards = jnp.where(length > _TINY, columns / jnp.maximum(length, _TINY), fallback[columns.shape[-2]])
    kept = _exact("...ar,...rs->...as", rows, _exact("...br,...bs->...rs", columns, towards))
    sketch = b1 * kept + (1 - b1) * _over_largest(_product("...ab,...br->...ar", rounded, towards), scale)
    return cls(matrix, direction, scale, rounded, rows, columns, sketch)

  def finished(self, basis: jax.Array, b1: float, unbiased: jax.Array) -> tuple[jax.Array, Factors]:
    """Return (the update, the new factors) for the basis P' [*batch, a, R]."""
    new = _over_largest(_product("...ab,...ar->...br", self.rounded, basis), self.scale)
    kept = _exact("...br,...rs->...bs", self.columns, _exact("...ar,...as->...rs", self.rows, basis))
    columns = b1 * kept + (1 - b1) * new
    inside = (columns / unbiased - new) * _LARGEST
    change = _product("...ar,...br->...ab", basis, inside, "bfloat16")  # as large as the gradient, which has 16 bits too
    return self.direction * self.scale + self.matrix.array(change), self.matrix.factors(basis, columns)


def _random_columns(sizes: set[int], rank: int, count: jax.Array) -> dict[int, jax.Array]:
  """Return columns with a length of about 1 for each size b, [b, R]. Matrices of one size share them, so that a program draws
  them once: drawing is 300 operations."""
  key = jax.random.fold_in(jax.random.key(0), count)
  return {b: jax.random.normal(key, (b, rank)) * b**-0.5 for b in sorted(sizes)}


def _over_largest(product: jax.Array, scale: jax.Array) -> jax.Array:
  """Scale a product with the unclipped direction to a product with U divided by ``_LARGEST``; 0 if the scale is 0."""
  return jnp.where(scale > 0, product * (scale / _LARGEST), 0)


def _orthonormal(sketches: list[jax.Array]) -> list[jax.Array]:
  """Return for each [..., a, R] as many columns of the same span, orthonormal or shorter. The columns are multiplied by the
  inverse Cholesky factors of their Gram matrices, computed for all arrays at once."""
  lengths = [jnp.linalg.norm(y, axis=-2, keepdims=True) for y in sketches]
  units = [y / jnp.maximum(length, _TINY) for y, length in zip(sketches, lengths, strict=True)]
  grams = [_exact("...ar,...as->...rs", y, y) for y in units]
  if not grams:
    return []
  rank = grams[0].shape[-1]
  inverse = _inverse_of_factor(jnp.concatenate([g.reshape(-1, rank, rank) for g in grams]))
  made, begin = [], 0
  for unit, gram in zip(units, grams, strict=True):
    end = begin + math.prod(gram.shape[:-2])
    basis = _exact("...ar,...sr->...as", unit, inverse[begin:end].reshape(gram.shape))
    # Only a Gram matrix that is less accurate than float32 gives columns longer than 1.
    made.append(basis / jnp.maximum(jnp.linalg.norm(basis, axis=-2, keepdims=True), 1))
    begin = end
  return made


def _inverse_of_factor(gram: jax.Array) -> jax.Array:
  """Return L^-1 of G + ridge I = L L^T, [n, R, R], by elimination in [G + ridge I, I], which produces [L^T, L^-1].

  It does not use jax.lax.linalg: on a CPU two of its batched calls that run at the same time deadlock on each other's threads
  (jaxlib 0.10).
  """
  rank = gram.shape[-1]
  ridge, eye, at = _RIDGE * max(1, rank / 128), jnp.eye(rank), jnp.arange(rank)[:, None]
  both = jnp.concatenate([gram + ridge * eye, jnp.broadcast_to(eye, gram.shape)], axis=-1)

  def eliminate(j: jax.Array, both: jax.Array) -> jax.Array:
    row = jax.lax.dynamic_index_in_dim(both, j, axis=1)
    pivot = jax.lax.dynamic_index_in_dim(row, j, axis=2)
    # An exact Gram matrix has no pivot below the ridge. A GPU can compute one that is less accurate, whose columns are nearly
    # the same (an expert that got fewer tokens than R). Dividing by such a small or negative pivot makes each following step
    # square the error, up to infinity. So a column that is left with less than the ridge becomes 0 and starts again next step.
    scale = jnp.where(pivot > ridge / 2, jax.lax.rsqrt(jnp.maximum(pivot, ridge / 2)), 0)
    column = jax.lax.dynamic_index_in_dim(both, j, axis=2) * scale
    return jnp.where(at == j, row * scale, both - jnp.where(at > j, column, 0) * (row * scale))

  return jax.lax.fori_loop(0, rank, eliminate, both)[..., rank:]


def _exact(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """A product in float32."""
  return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)


def _product(equation: str, x: jax.Array, y: jax.Array, dtype: str = "float32") -> jax.Array:
  """A product of bfloat16 operands with float32 accumulation, returned in ``dtype``."""
  x, y = (operand.astype(jnp.bfloat16) for operand in (x, y))
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.dtype(dtype))


def factor_shardings(p: Param, sharding: NamedSharding) -> Factors:
  """Return the shardings of a parameter's factors: along the axes that they share with the parameter.

  Args:
    p: the parameter, as it is stored.
    sharding: the parameter's sharding.
  """
  matrix = _Matrix.of(p, p.shape, 0)
  assert matrix is not None
  named = (*sharding.spec, *(None,) * (len(p.shape) - len(sharding.spec)))
  batch, rows, columns = len(matrix.batch), len(matrix.rows), len(matrix.columns)
  axes = [named[i] for i in matrix.order]
  place = lambda own: NamedSharding(sharding.mesh, PartitionSpec(*axes[:batch], *own, None))
  found = place(axes[batch : batch + rows]), place(axes[batch + rows : batch + rows + columns])
  return Factors(*found)  # pyright: ignore[reportArgumentType]
