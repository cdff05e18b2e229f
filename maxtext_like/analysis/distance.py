"""Measures how far a training step is from the same step in float32: its loss, gradients and update.

R rows: the arrays of single layers, named by ``models.row_norms.row_labels``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.analysis import precision_overrides
from maxtext_like.config.schema import Config
from maxtext_like.errors import NonFiniteError
from maxtext_like.models.row_norms import Squares, clip, row_squares
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.training.step import loss_scale
from maxtext_like.training.step.program import TrainProgram, make_program

# For the relative error, an array's gradient is assumed to have at least this fraction of the RMS over all arrays. If a
# gradient is zero apart from rounding, its rounding is not an error.
SMALLEST_SHARE = 1e-4

AS_WRITTEN: dict[str, Any] = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
QUICKER: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}  # a quarter of the compile time; JAX 0.12 does not have it


@functools.cache
def cpu_options() -> dict[str, Any]:
  """Return compiler options that keep a CPU program's rounding and compile as fast as this JAX version allows."""
  try:
    jax.jit(lambda: 0).lower().compile(compiler_options=AS_WRITTEN | QUICKER)
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    return AS_WRITTEN
  return AS_WRITTEN | QUICKER


@dataclass(frozen=True, kw_only=True)
class Distance:
  """Errors of one step relative to the float32 step; infinite if a value is not finite.

  Attributes:
    loss: |loss - loss32| / |loss32|.
    gradient: |g - g32| / |g32| over all arrays together (Euclidean norms).
    arrays: the same for each array [R], relative to at least ``SMALLEST_SHARE`` of the mean size of a gradient.
    update: |applied - intended| / |intended| over all arrays together. "Intended" is the optimizer's first update in float32
      from the step's own gradient at the peak learning rate. "Applied" is the change of the stored parameters, averaged over
      the random bits with ``stochastic_rounding``. (The updates of the two steps are not compared: Adam's first updates differ
      wherever rounding changes the sign of a gradient near zero.)
    updates: the same for each array [R].
    value: the loss.
    loss_scale: at which the gradients were computed; None without float16.
  """

  loss: float
  gradient: float
  arrays: np.ndarray
  update: float
  updates: np.ndarray
  value: float
  loss_scale: float | None = None

  @property
  def array(self) -> float:
    """The largest of ``arrays``."""
    return float(self.arrays.max())

  @property
  def worst(self) -> float:
    """The largest of the four errors: loss, gradient, array and update."""
    return max(self.loss, self.gradient, self.array, self.update)

  @property
  def finite(self) -> bool:
    """True if loss, gradients and updated parameters are finite."""
    return math.isfinite(self.worst)

  def parts(self) -> dict[str, float]:
    """Return the errors by name; "gradients" is the larger of the error over all arrays and the worst array's."""
    return {"loss": self.loss, "gradients": max(self.gradient, self.array), "update": self.update}


def _subtracted(x: Any, y: Any) -> Any:
  return jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), x, y)


@jax.jit
def _errors(x: Any, y: Any) -> tuple[Squares, Squares]:
  """Return the squares of x - y and of y by array. It is a separate program: compiled together with the computation of x, XLA
  may remove the rounding."""
  return row_squares(_subtracted(x, y)), row_squares(y)


@jax.jit
def _change(new: Any, old: Any) -> Any:
  return _subtracted(new, old)


class Steps:
  """Compiled steps of configurations that differ only in precision. Share one instance: each step is compiled once.

  On a CPU the program is measured as written, because XLA's CPU optimizations remove rounding that an accelerator performs, and
  take longer than the step. Times are measured with steps that are compiled as in a run.
  """

  def __init__(self):
    self.program = functools.cache(make_program)
    self.compiled = functools.cache(self._compile)
    self.update = functools.cache(self._update)
    self.train_step = functools.cache(self._train_step)

  def gradients(self, config: Config) -> Callable[..., Any]:
    """Return (parameters, batch, loss scale or None) -> (loss, gradients in ``grad_dtype``)."""
    # The loss scale is an argument of the program, so its initial value must not cause another compilation.
    training = dataclasses.replace(config.training, loss_scale_init=1.0)
    return self.compiled(
      dataclasses.replace(config, training=training, logging=dataclasses.replace(config.logging, numerics_every=0))
    )

  def _compile(self, config: Config) -> Callable[..., Any]:
    program = self.program(config)

    def run(params, batch, scale):
      grads, out = program.step.gradients(*program.selection.split(params), batch, scale)
      return sum(out["loss"].values()), grads

    with use_mesh(program.model.mesh):
      scale = jax.ShapeDtypeStruct((), jnp.float32) if config.precision.dtype == "float16" else None
      batch = program.abstract_batch
      lowered = jax.jit(run).lower(program.abstract_state["params"], batch, scale)
      on_cpu = program.model.devices[0].platform == "cpu"
      return lowered.compile(compiler_options=cpu_options() if on_cpu else None)

  def _train_step(self, config: Config) -> Callable[..., Any]:
    """Return the step of a run. It donates its state."""
    return self.program(config).lower_step(checked=True).compile()

  def _update(self, config: Config) -> Callable[..., Any]:
    """Return (parameters, gradients) -> (the trained parameters after the first update, the update in float32)."""
    program = self.program(config)
    step, selection = program.step, program.selection
    rate = config.training.learning_rate
    stochastic = config.training.stochastic_rounding

    def stored(p, d):
      exact = p.astype(jnp.float32) + d
      rounded = exact.astype(p.dtype)
      if not stochastic:
        return rounded
      # The mean of stochastic rounding is exact for numbers within the dtype's range.
      return jnp.where(jnp.abs(exact) <= jnp.finfo(p.dtype).max.astype(jnp.float32), exact, rounded.astype(jnp.float32))

    def run(params, grads):
      trained, _ = selection.split(params)
      if step.clip:
        grads = clip(grads, row_squares(grads).norm(), step.clip)
      direction, _ = step.optimizer.update(grads, step.optimizer.init(trained), trained)
      change = jax.tree.map(lambda d: -rate * d.astype(jnp.float32), selection.mask_rows(direction))
      return jax.tree.map(stored, trained, change), change

    return jax.jit(run)


class Ruler:
  """Measures configurations against the float32 step with the same weights and batch.

  Args:
    config: configuration of the run; the measured variants differ only in precision.
    params: float32 parameters of ``steps.program(precision_overrides.reference(config))``.
    batch: placed on its mesh.
    steps: compiled programs, which can be shared.

  Raises:
    NonFiniteError: the float32 step itself is not finite.
  """

  def __init__(self, config: Config, params: Any, batch: Any, steps: Steps):
    self._params, self._batch, self._steps = params, batch, steps
    self._max_halvings = max(config.training.max_skipped_steps, 1)
    exact = precision_overrides.reference(config)
    program = steps.program(exact)
    self.labels = program.labels
    self._sizes = _row_sizes(program)
    self._known: dict[tuple[Config, int], Distance] = {}
    loss, self._gradient = steps.gradients(exact)(params, batch, None)
    self.loss = float(loss)
    squares = _errors(self._gradient, self._gradient)[1].on_host()
    if not (math.isfinite(self.loss) and np.isfinite(squares).all()):
      bad = [name for name, s in zip(self.labels, squares, strict=True) if not np.isfinite(s)]
      first = f", and {len(bad)} of {len(self.labels)} gradients, first {bad[0]}" if bad else ""
      raise NonFiniteError(
        f"the step is not finite in float32 either (loss {self.loss:g}{first}), so no precision key can fix it\n"
        "  fix: check the weights and the data; x-ray names the operation (docs/guides/xray.md)"
      )

  def measure(self, config: Config, *, halvings: int = 0) -> Distance:
    """Return the distance of a configuration's step from the float32 step.

    Args:
      config: configuration of the run, in another precision.
      halvings: with float16, halve the loss scale until the gradients are finite, at most this often and at most as often as a
        run would.
    """
    known = self._known.get((config, halvings))
    if known is None:
      known = self._known[config, halvings] = self._measure(config, halvings)
    return known

  def _measure(self, config: Config, halvings: int) -> Distance:
    spec = self._steps.program(config).spec
    params = jax.tree.map(lambda x, p: x.astype(p.dtype), self._params, spec)
    run = self._steps.gradients(config)
    scale = config.training.loss_scale_init if config.precision.dtype == "float16" else None
    for attempt in range(min(self._max_halvings, 1 + halvings) if scale else 1):
      scale = max(scale / 2, loss_scale.SMALLEST) if attempt and scale else scale
      loss, grads = run(params, self._batch, None if scale is None else np.float32(scale))
      off, size = (x.on_host() for x in _errors(grads, self._gradient))
      if np.isfinite(off).all():
        break
    total = float(size.sum())
    floor = SMALLEST_SHARE**2 * total * self._sizes / self._sizes.sum()
    moved, change = self._steps.update(_of_the_update(config))(params, grads)
    kept, _ = self._steps.program(config).selection.split(params)
    lost, meant = (x.on_host() for x in _errors(_change(moved, kept), change))
    value = float(loss)
    return Distance(
      loss=_relative(abs(value - self.loss), abs(self.loss)),
      gradient=_relative(off.sum() ** 0.5, total**0.5),
      arrays=_infinite(np.sqrt(off / np.maximum(np.maximum(size, floor), 1e-300))),
      update=_relative(lost.sum() ** 0.5, meant.sum() ** 0.5),
      updates=_infinite(np.sqrt(lost / np.maximum(meant, 1e-300))),
      value=value,
      loss_scale=scale,
    )


def _relative(error: float, size: float) -> float:
  """error / size; infinite if either is not finite; 0 without an error."""
  if not (math.isfinite(error) and math.isfinite(size)):
    return math.inf
  return error / max(size, 1e-30) if error else 0.0


def _infinite(errors: np.ndarray) -> np.ndarray:
  return np.where(np.isfinite(errors), errors, np.inf)


def _of_the_update(config: Config) -> Config:
  """Set all keys that the update's program does not depend on to one value, so that configurations share the program."""
  exact = precision_overrides.reference(config)
  precision = dataclasses.replace(exact.precision, weight_dtype=config.precision.weight_dtype)
  return dataclasses.replace(exact, precision=precision)


def _row_sizes(program: TrainProgram) -> np.ndarray:
  """Return the number of elements in each array of ``program.labels``."""
  sizes = []
  for p in jax.tree.leaves(program.selection.split(program.spec)[0]):
    rows = 1 if p.rows is None else p.rows
    sizes += [math.prod(p.shape) // rows] * rows
  return np.asarray(sizes, np.float64)
