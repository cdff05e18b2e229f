"""A first moment of low rank: momentum where the gradients of many steps point, for next to no memory.

What needs momentum are the few directions in which gradients are large and the loss is curved: without it steps along them
overshoot (docs/results/low-memory-training.md has loss curves). So of the mean of a matrix's directions only its share in a
subspace of R dimensions is kept, as two factors, and a direction goes on with that mean inside the
subspace, and as it is outside of it:

  M = b1 P Q^T + (1 - b1) U          the mean, of what was kept of it and the direction U of this step
  P' = orthonormal columns of M Q    one step of subspace iteration, which begins where the last one ended
  Q' = M^T P'
  U - P' P'^T U + P' Q'^T / (1 - b1^t)

With P' of all dimensions this is the whole first moment, without its bias. Subspace iteration as in PowerSGD (Vogels et al.
2019, arXiv:1905.13727), which compresses what is sent between devices by it.

Arrays of which no axis is summed over (norms, biases, positions, B of an adapter), and matrices that have no more numbers than
their factors would, keep the moment whole.
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

# Directions are kept as shares of this, the most that a number of an array with an rms of at most 1 can be if the array has at
# most 1e12: so no number that is kept exceeds 1, whatever one matrix of a stack has of it.
_LARGEST = 1e6
# Added to the squared lengths, which are 1, of the columns that are made orthonormal, for each 128 of them: far above the
# roundings of float32 sums and of R columns that are alike, so that there is a Cholesky factor. A column that depends on the
# others but for so little comes out short, and gets its length back in the next steps, which begin with equal lengths.
_RIDGE = 1e-4
_TINY = 1e-18  # a column whose length is less counts as 0: squares of shorter ones are not ordinary float32 numbers


class Factors(NamedTuple):
  """The kept share of a moment, float32. Leading axes are those of a stack's rows and of experts.

  Attributes:
    rows: P [..., *summed, R], no number above 1.
    columns: Q [..., *kept, R], of directions over ``_LARGEST``, likewise.
  """

  rows: jax.Array
  columns: jax.Array


class LowRankState(NamedTuple):
  """Of ``low_rank_moment``: the steps so far, and of each parameter its factors, or the moment of directions over
  ``_LARGEST``."""

  count: jax.Array
  moment: Tree


class _Matrix(NamedTuple):
  """How an array is a batch of matrices.

  Attributes:
    order: its axes: those of the batch, those of a matrix's rows, and of its columns.
    batch, rows, columns: sizes of these axes.
  """

  order: tuple[int, ...]
  batch: tuple[int, ...]
  rows: tuple[int, ...]
  columns: tuple[int, ...]

  @classmethod
  def of(cls, p: Param, shape: tuple[int, ...], rank: int) -> "_Matrix | None":
    """None: its moment is kept whole.

    Args:
      p: the parameter.
      shape: of all its layers, or of one.
      rank: of factors.
    """
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
    """[*batch, a, b]."""
    return x.transpose(self.order).reshape(*self.batch, math.prod(self.rows), math.prod(self.columns))

  def array(self, x: jax.Array) -> jax.Array:
    """What ``matrices`` is of."""
    back = sorted(range(len(self.order)), key=self.order.__getitem__)
    return x.reshape(*self.batch, *self.rows, *self.columns).transpose(back)

  def factors(self, rows: jax.Array, columns: jax.Array) -> Factors:
    """As they are kept, of [*batch, a, R] and [*batch, b, R]."""
    named = (rows, self.rows), (columns, self.columns)
    return Factors(*(x.reshape(*self.batch, *sizes, x.shape[-1]) for x, sizes in named))

  def of_factors(self, factors: Factors) -> tuple[jax.Array, jax.Array]:
    """What ``factors`` is of."""
    return tuple(x.reshape(*self.batch, -1, x.shape[-1]) for x in factors)  # pyright: ignore[reportReturnType]


def low_rank_moment(b1: float, rank: int, spec: Tree) -> optax.GradientTransformation:
  """Directions, float32, to what the momentum of low rank makes of them once they are clipped to an rms of 1 (as
  ``optax.clip_by_block_rms`` does).

  Products with a direction round it to bfloat16, as accelerators do with float32 operands, and sum in float32; what momentum
  adds to a direction is rounded to bfloat16 too.

  Args:
    b1: decay of the mean.
    rank: R, above 0.
    spec: Params of the leaves (None elsewhere).
  """
  leaves, structure = jax.tree.flatten(spec)

  def init(params: Tree) -> LowRankState:
    def begun(p: Param, x: jax.Array) -> Factors | jax.Array:
      m = _Matrix.of(p, x.shape, rank)
      zeros = lambda sizes: jnp.zeros((*m.batch, *sizes, rank), jnp.float32)  # pyright: ignore[reportOptionalMemberAccess]
      return jnp.zeros(x.shape, jnp.float32) if m is None else Factors(zeros(m.rows), zeros(m.columns))

    return LowRankState(jnp.zeros((), jnp.int32), jax.tree.map(begun, spec, params))

  def update(directions: Tree, state: LowRankState, params: Tree = None) -> tuple[Tree, LowRankState]:
    del params
    count = state.count + 1
    # 1 - b1^t, which is never 0.
    unbiased = -jnp.expm1(count.astype(jnp.float32) * (math.log(b1) if b1 else -math.inf))
    made, moments = [], []
    given = structure.flatten_up_to(directions), structure.flatten_up_to(state.moment)
    matrices = [_Matrix.of(p, x.shape, rank) for p, x in zip(leaves, given[0], strict=True)]
    # 0 where squares leave float32: no momentum is made of such a direction.
    scales = [1 / jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(x))), 1) for x in given[0]]
    each = zip(matrices, given[0], scales, given[1], strict=True)
    begun = [None if m is None else _Begun.of(m, x, scale, old, b1, count) for m, x, scale, old in each]
    # Single matrices together, as a call has one of a layer's to wait for; a stack has enough of its own, and what its update
    # reads would lie in memory until the last of all stacks has a basis.
    single = [found for found in begun if found is not None and not found.matrix.batch]
    together = iter(_orthonormal([found.sketch for found in single]))
    for found, u, scale, old in zip(begun, given[0], scales, given[1], strict=True):
      if found is None:
        new = b1 * old + (1 - b1) * (u * scale / _LARGEST)
        direction = new * (_LARGEST / unbiased)
      else:
        basis = _orthonormal([found.sketch])[0] if found.matrix.batch else next(together)
        direction, new = found.finished(basis, b1, unbiased)
      made.append(direction)
      moments.append(new)
    return structure.unflatten(made), LowRankState(count, structure.unflatten(moments))

  return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


class _Begun(NamedTuple):
  """The update of a moment before the basis of its subspace is there.

  Attributes:
    matrix, direction: of the array, not yet clipped.
    scale: float32 scalar, U over that.
    rounded: bfloat16 [*batch, a, b], the direction. It does not wait for the scale, so that a GPU makes it and the sum of
      squares in one pass.
    rows, columns: P, Q.
    sketch: M Q [*batch, a, R], columns of Q of length 1.
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
    cls, matrix: _Matrix, direction: jax.Array, scale: jax.Array, factors: Factors, b1: float, count: jax.Array
  ) -> "_Begun":
    rows, columns = matrix.of_factors(factors)
    rounded = matrix.matrices(direction).astype(jnp.bfloat16)
    length = jnp.linalg.norm(columns, axis=-2, keepdims=True)
    # Where nothing was kept yet, any other column does.
    other = jax.random.normal(jax.random.fold_in(jax.random.key(0), count), columns.shape[-2:]) * columns.shape[-2] ** -0.5
    towards = jnp.where(length > _TINY, columns / jnp.maximum(length, _TINY), other)
    kept = _exact("...ar,...rs->...as", rows, _exact("...br,...bs->...rs", columns, towards))
    sketch = b1 * kept + (1 - b1) * _over_largest(_product("...ab,...br->...ar", rounded, towards), scale)
    return cls(matrix, direction, scale, rounded, rows, columns, sketch)

  def finished(self, basis: jax.Array, b1: float, unbiased: jax.Array) -> tuple[jax.Array, Factors]:
    """(The direction, the kept share), with P' [*batch, a, R]."""
    new = _over_largest(_product("...ab,...ar->...br", self.rounded, basis), self.scale)
    kept = _exact("...br,...rs->...bs", self.columns, _exact("...ar,...as->...rs", self.rows, basis))
    columns = b1 * kept + (1 - b1) * new
    inside = (columns / unbiased - new) * _LARGEST
    change = _product("...ar,...br->...ab", basis, inside, "bfloat16")  # as large as the gradient, which has 16 bits too
    return self.direction * self.scale + self.matrix.array(change), self.matrix.factors(basis, columns)


def _over_largest(product: jax.Array, scale: jax.Array) -> jax.Array:
  """A product with a direction as it is with U over ``_LARGEST``; 0 where the scale is."""
  return jnp.where(scale > 0, product * (scale / _LARGEST), 0)


def _orthonormal(sketches: list[jax.Array]) -> list[jax.Array]:
  """Of each [..., a, R] as many columns of the same span, orthonormal or shorter: by the Cholesky factors of their Gram
  matrices, all of them at once."""
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
  """L^-1 of G + ridge I = L L^T, [n, R, R], by elimination in [G + ridge I, I], which leaves [L^T, L^-1].

  Not by jax.lax.linalg: on a CPU two of its batched calls at a time wait for each other's threads for ever (jaxlib 0.10).
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
  """A product of bfloat16 operands with float32 sums, which are handed on in this dtype."""
  x, y = (operand.astype(jnp.bfloat16) for operand in (x, y))
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.dtype(dtype))


def factor_shardings(p: Param, sharding: NamedSharding) -> Factors:
  """Shardings of a parameter's factors: along the axes that they have in common with it.

  Args:
    p: the parameter, as it is stored.
    sharding: its own.
  """
  matrix = _Matrix.of(p, p.shape, 0)
  assert matrix is not None
  named = (*sharding.spec, *(None,) * (len(p.shape) - len(sharding.spec)))
  batch, rows, columns = len(matrix.batch), len(matrix.rows), len(matrix.columns)
  axes = [named[i] for i in matrix.order]
  place = lambda own: NamedSharding(sharding.mesh, PartitionSpec(*axes[:batch], *own, None))
  found = place(axes[batch : batch + rows]), place(axes[batch + rows : batch + rows + columns])
  return Factors(*found)  # pyright: ignore[reportArgumentType]
