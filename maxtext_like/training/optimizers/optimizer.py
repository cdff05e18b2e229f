"""The optimizer around an update rule: weight decay, float32 arithmetic, the proof that an update is finite, and shardings."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.param import Param
from maxtext_like.models.row_norms import largest_clipped
from maxtext_like.training.optimizers.dynamic8 import Blocks, scale_sharding
from maxtext_like.training.optimizers.low_rank_moment import Factors, factor_shardings
from maxtext_like.training.optimizers.moments import Moment, with_stored_moments
from maxtext_like.training.optimizers.registry import make_rule
from maxtext_like.training.optimizers.rule import Rule

Tree = Any


def decays(p: Param) -> bool:
  """Return True if weight decay applies to an array: to matrices, not to norms, scalars and biases.

  The number of dimensions of one layer's array decides: the axis of stacked layers does not make a norm a matrix.
  """
  return len([axis for axis in p.axes if axis != "layers"]) >= 2


@dataclass(frozen=True, eq=False)
class Optimizer:
  """The update direction of the trainable arrays; the step adds ``-learning_rate`` times the direction.

  All arithmetic is in float32, whatever the dtypes of parameters, gradients and moments. Weight decay is decoupled from the
  gradient for every rule: ``weight_decay`` times the parameter is added to the direction, so it is scaled by the learning rate.

  Attributes:
    rule: the update rule.
    weight_decay: 0 for none.
    mu_dtype, nu_dtype: dtypes in which the first and the second moment are stored; "dynamic8" is explained in ``dynamic8.py``.
    weight_dtype: dtype of the stored parameters.
    spec: Params of the trainable leaves (None elsewhere).
  """

  rule: Rule
  weight_decay: float
  mu_dtype: str
  nu_dtype: str
  weight_dtype: str
  spec: Tree

  @property
  def in_pieces(self) -> bool:
    """True if moments are stored in fewer bits than optax stores them in, so that large arrays are updated piece by piece."""
    return self.nu_dtype != "float32" or self.mu_dtype == "dynamic8"

  @functools.cached_property
  def _transformation(self) -> optax.GradientTransformation:
    rule = self.rule
    direction = rule.direction(jnp.dtype("float32" if self.in_pieces else self.mu_dtype), self.spec)
    # Narrow moments are encoded around the rule, which computes in float32.
    if self.in_pieces:
      first = [] if rule.first is None else [Moment(rule.first, self.mu_dtype, signed=True)]
      second = [] if rule.second is None else [Moment(rule.second, self.nu_dtype, signed=False)]
      direction = with_stored_moments(direction, first + second, self.spec)
    chain = [direction]
    if self.weight_decay:
      chain.append(optax.add_decayed_weights(self.weight_decay, mask=jax.tree.map(decays, self.spec)))
    return _in_float32(optax.chain(*chain))

  def init(self, params: Tree) -> Tree:
    """Return the initial state for these parameters."""
    return self._transformation.init(params)

  def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
    """Return (the direction in float32, the next state)."""
    return self._transformation.update(grads, state, params)

  def usually_proved(self, clip: float) -> bool:
    """Return True if ``certainly_finite`` can prove every ordinary update finite for gradients whose norm is clipped to
    ``clip`` (0: not clipped). It cannot for float16, whose range is close to ordinary parameters, and some rules only have a
    bound for small gradients."""
    largest = largest_clipped(clip) if clip else math.inf
    return largest <= self.rule.bounded_to and "float16" not in (self.weight_dtype, self.mu_dtype)

  def certainly_finite(
    self, gradient: jax.Array, state: jax.Array, parameter: jax.Array, rate: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Prove from the largest magnitudes of its inputs that an update is finite, before it is computed.

    A state that was inspected once is known to be finite as long as the proof holds, without reading it again: moments are
    averages of old values and new inputs. A quarter of the range is reserved for accumulated rounding errors.

    Args:
      gradient: float32 scalar, the largest |gradient|. This and the next two are infinite or NaN if nothing is known.
      state: the largest element of the optimizer's state.
      parameter: the largest |parameter|.
      rate: the learning rate.

    Returns:
      A bool scalar: True if no value that ``update`` and the step's subtraction compute or store overflows its dtype. False
        means that the update may still be finite. Also a bound on the elements of the optimizer's next state, apart from
        rounding.
    """
    # A quarter of each dtype's range leaves room for rounding.
    most, most_stored, most_moment = (
      float(jnp.finfo(dtype).max) / 4 for dtype in (jnp.float32, self.weight_dtype, _range_of(self.mu_dtype))
    )
    # Bound the parameters after the step, including weight decay, and all intermediate values.
    bound = self.rule.bound(gradient, state)
    moved = parameter + rate * (bound.direction + np.float32(self.weight_decay) * parameter)
    everything = functools.reduce(jnp.maximum, (*bound, moved))
    return (everything < most) & (bound.moment < most_moment) & (moved < most_stored), bound.state

  def state_shardings(self, state: Tree, params: Tree, shardings: Tree, replicated: Any) -> Tree:
    """Return the shardings of a state. A moment is sharded as its parameter; factored moments and factors are sharded along the
    axes that they keep.

    Args:
      state: ``jax.eval_shape`` of ``init``.
      params: shapes of the trainable parameters (None elsewhere).
      shardings: NamedShardings of the same structure.
      replicated: sharding of everything else (counters).
    """
    # Moments have the structure of the parameters; stored blocks and factors count as one leaf.
    inner = jax.tree.structure(params)
    shapes, places, declared = jax.tree.leaves(params), jax.tree.leaves(shardings), jax.tree.leaves(self.spec)
    is_stored = lambda node: isinstance(node, (Blocks, Factors))
    is_moment = lambda node: jax.tree.structure(node, is_leaf=is_stored) == inner

    def place(node):
      if not is_moment(node):
        return jax.tree.map(lambda _: replicated, node)
      moments = jax.tree.leaves(node, is_leaf=is_stored)
      found = [_match(x, p, d, s, replicated) for x, p, d, s in zip(moments, shapes, declared, places, strict=True)]
      return jax.tree.unflatten(inner, found)

    # A moment is a tree with the parameters' structure somewhere inside the state's named tuples. With a single parameter every
    # leaf would be such a tree; _match then decides by shape.
    return jax.tree.map(place, state, is_leaf=is_moment)


def make_optimizer(training: TrainingConfig, spec: Tree, weight_dtype: str) -> Optimizer:
  """Build the optimizer of a configuration.

  Args:
    training: the ``training:`` section.
    spec: Params of the trainable leaves (None elsewhere).
    weight_dtype: dtype of the stored parameters, the default of ``mu_dtype``.

  Raises:
    UserError: a dtype is set for a moment that the rule does not have.
  """
  # A dtype for a moment that the rule does not have would have no effect.
  t, rule = training, make_rule(training)
  for key, value, usual, moment in (
    ("mu_dtype", t.mu_dtype, None, rule.first),
    ("nu_dtype", t.nu_dtype, "float32", rule.second),
  ):
    if moment is None and value != usual:
      raise UserError(
        f"{key} = {value} has no effect: opt_type={t.opt_type} has no such moment with these settings\n  fix: remove {key}"
      )
  return Optimizer(rule, t.adam_weight_decay, t.mu_dtype or weight_dtype, t.nu_dtype, weight_dtype, spec)


def _range_of(dtype: str) -> str:
  """Return a dtype with the same range."""
  return "float32" if dtype == "dynamic8" else dtype


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """Apply a transformation to float32 copies. optax would create the second moment in the parameters' dtype, which loses it to
  rounding."""

  def cast(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

  def init(params):
    return inner.init(cast(params))

  def update(grads, state, params=None):
    return inner.update(cast(grads), state, cast(params))

  return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _match(leaf, parameter, declared, sharding, replicated):
  if isinstance(leaf, Factors):
    return factor_shardings(declared, sharding)
  if isinstance(leaf, Blocks):
    return jax.tree.unflatten(jax.tree.structure(leaf), (sharding, scale_sharding(sharding, leaf.scale.shape)))
  if leaf.shape == parameter.shape:
    return sharding
  spec = (*sharding.spec, *(None,) * (len(parameter.shape) - len(sharding.spec)))
  # A factored moment lacks one dimension. Find the dimension whose removal gives its shape.
  for drop in range(len(parameter.shape)):
    kept = [d for d in range(len(parameter.shape)) if d != drop]
    if leaf.shape == tuple(parameter.shape[d] for d in kept) and math.prod(leaf.shape) > 1:
      return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*(spec[d] for d in kept)))
  return replicated
