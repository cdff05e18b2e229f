"""Moments stored in fewer bits than a rule computes them in.

An array is decoded, updated and encoded in pieces, so that only one piece at a time is in float32. The largest number of a
block must be known before the first one is encoded, and compilers keep everything between the two in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxtext_like.layers.param import Param
from maxtext_like.layers.sharding_rules import free_axes, free_mesh
from maxtext_like.training.optimizers import dynamic8
from maxtext_like.training.optimizers.dynamic8 import Blocks

Tree = Any

PIECE = 1 << 25  # elements of a larger array that are updated at a time


@dataclass(frozen=True)
class Moment:
  """How a moment is stored.

  Attributes:
    field: name of the moment in the state of the rule.
    dtype: "float32", "bfloat16" or "dynamic8". With "dynamic8" an array without a block layout is stored as float32.
    signed: the moment may be negative.
  """

  field: str
  dtype: str
  signed: bool

  def zeros(self, p: Param, x: jax.Array) -> jax.Array | Blocks:
    """Return a moment of zeros in its stored form.

    Args:
      p: the parameter.
      x: the complete moment, of which only the shape is used.
    """
    where = dynamic8.layout(p)
    if where and self.dtype == "dynamic8":
      return dynamic8.zeros(x.shape, where, signed=self.signed)
    return jnp.zeros(x.shape, "float32" if self.dtype == "dynamic8" else self.dtype)

  def encode(self, p: Param, x: jax.Array) -> jax.Array | Blocks:
    """Encode a float32 array, which is in blocks, to its stored form."""
    where = dynamic8.layout(p)
    if where and self.dtype == "dynamic8":
      return dynamic8.encode(x, where, signed=self.signed)
    return _from_blocks(p, x).astype("float32" if self.dtype == "dynamic8" else self.dtype)

  def decode(self, p: Param, x: jax.Array | Blocks) -> jax.Array:
    """Decode the stored form to float32 in blocks."""
    where = dynamic8.layout(p)
    return dynamic8.decode(x, where, signed=self.signed) if where and isinstance(x, Blocks) else _in_blocks(p, x)


def _in_blocks(p: Param, x: Any) -> jax.Array:
  where = dynamic8.layout(p)
  return dynamic8.in_blocks(x.astype(jnp.float32), where) if where else x.astype(jnp.float32)


def _from_blocks(p: Param, x: jax.Array) -> jax.Array:
  where = dynamic8.layout(p)
  return dynamic8.from_blocks(x, where) if where else x


def with_stored_moments(
  inner: optax.GradientTransformation, moments: Sequence[Moment], spec: Tree
) -> optax.GradientTransformation:
  """Wrap an elementwise transformation so that its moments are stored in the given form.

  Args:
    inner: takes no parameters, and its moments are float32 and start at zero. Its state is a named tuple.
    moments: all fields of its state that have the parameters' structure.
    spec: Params of the leaves (None elsewhere).
  """
  structure = jax.tree.structure(spec)
  fields = [m.field for m in moments]

  def init(params: Tree) -> Any:
    state: Any = inner.init(params)
    zeros = lambda m: jax.tree.map(m.zeros, spec, getattr(state, m.field))
    return state._replace(**{m.field: zeros(m) for m in moments})

  def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
    del params
    advance: Any = inner.update

    def one(p, grad, *stored):
      # Decode, update, and encode again, all in blocks.
      decoded = {m.field: m.decode(p, x) for m, x in zip(moments, stored, strict=True)}
      direction, after = advance(_in_blocks(p, grad), state._replace(**decoded))
      return _from_blocks(p, direction), *(m.encode(p, getattr(after, m.field)) for m in moments)

    # Each leaf is updated separately, in pieces if it is large.
    trees = (structure.flatten_up_to(tree) for tree in (grads, *(getattr(state, field) for field in fields)))
    found = [_in_pieces(one, p, *arrays) for p, *arrays in zip(jax.tree.leaves(spec), *trees, strict=True)]
    # Indexed by number, because a completely frozen part has no results.
    direction, *after = (structure.unflatten([of[i] for of in found]) for i in range(1 + len(fields)))
    # The counters advance once, independently of the leaves.
    _, counters = advance({}, state._replace(**{field: {} for field in fields}))
    return direction, counters._replace(**dict(zip(fields, after, strict=True)))

  return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _in_pieces(one: Callable[..., tuple], p: Param, *arrays: jax.Array | Blocks) -> tuple:
  """Call ``one(p, *arrays)`` piece by piece if the arrays are large and each piece is on one device."""
  grad = arrays[0]
  assert isinstance(grad, jax.Array)
  # A stack is processed row by row.
  if grad.size > PIECE and p.axes[0] == "layers" and grad.ndim == len(p.shape):
    return jax.lax.map(lambda row: _in_pieces(one, p, *row), arrays)
  rows, every = piece_rows(p, grad), grad.shape[0]
  if rows == every:
    return one(p, *arrays)
  # All complete pieces are processed in a loop; the rest is one shorter piece.
  count = every // rows
  split = lambda x: x.shape[0] * rows // every * count
  cut = jax.tree.map(lambda x: x[: split(x)].reshape(count, -1, *x.shape[1:]), arrays)
  found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(lambda piece: one(p, *piece), cut))
  if every == count * rows:
    return found
  return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), found, one(p, *jax.tree.map(lambda x: x[split(x) :], arrays)))


def piece_rows(p: Param, x: jax.Array) -> int:
  """Return how many rows of an array's first axis are updated at a time: all of them, or a piece that holds complete blocks of
  its moments. The last piece may be shorter.

  Args:
    p: the parameter.
    x: one layer's array of it, of which only the shape is used.
  """
  mesh, where = free_mesh(), dynamic8.layout(p)
  # Only arrays larger than PIECE on unsharded axes are split.
  least = -(-x.size // PIECE)
  if least <= 1 or (mesh is not None and free_axes(mesh)):
    return x.shape[0]
  # A piece must not split a block. Pieces of equal size are preferred.
  block = where.size if where and where.axis == -x.ndim else 1
  lead = x.shape[0] // block
  # if found, all pieces have the same size and the last one is not shorter
  alike = next((n for n in range(least, min(4 * least, lead) + 1) if lead % n == 0), None)
  return block * (lead // alike if alike else -(-lead // least))
