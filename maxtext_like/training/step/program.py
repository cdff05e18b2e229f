"""The programs of a training run, and how they are called: open this file to see what is compiled and with which inputs.

``make_program`` builds a model, an objective, an optimizer and the train step from a configuration. ``TrainProgram.lower_*``
lower each program for the devices of the mesh, ``TrainProgram.place`` puts a batch on them, and ``Stepper`` calls the compiled
step. If the fast form of a step could not prove its update finite, ``Stepper`` repeats it in the checked form (train_step.py).
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint.adapters.adapted_weights import configured_adapter, require_dropout, stored_as
from maxtext_like.checkpoint.adapters.init_adapter import with_init_adapter
from maxtext_like.checkpoint.compatibility import LOSS_SCALE
from maxtext_like.config.idle_keys import fixed_router_bias
from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError
from maxtext_like.layers.attention.mla import MLA
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import abstract, count, init
from maxtext_like.layers.partition import Mesh, axes_of
from maxtext_like.layers.sharding_rules import free_axes
from maxtext_like.models.adapter import Adapter
from maxtext_like.models.model import Model, Shapes, make_model, placed
from maxtext_like.models.naming import ADAPTER
from maxtext_like.models.row_norms import plain_squares, row_labels, row_peaks, state_labels, state_peaks
from maxtext_like.sharding import processes
from maxtext_like.sharding.mesh import replicated, use_mesh
from maxtext_like.training.objectives.adapted import Adapted
from maxtext_like.training.objectives.objective import Objective
from maxtext_like.training.objectives.registry import make_objective
from maxtext_like.training.optimizers import on_host
from maxtext_like.training.optimizers.by_layer import ByLayer
from maxtext_like.training.optimizers.optimizer import make_optimizer
from maxtext_like.training.optimizers.schedule import make_schedule
from maxtext_like.training.step import compiler_options, kept_moments, loss_scale
from maxtext_like.training.step.in_backward.step import StepInBackward
from maxtext_like.training.step.rounding import StochasticRounding
from maxtext_like.training.step.router_bias import find_router_bias
from maxtext_like.training.step.train_step import NO_UPDATE, UNKNOWN, Batch, Metrics, State, TrainStep
from maxtext_like.training.step.trainable import Selection, select

ModuleApi = Literal["nnx", "linen", "plain"]


@dataclass(frozen=True, eq=False)
class TrainProgram:
  """Everything about a run that follows from its configuration and its devices. It holds no arrays.

  Attributes:
    model: the trained model, placed on its devices.
    objective: the loss that is minimized.
    selection: the trained parameters.
    step: the pure train step, with the run's optimizer.
    adapter: the trained adapter; None if the weights themselves are trained.
  """

  model: Model
  objective: Objective
  selection: Selection
  step: TrainStep
  adapter: Adapter | None = None

  @property
  def config(self) -> Config:
    """Configuration of the run."""
    return self.model.config

  @functools.cached_property
  def spec(self) -> Any:
    """Declared parameters of the objective: those of the model, and of its reference model if it has one."""
    return self.objective.params()

  def with_steps(self, steps: int) -> "TrainProgram":
    """Return the same program for a run of this many steps."""
    config = dataclasses.replace(self.config, training=dataclasses.replace(self.config.training, steps=steps))
    model = dataclasses.replace(self.model, config=config)
    return dataclasses.replace(self, model=model, step=dataclasses.replace(self.step, schedule=make_schedule(config.training)))

  @functools.cached_property
  def size(self) -> int:
    """Number of parameters, independent of how they are stored."""
    return count(self.model.decoder.params()) + count(self.spec) - count(self.model.spec)

  @property
  def microbatch(self) -> int:
    """Number of rows that all devices together process at a time."""
    return self.model.rows

  @property
  def global_batch(self) -> int:
    """Number of rows of one update, over all devices and microbatches."""
    return self.microbatch * self.config.training.gradient_accumulation_steps

  @functools.cached_property
  def labels(self) -> list[str]:
    """Parameter names for the entries of "gradients" and "parameters" in the metrics."""
    return row_labels(self.model.decoder, self.selection.split(self.spec)[0])

  @functools.cached_property
  def state_labels(self) -> dict[str, list[str]]:
    """Names for the entries of "optimizer", "state_parameters" and "state_optimizer" in the metrics."""
    state, decoder = self.abstract_state, self.model.decoder
    optimizer = state_labels(decoder, state["opt_state"], self.selection.split(state["params"])[0])
    return {"optimizer": optimizer, "state_parameters": row_labels(decoder, self.spec), "state_optimizer": optimizer}

  def initial_state(self, seed: jax.Array) -> State:
    """Return the state at step 0, a pure function of the seed (uint32 scalar). It is only traced, never run directly."""
    return self._around({}, seed)

  def _around(self, given: Any, seed: jax.Array) -> State:
    """Return the state at step 0 with these parameters. Missing ones (an adapter, or all of them) are initialized randomly."""
    # Parameters: those passed in, and randomly initialized ones for the rest.
    key = jax.random.key(seed)
    given = given or self.model.draw(key)
    missing = {name: spec for name, spec in self.spec.items() if name not in given}
    params = {**given, **init(missing, key)}
    # A new adapter is initialized from the weights if its kind needs them.
    if self.adapter is not None and ADAPTER in missing:
      params = self.adapter.started(params, self.model.decoder.precision, self.model.base)
    # The optimizer state covers the trained leaves only.
    state: State = {
      "step": jnp.zeros((), jnp.int32),
      "params": params,
      "opt_state": self.step.optimizer.init(self.selection.split(params)[0]),
      **self._extra_state(),
    }
    return state

  def _extra_state(self) -> State:
    """Return the additional state entries at step 0, used also for entries that a checkpoint lacks."""
    t, scaled = self.config.training, self.config.precision.dtype == "float16"
    return self.step.extra_state() | ({LOSS_SCALE: loss_scale.initial(t.loss_scale_init)} if scaled else {})

  def checkpoint_state(self, state: State) -> State:
    """Return the part of a state that a checkpoint keeps. With an adapter, the model's weights are left out."""
    return state if self.adapter is None else {**state, "params": {ADAPTER: state["params"][ADAPTER]}}

  def weights(self, params: Any) -> Any:
    """Return the parameters as the decoder takes them. With an adapter, each weight has its low-rank update attached."""
    return self.objective.attach(params) if isinstance(self.objective, Adapted) else params

  @functools.cached_property
  def latent_attention(self) -> list[tuple[MLA, Any]]:
    """The latent-attention layers with the shape of the weight that expands their latents, for all rows of its stack."""
    params, decoder = jax.eval_shape(self.weights, self.abstract_state["params"]), self.model.decoder
    places = [(layer.mixer, *decoder.locate(i)) for i, layer in enumerate(decoder.layers)]
    return [(mixer, params[s][layer]["attention"]["kv_b"]) for mixer, s, _, layer in places if isinstance(mixer, MLA)]

  def completed(self, saved: State, weights: Any) -> State:
    """Complete a state that was read from a checkpoint.

    Args:
      saved: a state as ``checkpoint_state`` returns it. Missing moments and missing additional entries get their initial
        values.
      weights: the model's weights, returned unchanged; unused without an adapter.
    """
    # Fill in what the checkpoint lacks.
    anew = {
      name: jax.device_put(x, replicated(self.model.mesh)) for name, x in self._extra_state().items() if name not in saved
    }
    params = saved["params"] if self.adapter is None else {**weights, **saved["params"]}
    with use_mesh(self.model.mesh):
      moments = kept_moments.completed(saved["opt_state"], self.selection.split(params)[0], self.step.optimizer)
    return {**saved, **anew, "params": params, "opt_state": moments}

  @functools.cached_property
  def abstract_checkpoint(self) -> State:
    """``jax.ShapeDtypeStruct`` with a sharding for every array that a checkpoint keeps."""
    return self.checkpoint_state(self.abstract_state)

  @functools.cached_property
  def abstract_state(self) -> State:
    """``jax.ShapeDtypeStruct`` with a sharding for every array of the state."""
    # Shapes of the state, and shardings of the parameters.
    seed, everywhere = jax.ShapeDtypeStruct((), jnp.uint32), replicated(self.model.mesh)
    shapes = jax.eval_shape(self._around, abstract(self.spec), seed)
    params = jax.tree.map(lambda x: x.sharding, placed(self.spec, self.model.mesh, self.model.decoder.cfg.rules))
    places = jax.tree.map(lambda _: everywhere, shapes) | {"params": params}
    # The optimizer state is sharded like the parameters it belongs to, and may be in host memory.
    trained, trained_places = (self.selection.split(tree)[0] for tree in (shapes["params"], params))
    own = self.step.optimizer.state_shardings(shapes["opt_state"], trained, trained_places, everywhere)
    away = self.config.training.optimizer_memory_host_offload
    places["opt_state"] = on_host.places(shapes["opt_state"], own) if away else own
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)

  def batch_of(self, rows: int) -> Shapes:
    """``jax.ShapeDtypeStruct`` of the objective's batch with this many rows."""
    return self.objective.batch(self.model.inputs(rows))

  @functools.cached_property
  def abstract_batch(self) -> Shapes:
    """``jax.ShapeDtypeStruct`` of a global batch, with shardings."""
    return self._on_devices(self.batch_of(self.global_batch))

  def _on_devices(self, batch: Shapes) -> Shapes:
    sharding = self.model.batch_sharding
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}

  def lower_init(self) -> Any:
    """Lower the program that initializes the state. Every device makes its own part of every array."""
    with use_mesh(self.model.mesh):
      places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
      return jax.jit(self.initial_state, out_shardings=places).lower(jax.ShapeDtypeStruct((), jnp.uint32))

  def lower_around(self) -> Any:
    """Lower the program that makes the state at step 0 from the model's parameters, whose memory it reuses, and a seed (uint32
    scalar) for the other trained parameters."""
    places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    with use_mesh(self.model.mesh):
      around = jax.jit(self._around, donate_argnums=0, out_shardings=places)
      return around.lower(self.model.abstract_params, jax.ShapeDtypeStruct((), jnp.uint32))

  def lower_step(self, platform: str | None = None, *, checked: bool = False) -> Any:
    """Lower the train step: (state, batch, known) -> (state, metrics). The next state reuses the memory of the state.

    Args:
      platform: platform to lower for if this process does not run on it, for example "tpu" ahead of time.
      checked: lower the checked form, which also accepts a state with unknown magnitudes.
    """
    places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    with use_mesh(self.model.mesh):
      magnitude_bound = jax.ShapeDtypeStruct(UNKNOWN.shape, UNKNOWN.dtype, sharding=replicated(self.model.mesh))
      step = dataclasses.replace(self.step, checked=True) if checked else self.step
      out = places, replicated(self.model.mesh)
      program = jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=compiler_options.of_step(step))
      traced = program.trace(self.abstract_state, self.abstract_batch, magnitude_bound)
      return traced.lower(lowering_platforms=None if platform is None else (platform,))

  def lower_check(self) -> Any:
    """Lower the check of a state, used after a restore and before a save: (params, opt_state) -> {"magnitude_bound": magnitude
    bounds for the step; "param_norm": float32 scalar; "state_parameters" and "state_optimizer": bool per row
    (``state_labels``), True if finite}."""

    # One pass over all numbers.
    def check(params, opt_state):
      parameters, optimizer = row_peaks(params), state_peaks(opt_state, self.selection.split(params)[0])
      magnitude_bound = jnp.stack([jnp.max(parameters), jnp.max(optimizer, initial=0.0)])
      found = {"magnitude_bound": magnitude_bound, "param_norm": plain_squares(params).norm().value}
      return found | {"state_parameters": jnp.isfinite(parameters), "state_optimizer": jnp.isfinite(optimizer)}

    with use_mesh(self.model.mesh):
      state = self.abstract_state
      return jax.jit(check, out_shardings=replicated(self.model.mesh)).lower(state["params"], state["opt_state"])

  def lower_eval(self) -> Any:
    """Lower the evaluation: (params, batch) -> (sum of the objective's evaluated term, its divisor)."""

    # Evaluation uses one microbatch at a time.
    def evaluate(params, batch):
      _, weight, aux = self.step.apply(params, batch)
      return aux["terms"][self.objective.evaluated], weight

    with use_mesh(self.model.mesh):
      return jax.jit(evaluate).lower(self.abstract_state["params"], self._on_devices(self.batch_of(self.microbatch)))

  def place(self, batch: dict[str, np.ndarray]) -> Batch:
    """Turn this process's rows into global arrays on the mesh.

    Raises:
      UserError: a row has several documents, but the program was built for one document per row.
    """
    # A program for one document per row has no segment mask, so packed rows would attend to each other.
    segments = batch["segments"]
    if self.model.decoder.cfg.one_document and ((segments > 1).any() or (np.diff(segments) > 0).any()):
      raise UserError(
        "a batch has rows with several documents, but packing=false compiles a program for one document per row\n"
        "  fix: packing=true, which accepts every batch"
      )
    arrays = {name: (batch[name], x.sharding) for name, x in self.abstract_batch.items()}
    return {name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for name, (x, sharding) in arrays.items()}


@dataclass
class Stepper:
  """Runs steps, and passes the magnitude bounds of each step to the next.

  Attributes:
    program: the run's program.
    step: compiled ``TrainProgram.lower_step``.
    check: compiled ``TrainProgram.lower_check``.
    norm: parameter norm of the initial state; None before the first step.
  """

  program: TrainProgram
  step: Callable[..., tuple[State, Metrics]]
  check: Callable[..., dict[str, jax.Array]]
  norm: float | None = field(default=None, init=False)
  _magnitude_bound: Any = field(default=None, init=False)
  _checked_step: Callable[..., tuple[State, Metrics]] | None = field(default=None, init=False)
  _repeated: int | None = field(default=None, init=False)  # newest repeated step whose update was finite

  def launch(self, state: State, batch: Batch) -> tuple[State, Metrics]:
    """Start a step. It reuses the memory of ``state``."""
    # Before the first step, and after a restore, check the state once.
    if self._magnitude_bound is None:
      found = self.check_state(state)
      self._magnitude_bound, self.norm = found["magnitude_bound"], float(found["param_norm"])
    state, metrics = self.step(state, batch, self._magnitude_bound)
    self._magnitude_bound = metrics.pop("magnitude_bound")
    return state, metrics

  def repeat_checked(self, number: int, state: State, batch: Batch) -> tuple[State, Metrics]:
    """Repeat the step of this number in the checked form, and wait for it."""
    # Compile the checked form when it is first needed.
    checked = self._checked_step
    if checked is None:
      checked = self._checked_step = self.program.lower_step(checked=True).compile()
      processes.await_compiled("the checked step", self.program.config.watchdog.watchdog_compile_seconds)
    state, metrics = checked(state, batch, UNKNOWN)
    self._magnitude_bound = metrics.pop("magnitude_bound")
    metrics = jax.block_until_ready(metrics)
    if not metrics["skipped"]:
      # After two unproved steps in a row the next one would probably not be proved either, so use the checked form from now on.
      if self._repeated == number - 1:
        self.step = checked
      self._repeated = number
    return state, metrics

  def loss(self, state: State, batch: Batch) -> tuple[State, jax.Array]:
    """Measure the loss of a batch with the compiled step, so that no other program has to be compiled.

    The state is returned unchanged, in the same memory.
    """
    state, metrics = self.step(state, batch, NO_UPDATE)
    self.reset_bound()
    return state, metrics["loss"]

  def check_state(self, state: State) -> dict[str, jax.Array]:
    """Check every number of a state without taking a step. See ``TrainProgram.lower_check``."""
    return self.check(state["params"], state["opt_state"])

  def reset_bound(self) -> None:
    """Drop the magnitude bounds. Call this before a step from a state that the last step did not return."""
    self._magnitude_bound = None


def make_program(
  config: Config,
  *,
  mesh: Mesh | None = None,
  platform: str | None = None,
  capability: str | None = None,
  module_api: ModuleApi | None = None,
) -> TrainProgram:
  """Build the model, objective, optimizer and train step of a run. No array is allocated.

  Args:
    config: configuration of the run.
    mesh: device mesh; default: the ``mesh:`` section over all devices.
    platform: "cpu", "gpu" or "tpu", where the program will run. Required for an abstract mesh; default: that of the devices.
    capability: CUDA compute capability, for an abstract mesh or a topology whose devices do not report it. None if unknown or
      not an NVIDIA GPU.
    module_api: overrides the configured module API.

  Raises:
    UserError: as ``make_model``; or no parameter is trained; or the objective does not fit the data.
  """
  one_document = config.data.one_document
  # The model, with the adapter's sizes if lora_from names one and with quantized base weights if configured.
  model = with_init_adapter(make_model(config, mesh=mesh, platform=platform, capability=capability, one_document=one_document))
  config = model.config
  t = config.training
  model = stored_as(model, config.adapter)
  decoder = model.decoder
  # The objective. An adapter wraps it, so that the step sees one parameter tree.
  objective: Objective = make_objective(t.objective, model)
  adapter = None
  if config.adapter.lora_rank:
    adapter = configured_adapter(model, config.adapter, t.vision_tower)
    require_dropout(adapter, model)
    objective = Adapted(objective, adapter, model.base)
  # The trained parameters, and the optimizer for them.
  spec = objective.params()
  selection = select(decoder, spec, config.model, t.trainable_parameters_mask, adapter, t.vision_tower)
  optimizer = make_optimizer(t, selection.split(spec)[0], "float32" if adapter else config.precision.weight_dtype)
  kind = TrainStep
  if t.optimizer_in_backward:
    kind, optimizer = functools.partial(StepInBackward, clip_by=t.clip), ByLayer.of(optimizer)
  # The pure step.
  step = kind(
    apply=make_apply(objective, t.module_api if module_api is None else module_api),
    objective=objective,
    selection=selection,
    optimizer=optimizer,
    schedule=make_schedule(t),
    clip=t.gradient_clipping_threshold,
    parts=t.gradient_accumulation_steps,
    grad_dtype=config.precision.grad_dtype,
    router_bias=None if fixed_router_bias(config) else find_router_bias(decoder, config.model.router_bias_rate),
    probed_stacks={s.name: (s.repeats, len(s.layers)) for s in decoder.stacks} if config.logging.numerics_every else None,
    rounding=StochasticRounding(t.seed) if t.stochastic_rounding else None,
    summed_once=_summed_once(decoder, spec, model.mesh) if t.gradient_accumulation_steps > 1 else (),
    survival=config.logging.update_survival_every > 0,
    dropout_seed=t.seed if adapter and adapter.dropout else None,
    checked=not optimizer.usually_proved(t.gradient_clipping_threshold),
  )
  return TrainProgram(model, objective, selection, step, adapter)


def _summed_once(decoder: Decoder, spec: Any, mesh: Mesh) -> tuple[str, ...]:
  """Mesh axes that split rows and no parameter, over which gradients are summed once after the last microbatch.

  Returns () in two cases. A program with manually split rows and a second way of splitting aborts XLA's partitioner (JAX 0.10
  and 0.12). A load-balancing loss of means over the complete batch is not a sum over the devices' rows.
  """
  # Axes that split any parameter are excluded.
  rules = decoder.cfg.rules
  split = {axis for p in jax.tree.leaves(spec) for entry in rules.spec(p.shape, p.axes, mesh) for axis in axes_of(entry)}
  axes = tuple(axis for axis in rules.mesh_axes("batch", mesh) if axis not in split)
  balanced = decoder.router_losses[0].needs_batch_load
  return () if balanced or len({*free_axes(mesh)} - {*axes}) > 1 else axes


def make_apply(layer: Any, module_api: ModuleApi) -> Callable[..., Any]:
  """Return ``apply(params, *args)``, which calls a layer as a pure function, as a Linen module or as an NNX module.

  All three return bitwise equal numbers for the same parameter tree, so the train step does not depend on the choice.

  Args:
    layer: has ``params()`` and a pure call.
    module_api: "linen" and "nnx" go through ``flax.linen`` and ``flax.nnx``; "plain" calls the layer itself.
  """
  if module_api == "plain":
    return layer
  if module_api == "linen":
    from maxtext_like.layers.linen import Linen

    module = Linen(layer)
    return lambda params, *args: module.apply({"params": params}, *args)

  from flax import nnx

  from maxtext_like.layers.nnx import NNX

  # The module is split once; each call merges it with the current parameters.
  graph, shapes = nnx.split(NNX(layer, rngs=None))

  def apply(params, *args):
    state = jax.tree.map(lambda x: x, shapes)  # copy, because the values are written into it
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)(*args)

  return apply
