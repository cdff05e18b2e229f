"""The optimizer: AdamW, Adafactor, Lion or SGD from optax, without the learning rate, which the step multiplies itself."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxtext_like.config.schema import TrainingConfig
from maxtext_like.layers.param import Param

Tree = Any


def decays(p: Param) -> bool:
  """Whether weight decay acts on an array: on matrices, not on norms, scalars and biases.

  Decided by the number of dimensions of one layer's array: the axis of stacked layers does not make a norm a matrix.
  """
  return len([axis for axis in p.axes if axis != "layers"]) >= 2


def make_optimizer(training: TrainingConfig, spec: Tree, weight_dtype: str) -> optax.GradientTransformation:
  """The direction of descent for the trainable arrays; the step adds ``-learning_rate`` times what comes out.

  All arithmetic is in float32, whatever the parameters and gradients are stored in; the first moment alone is stored in
  ``mu_dtype``. Weight decay is decoupled from the gradient for every optimizer: ``adam_weight_decay`` times the
  parameter is added to the direction, so it is scaled by the learning rate.

    adamw      Loshchilov and Hutter 2019
    adafactor  Shazeer and Stern 2018: factored second moment, update clipped to an rms of 1, no momentum, and no
               scaling by the parameter's size, so that a learning rate means what it means for the others. An array of
               stacked layers is factored over its two largest dimensions and clipped as one.
    lion       Chen et al. 2023
    sgd        heavy-ball momentum

  Args:
    training: the ``training:`` section.
    spec: Params of the trainable leaves (None elsewhere).
    weight_dtype: of the stored parameters: the default of ``mu_dtype``.
  """
  mu_dtype = jnp.dtype(training.mu_dtype or weight_dtype)
  if training.opt_type == "adamw":
    direction = optax.scale_by_adam(training.adam_b1, training.adam_b2, training.adam_eps, mu_dtype=mu_dtype)
  elif training.opt_type == "adafactor":
    direction = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
  elif training.opt_type == "lion":
    direction = optax.scale_by_lion(training.adam_b1, training.adam_b2, mu_dtype=mu_dtype)
  elif training.sgd_momentum:
    direction = optax.trace(training.sgd_momentum, accumulator_dtype=mu_dtype)
  else:
    direction = optax.identity()
  chain = [direction]
  if training.adam_weight_decay:
    chain.append(optax.add_decayed_weights(training.adam_weight_decay, mask=jax.tree.map(decays, spec)))
  return _in_float32(optax.chain(*chain))


def usually_proved(training: TrainingConfig, weight_dtype: str) -> bool:
  """Whether ``make_certainly_finite`` has a proof for every ordinary update.

  Adafactor's has only small gradients, and float16's range is not far from that of ordinary parameters.
  """
  return training.opt_type != "adafactor" and "float16" not in (weight_dtype, training.mu_dtype)


Certainly = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def make_certainly_finite(training: TrainingConfig, weight_dtype: str) -> Certainly:
  """Whether an update is finite for certain, from the largest magnitudes of what it is made of, before it is computed.

  The function takes float32 scalars: the largest |gradient|, the largest number of the optimizer's state, the largest
  |parameter|, and the learning rate; infinite or NaN where nothing is known. It returns a bool scalar: nothing that
  ``make_optimizer``'s update of these and the step's subtraction compute or store leaves its dtype; and what then no number
  of the optimizer's next state exceeds, but for roundings. False means that the update may still be finite. The second moment
  is taken to be no less than 0, as every finite update leaves it.

  So a state that was looked at once is known to be finite as long as the proof holds, without reading it again: moments are
  means of what they were and of what came, and roundings of so many steps stay below the quarter that is left for them.

  Args:
    training: the ``training:`` section.
    weight_dtype: of the stored parameters.
  """
  b1, b2, eps = (np.float32(x) for x in (training.adam_b1, training.adam_b2, training.adam_eps))
  # A quarter of what a dtype holds, for roundings.
  most, most_stored = (float(jnp.finfo(dtype).max) / 4 for dtype in (jnp.float32, weight_dtype))
  most_state = float(jnp.finfo(training.mu_dtype or weight_dtype).max) / 4

  def certainly(gradient, state, parameter, rate):
    first = second = computed = kept = gradient
    if training.opt_type == "adamw":
      first, second = jnp.maximum(state, gradient), jnp.maximum(state, jnp.square(gradient))
      direction = first / (1 - b1) / eps  # without its bias, over the smallest denominator
      computed, kept = jnp.maximum(first / (1 - b1), second / (1 - b2)), second
    elif training.opt_type == "adafactor":
      # Second moments are at least 1e-30 * (1 - decay), which is 6e-8 or 0 (they stay as they are), so neither factor is
      # above 1e19 where none is above 4. Clipping leaves at most the root of an array's size.
      direction = jnp.where((gradient <= 1) & (state <= 4), 1e6, jnp.inf)
      kept = jnp.maximum(state, jnp.square(gradient) + 1e-30)
    elif training.opt_type == "lion":
      first, direction = jnp.maximum(state, gradient), jnp.float32(1)
    else:
      first = direction = gradient + np.float32(training.sgd_momentum) * state
    moved = parameter + rate * (direction + np.float32(training.adam_weight_decay) * parameter)
    everything = functools.reduce(jnp.maximum, (first, second, computed, direction, moved))
    return (everything < most) & (first < most_state) & (moved < most_stored), jnp.maximum(first, kept)

  return certainly


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """The transformation on float32 copies: optax makes the second moment in the parameters' dtype, where it rounds away."""

  def cast(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

  def init(params):
    return inner.init(cast(params))

  def update(grads, state, params=None):
    return inner.update(cast(grads), state, cast(params))

  return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def state_shardings(state: Tree, params: Tree, shardings: Tree, replicated: Any) -> Tree:
  """Shardings of an optimizer state: a moment lies as its parameter does, a factored moment along what it kept.

  Args:
    state: ``jax.eval_shape`` of the optimizer's init.
    params: shapes of the trainable parameters (None elsewhere).
    shardings: NamedShardings of the same structure.
    replicated: sharding of everything else (counters).
  """
  inner = jax.tree.structure(params)
  shapes, places = jax.tree.leaves(params), jax.tree.leaves(shardings)

  def place(node):
    if jax.tree.structure(node) != inner:
      return jax.tree.map(lambda _: replicated, node)
    found = [_match(x, p, s, replicated) for x, p, s in zip(jax.tree.leaves(node), shapes, places, strict=True)]
    return jax.tree.unflatten(inner, found)

  # A moment is a tree of the parameters' structure somewhere inside the state's named tuples. A lone parameter would
  # make every leaf such a tree; _match then goes by shape.
  return jax.tree.map(place, state, is_leaf=lambda node: jax.tree.structure(node) == inner)


def _match(leaf, parameter, sharding, replicated):
  if leaf.shape == parameter.shape:
    return sharding
  spec = (*sharding.spec, *(None,) * (len(parameter.shape) - len(sharding.spec)))
  # A factored moment misses one dimension: the one that, left out, gives its shape.
  for drop in range(len(parameter.shape)):
    kept = [d for d in range(len(parameter.shape)) if d != drop]
    if leaf.shape == tuple(parameter.shape[d] for d in kept) and math.prod(leaf.shape) > 1:
      return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*(spec[d] for d in kept)))
  return replicated
