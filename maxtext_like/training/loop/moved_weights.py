"""Warns if one step changes few of the 16-bit weights. Measured on a sample, without compiling another step.

A bfloat16 weight has 8 bits of precision: an update below half of its spacing rounds to nothing. At a small learning rate most
weights then never change and the loss barely falls. ``update_survival_every`` measures this exactly and by layer, at a cost in
every step; this module compares a few thousand weights before and after one step and warns once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.training.optimizers.optimizer import decays
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import State
from maxtext_like.training.step.update_retention import LOW

_EACH_AXIS = 16  # weights sampled along each axis of an array, up to twice as many
_SPARSE = {"vocab", "expert"}  # axes of arrays of which a batch may use only a part; the rest has no gradient


class MovedWeights:
  """Measures the step with the highest learning rate, because warm-up steps change little by design.

  Only matrices count, without token tables and experts, because a batch may use only a part of these. With several processes
  each one samples the arrays of its first device.

  Args:
    program: program of the run.
    start: number of finished steps.

  Attributes:
    step: number of the step that is measured, starting at 1; None if no step is measured any more.
  """

  def __init__(self, program: TrainProgram, start: int) -> None:
    self._config = program.config
    # Find the step with the highest learning rate that is still ahead.
    last = max(program.config.training.last_step, start + 1)
    rates = np.asarray(program.step.schedule(jnp.arange(start, last)))
    self.step: int | None = start + 1 + int(np.argmax(rates))
    self._rate = float(rates.max())
    # Choose the arrays to sample.
    masks, _ = jax.tree.flatten(program.selection.masks)
    trained = jax.tree.leaves(program.selection.split(program.spec)[0])
    self._leaves = {  # index of the trained leaf: bool [rows] of its trained layers, or None for all
      i: None if mask is True else np.asarray(mask)
      for i, (p, mask) in enumerate(zip(trained, masks, strict=True))
      if jnp.dtype(p.dtype).itemsize == 2 and decays(p) and not _SPARSE.intersection(p.axes)
    }
    # Nothing to warn about: rounding is stochastic, or the share is measured exactly, or the rate is 0.
    if program.step.rounding or program.step.survival or self._rate == 0:
      self._leaves = {}
    if not self._leaves:
      self.step = None
    self._split, self._before = program.selection.split, np.zeros(0)
    self._sample: Callable[[list[jax.Array]], list[jax.Array]] = jax.jit(lambda arrays: [_strided(x) for x in arrays])

  def before(self, state: State) -> None:
    """Call this with the state before ``step``."""
    self._before = self._sampled(state)

  def after(self, state: State, *, skipped: bool) -> str | None:
    """Call this after ``step``, before the next one starts. Returns a warning if few weights changed.

    Args:
      state: state after the step.
      skipped: True if the update was not applied; then the next step is measured.
    """
    assert self.step is not None
    if skipped:
      self.step += 1
      return None
    # Compare the sample before and after the step, once per run.
    step, before, after = self.step, self._before, self._sampled(state)
    self.step = None
    if not before.size or (share := float(np.mean(before != after))) >= LOW:
      return None
    dtype = self._config.precision.weight_dtype
    return (
      f"step {step}: WARNING: only {share:.1%} of the {dtype} weights changed (sample of {before.size:,}, learning rate "
      f"{self._rate:.3g}): smaller updates are rounded away\n  what to try: stochastic_rounding=true, which keeps them on "
      "average; weight_dtype=float32"
    )

  def _sampled(self, state: State) -> np.ndarray:
    leaves, arrays = jax.tree.leaves(self._split(state["params"])[0]), []
    for i, rows in self._leaves.items():
      shard = leaves[i].addressable_shards[0]
      # Of a partly trained stack, sample one trained row.
      if rows is not None:
        (here,) = np.nonzero(rows[shard.index[0]])
        if not here.size:
          continue
        arrays.append(shard.data[int(here[0])])
      else:
        arrays.append(shard.data)
    # One transfer for all samples.
    parts = jax.device_get(self._sample(arrays))
    return np.concatenate([np.ravel(part) for part in parts]) if parts else np.zeros(0)


def _strided(x: jax.Array) -> jax.Array:
  return x[tuple(slice(None, None, max(1, size // _EACH_AXIS)) for size in x.shape)]
