"""Moments stored in fewer bits than a rule computes them in.

An array is decoded, updated and encoded in pieces, so that a piece of it is in float32 at a time: the largest number of a block
has to be known before the first is encoded, and compilers keep what lies between the two in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxtext_like.layers.param import Param
from maxtext_like.layers.partition import free_mesh
from maxtext_like.layers.rules import free_axes
from maxtext_like.training.optimizers import dynamic8
from maxtext_like.training.optimizers.dynamic8 import Blocks
from maxtext_like.training.optimizers.feedback import MOST_OWED, End
from maxtext_like.training.rounding import Place

Tree = Any

PIECE = 1 << 25  # numbers that are updated at a time, where an array has more


@dataclass(frozen=True)
class Moment:
  """How a moment is stored.

  Attributes:
    field: of the state of the rule.
    dtype: "float32", "bfloat16", or "dynamic8", as which an array without a layout of blocks is float32.
    signed: there are numbers below 0.
  """

  field: str
  dtype: str
  signed: bool

  def most_owed(self, p: Param) -> float:
    """The largest debt, in steps, beside which the mean of gradients is still told from its neighbours (``feedback.py``)."""
    if self.dtype == "dynamic8" and dynamic8.layout(p):
      return 10.0
    return 100.0 if self.dtype == "bfloat16" else MOST_OWED

  def begun(self, p: Param, x: jax.Array) -> jax.Array | Blocks:
    """A moment of zeros, as ``stored`` would keep it.

    Args:
      p: the parameter.
      x: its moment, whole, of which the shape counts.
    """
    where = dynamic8.layout(p)
    if where and self.dtype == "dynamic8":
      return dynamic8.zeros(x.shape, where, signed=self.signed)
    return jnp.zeros(x.shape, "float32" if self.dtype == "dynamic8" else self.dtype)

  def stored(self, p: Param, x: jax.Array) -> jax.Array | Blocks:
    """A float32 array, in blocks, as it is kept."""
    where = dynamic8.layout(p)
    if where and self.dtype == "dynamic8":
      return dynamic8.encode(x, where, signed=self.signed)
    return _whole(p, x).astype("float32" if self.dtype == "dynamic8" else self.dtype)

  def loaded(self, p: Param, x: jax.Array | Blocks) -> jax.Array:
    """What ``stored`` kept, in float32 and in blocks."""
    where = dynamic8.layout(p)
    return dynamic8.decode(x, where, signed=self.signed) if where and isinstance(x, Blocks) else _in_blocks(p, x)


def _in_blocks(p: Param, x: Any) -> jax.Array:
  where = dynamic8.layout(p)
  return dynamic8.in_blocks(x.astype(jnp.float32), where) if where else x.astype(jnp.float32)


def _whole(p: Param, x: jax.Array) -> jax.Array:
  where = dynamic8.layout(p)
  return dynamic8.whole(x, where) if where else x


def kept(inner: optax.GradientTransformation, moments: Sequence[Moment], spec: Tree) -> optax.GradientTransformation:
  """A transformation, of each number by itself, whose moments are stored as said.

  Args:
    inner: takes no parameters and has moments in float32, zeros at first; its state is a named tuple.
    moments: all fields of its state that have the parameters' structure.
    spec: Params of the leaves (None elsewhere).
  """

  def init(params: Tree) -> Any:
    state: Any = inner.init(params)
    begun = lambda m: jax.tree.map(m.begun, spec, getattr(state, m.field))
    return state._replace(**{m.field: begun(m) for m in moments})

  def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
    del params

    def one(p, place, advance, grad, *stored):
      del place
      direction, after = advance(grad, stored)
      return _whole(p, direction), *(m.stored(p, getattr(after, m.field)) for m in moments)

    (direction,), state = _updated(inner, moments, spec, [one] * len(jax.tree.leaves(spec)), (grads,), state)
    return direction, state

  return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def settled(
  inner: optax.GradientTransformation,
  moments: Sequence[Moment],
  spec: Tree,
  grads: Tree,
  state: Any,
  params: Tree,
  ends: Sequence[End],
  owe: Callable[[Any, jax.Array], Any],
) -> tuple[Tree, Tree, Any]:
  """An update of what ``kept`` gives, to its end: (the direction, parameters as they are stored, the next state), of which
  the first moment owes what rounding took.

  Args:
    inner, moments, spec: as there; the first of the moments owes.
    grads, state, params: as of ``update``.
    ends: of the leaves, in order.
    owe: a state of float32 moments and what is owed -> that state with it.
  """

  def with_end(end: End):
    def one(p, place, advance, grad, param, *stored):
      direction, after = advance(grad, stored)
      ended = end(param, _whole(p, direction), place, moments[0].most_owed(p))
      after = owe(after, _in_blocks(p, ended.owed))
      return ended.direction, ended.stored, *(m.stored(p, getattr(after, m.field)) for m in moments)

    return one

  (direction, stored), state = _updated(inner, moments, spec, [with_end(end) for end in ends], (grads, params), state)
  return direction, stored, state


def _updated(inner, moments, spec, ones, given: tuple[Tree, ...], state) -> tuple[list[Tree], Any]:
  """(as many trees as are given, the next state), array by array.

  Args:
    inner, moments, spec: of ``kept``.
    ones: for each leaf: (its Param, the place of a piece, advance, pieces of the given arrays and of the stored moments) -> as
      many pieces; ``advance`` takes a piece of the gradient and of the stored moments to the direction and the state behind
      it, in float32 and in blocks.
    given: trees of the parameters' structure, gradients first.
    state: with moments as they are stored.
  """
  structure, fields = jax.tree.structure(spec), [m.field for m in moments]

  def bound(p, one):
    def advance(grad, stored):
      loaded = {m.field: m.loaded(p, x) for m, x in zip(moments, stored, strict=True)}
      return inner.update(_in_blocks(p, grad), state._replace(**loaded))

    return lambda p, place, *arrays: one(p, place, advance, *arrays)

  trees = (structure.flatten_up_to(tree) for tree in (*given, *(getattr(state, field) for field in fields)))
  leaves = zip(jax.tree.leaves(spec), ones, *trees, strict=True)
  found = [_in_pieces(bound(p, one), p, Place(), *arrays) for p, one, *arrays in leaves]
  # By number: of a part that is frozen whole nothing is found.
  out = [structure.unflatten([of[i] for of in found]) for i in range(len(given) + len(fields))]
  _, counters = inner.update({}, state._replace(**{field: {} for field in fields}))
  return out[: len(given)], counters._replace(**dict(zip(fields, out[len(given) :], strict=True)))


def _in_pieces(one: Callable[..., tuple], p: Param, place: Place, *arrays: jax.Array | Blocks) -> tuple:
  """``one(p, place, *arrays)``, for one piece after the other where they are large and the pieces lie on one device each."""
  grad = arrays[0]
  assert isinstance(grad, jax.Array)
  if grad.size <= PIECE:
    return one(p, place, *arrays)
  if p.axes[0] == "layers" and grad.ndim == len(p.shape):
    rows = jnp.arange(grad.shape[0])
    return jax.lax.map(lambda x: _in_pieces(one, p, place._replace(row=x[0]), *x[1]), (rows, arrays))
  mesh, where = free_mesh(), dynamic8.layout(p)
  lead = grad.shape[0] // (where.size if where and where.axis == -grad.ndim else 1)
  pieces = min((n for n in range(1, lead + 1) if lead % n == 0 and grad.size <= n * PIECE), default=lead)
  if mesh is not None and free_axes(mesh):
    return one(p, place, *arrays)
  cut = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), arrays)
  starts = jnp.arange(pieces, dtype=jnp.uint32) * jnp.uint32(grad.size // pieces)
  found = jax.lax.map(lambda x: one(p, place._replace(start=x[0]), *x[1]), (starts, cut))
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
