"""How far one training step is from the same step in float32: of its loss, its gradients and its update.

R rows: the arrays of single layers, as ``models.row_norms.row_labels`` names them.
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

# An array counts as if its gradient's rms were at least this share of the rms over all arrays: where the gradient is zero
# but for rounding, that rounding is no error.
SMALLEST_SHARE = 1e-4

AS_WRITTEN: dict[str, Any] = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
QUICKER: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False}  # a quarter of the compile time; JAX 0.12 has not got it


@functools.cache
def cpu_options() -> dict[str, Any]:
  """Compiler options that keep a CPU program's roundings, and compile it as quickly as this JAX can."""
  try:
    jax.jit(lambda: 0).lower().compile(compiler_options=AS_WRITTEN | QUICKER)
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    return AS_WRITTEN
  return AS_WRITTEN | QUICKER


@dataclass(frozen=True, kw_only=True)
class Distance:
  """Errors of one step relative to the float32 step; infinite where it is not finite.

  Attributes:
    loss: |loss - loss32| / |loss32|.
    gradient: |g - g32| / |g32| over all arrays together (Euclidean norms).
    arrays: the same of each array [R], against at least ``SMALLEST_SHARE`` of the mean size of a gradient.
    update: |applied - intended| / |intended| over all arrays together. Intended is the optimizer's first update, at the
      peak learning rate, in float32, from the step's own gradient; applied is what the stored parameters change by, with
      ``stochastic_rounding`` on average. (Two first updates of Adam differ wherever rounding turns the sign of a gradient
      near zero; that tells nothing.)
    updates: the same of each array [R].
    value: the loss itself.
    loss_scale: that the gradients were taken at; None: not float16.
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
    """The worst of ``arrays``."""
    return float(self.arrays.max())

  @property
  def worst(self) -> float:
    """The largest of the four: loss, gradient, array and update."""
    return max(self.loss, self.gradient, self.array, self.update)

  @property
  def finite(self) -> bool:
    """Whether loss, gradients and updated parameters are."""
    return math.isfinite(self.worst)

  def parts(self) -> dict[str, float]:
    """The errors by what they are of; "gradients" is the worse of all together and the worst array."""
    return {"loss": self.loss, "gradients": max(self.gradient, self.array), "update": self.update}


def _subtracted(x: Any, y: Any) -> Any:
  return jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), x, y)


@jax.jit
def _errors(x: Any, y: Any) -> tuple[Squares, Squares]:
  """Squares of x - y and of y by array. A program of its own: in one with what made x, XLA may leave out its rounding."""
  return row_squares(_subtracted(x, y)), row_squares(y)


@jax.jit
def _change(new: Any, old: Any) -> Any:
  return _subtracted(new, old)


class Steps:
  """Compiled steps of configurations that differ in precision only. Share one: each is compiled once.

  On a CPU what is measured is the program as written: XLA leaves out roundings there that an accelerator does, and
  optimising takes longer than running. Times are taken of steps compiled as a run compiles them.
  """

  def __init__(self):
    self.program = functools.cache(make_program)
    self.compiled = functools.cache(self._compile)
    self.update = functools.cache(self._update)
    self.train_step = functools.cache(self._train_step)

  def gradients(self, config: Config) -> Callable[..., Any]:
    """(parameters, batch, loss scale or None) -> (loss, gradients in ``grad_dtype``)."""
    # The loss scale is an argument of the program.
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
    """The step of a run; it takes its state's memory."""
    return self.program(config).lower_step(careful=True).compile()

  def _update(self, config: Config) -> Callable[..., Any]:
    """(parameters, gradients) -> (the trained parameters after the first update, and the update in float32)."""
    program = self.program(config)
    step, selection = program.step, program.selection
    rate = config.training.learning_rate
    stochastic = config.training.stochastic_rounding

    def stored(p, d):
      exact = p.astype(jnp.float32) + d
      rounded = exact.astype(p.dtype)
      if not stochastic:
        return rounded
      # The mean of stochastic rounding is exact wherever the dtype reaches.
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
  """Measures configurations against the float32 step on the same weights and batch.

  Args:
    config: of the run; its variants differ in precision only.
    params: float32 parameters of ``steps.program(remedies.reference(config))``.
    batch: placed on its mesh.
    steps: compiled programs, to be shared.

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
        f"the step is not finite in float32 either (loss {self.loss:g}{first}): no precision key mends that\n"
        "  fix: look at the weights and the data; x-ray names the operation (docs/guides/xray.md)"
      )

  def measure(self, config: Config, *, halvings: int = 0) -> Distance:
    """The distance of a configuration's step.

    Args:
      config: of the run, in another precision.
      halvings: float16: halve the loss scale until the gradients are finite, so often at most, and as far as a run would.
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
  """error / size; infinite where either is not finite; 0 where nothing is off."""
  if not (math.isfinite(error) and math.isfinite(size)):
    return math.inf
  return error / max(size, 1e-30) if error else 0.0


def _infinite(errors: np.ndarray) -> np.ndarray:
  return np.where(np.isfinite(errors), errors, np.inf)


def _of_the_update(config: Config) -> Config:
  """What the update's program depends on: every other key is set to one value, so that they share it."""
  exact = precision_overrides.reference(config)
  precision = dataclasses.replace(exact.precision, weight_dtype=config.precision.weight_dtype)
  return dataclasses.replace(exact, precision=precision)


def _row_sizes(program: TrainProgram) -> np.ndarray:
  """Numbers in each array of ``program.labels``."""
  sizes = []
  for p in jax.tree.leaves(program.selection.split(program.spec)[0]):
    rows = 1 if p.rows is None else p.rows
    sizes += [math.prod(p.shape) // rows] * rows
  return np.asarray(sizes, np.float64)
