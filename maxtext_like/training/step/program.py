"""What a training run compiles: a model with an objective and an optimizer, and the programs made of the three."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint.adapters.adapted_weights import configured_adapter, require_dropout, with_base
from maxtext_like.checkpoint.adapters.init_adapter import with_given
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
from maxtext_like.sharding.mesh import replicated, use_mesh
from maxtext_like.training.objectives.adapted import Adapted
from maxtext_like.training.objectives.objective import Objective
from maxtext_like.training.objectives.registry import make_objective
from maxtext_like.training.optimizers import on_host
from maxtext_like.training.optimizers.by_layer import ByLayer
from maxtext_like.training.optimizers.optimizer import make_optimizer
from maxtext_like.training.step import compiler_options, kept_moments, loss_scale
from maxtext_like.training.step.in_backward.step import StepInBackward
from maxtext_like.training.step.module_api import ModuleApi, make_apply
from maxtext_like.training.step.rounding import StochasticRounding
from maxtext_like.training.step.router_bias import find_router_bias
from maxtext_like.training.step.schedule import make_schedule
from maxtext_like.training.step.train_step import UNKNOWN, Batch, State, TrainStep
from maxtext_like.training.step.trainable import Selection, select


@dataclass(frozen=True, eq=False)
class TrainProgram:
  """Everything about a run that follows from its configuration and its devices. Holds no array.

  Attributes:
    model: what is trained, on its devices.
    objective: what is minimised.
    selection: the parameters that are trained.
    step: the pure train step; its optimizer is the run's.
    adapter: what is trained in the place of the weights; None: the weights are.
  """

  model: Model
  objective: Objective
  selection: Selection
  step: TrainStep
  adapter: Adapter | None = None

  @property
  def config(self) -> Config:
    """Of the run."""
    return self.model.config

  @functools.cached_property
  def spec(self) -> Any:
    """The declared parameters of the objective: the model's, and what it is compared with."""
    return self.objective.params()

  def with_steps(self, steps: int) -> "TrainProgram":
    """The same for a run of so many steps."""
    config = dataclasses.replace(self.config, training=dataclasses.replace(self.config.training, steps=steps))
    model = dataclasses.replace(self.model, config=config)
    return dataclasses.replace(self, model=model, step=dataclasses.replace(self.step, schedule=make_schedule(config.training)))

  @functools.cached_property
  def size(self) -> int:
    """The number of parameters, however they are stored."""
    return count(self.model.decoder.params()) + count(self.spec) - count(self.model.spec)

  @property
  def microbatch(self) -> int:
    """Rows that all devices work on at a time."""
    return self.model.rows

  @property
  def global_batch(self) -> int:
    """Rows of an update over all devices and parts."""
    return self.microbatch * self.config.training.gradient_accumulation_steps

  @functools.cached_property
  def labels(self) -> list[str]:
    """Parameter names behind the entries of the metrics' "gradients" and "parameters"."""
    return row_labels(self.model.decoder, self.selection.split(self.spec)[0])

  @functools.cached_property
  def state_labels(self) -> dict[str, list[str]]:
    """Names behind the entries of the metrics' "optimizer", "state_parameters" and "state_optimizer"."""
    state, decoder = self.abstract_state, self.model.decoder
    optimizer = state_labels(decoder, state["opt_state"], self.selection.split(state["params"])[0])
    return {"optimizer": optimizer, "state_parameters": row_labels(decoder, self.spec), "state_optimizer": optimizer}

  def initial_state(self, seed: jax.Array) -> State:
    """The state at step 0, a pure function of the seed (uint32 scalar). Traced, never run as it stands."""
    return self._around({}, seed)

  def _around(self, given: Any, seed: jax.Array) -> State:
    """The state at step 0 around given parameters; those that they lack, as an adapter or all of them, are drawn."""
    key = jax.random.key(seed)
    given = given or self.model.draw(key)
    missing = {name: spec for name, spec in self.spec.items() if name not in given}
    params = {**given, **init(missing, key)}
    if self.adapter is not None and ADAPTER in missing:
      params = self.adapter.started(params, self.model.decoder.precision, self.model.base)
    state: State = {
      "step": jnp.zeros((), jnp.int32),
      "params": params,
      "opt_state": self.step.optimizer.init(self.selection.split(params)[0]),
      **self._begun(),
    }
    return state

  def _begun(self) -> State:
    """What a state has besides, and begins anew where a checkpoint lacks it."""
    t, scaled = self.config.training, self.config.precision.dtype == "float16"
    return self.step.begun() | ({LOSS_SCALE: loss_scale.initial(t.loss_scale_init)} if scaled else {})

  def stored(self, state: State) -> State:
    """What a checkpoint keeps of a state: with an adapter, the adapter alone of the parameters."""
    return state if self.adapter is None else {**state, "params": {ADAPTER: state["params"][ADAPTER]}}

  def weights(self, params: Any) -> Any:
    """The parameters of a state as the decoder takes them: with an adapter, each weight with its addition."""
    return self.objective.attach(params) if isinstance(self.objective, Adapted) else params

  @functools.cached_property
  def latent_attention(self) -> list[tuple[MLA, Any]]:
    """The layers' latent attention, and the weight that expands the latents of each, as shapes: of all rows of its stack."""
    params, decoder = jax.eval_shape(self.weights, self.abstract_state["params"]), self.model.decoder
    places = [(layer.mixer, *decoder.locate(i)) for i, layer in enumerate(decoder.layers)]
    return [(mixer, params[s][layer]["attention"]["kv_b"]) for mixer, s, _, layer in places if isinstance(mixer, MLA)]

  def completed(self, stored: State, weights: Any) -> State:
    """Complete the state that a checkpoint kept.

    Args:
      stored: result of ``stored``; values of ``_begun`` and moments that are missing start at their initial values.
      weights: of the model, which stay as they are; of no use without an adapter.
    """
    anew = {name: jax.device_put(x, replicated(self.model.mesh)) for name, x in self._begun().items() if name not in stored}
    params = stored["params"] if self.adapter is None else {**weights, **stored["params"]}
    with use_mesh(self.model.mesh):
      moments = kept_moments.completed(stored["opt_state"], self.selection.split(params)[0], self.step.optimizer)
    return {**stored, **anew, "params": params, "opt_state": moments}

  @functools.cached_property
  def abstract_stored(self) -> State:
    """``jax.ShapeDtypeStruct`` with a sharding for every array that a checkpoint keeps."""
    return self.stored(self.abstract_state)

  @functools.cached_property
  def abstract_state(self) -> State:
    """``jax.ShapeDtypeStruct`` with a sharding for every array of the state."""
    seed, everywhere = jax.ShapeDtypeStruct((), jnp.uint32), replicated(self.model.mesh)
    shapes = jax.eval_shape(self._around, abstract(self.spec), seed)
    params = jax.tree.map(lambda x: x.sharding, placed(self.spec, self.model.mesh, self.model.decoder.cfg.rules))
    places = jax.tree.map(lambda _: everywhere, shapes) | {"params": params}
    trained, trained_places = (self.selection.split(tree)[0] for tree in (shapes["params"], params))
    own = self.step.optimizer.state_shardings(shapes["opt_state"], trained, trained_places, everywhere)
    away = self.config.training.optimizer_memory_host_offload
    places["opt_state"] = on_host.places(shapes["opt_state"], own) if away else own
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)

  def batch_of(self, rows: int) -> Shapes:
    """``jax.ShapeDtypeStruct`` of the objective's batch of so many rows."""
    return self.objective.batch(self.model.inputs(rows))

  @functools.cached_property
  def abstract_batch(self) -> Shapes:
    """``jax.ShapeDtypeStruct`` of a global batch, with shardings."""
    return self._on_devices(self.batch_of(self.global_batch))

  def _on_devices(self, batch: Shapes) -> Shapes:
    sharding = self.model.batch_sharding
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch.items()}

  def lower_init(self) -> Any:
    """The program that makes the initial state; every device makes its own part of every array."""
    with use_mesh(self.model.mesh):
      places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
      return jax.jit(self.initial_state, out_shardings=places).lower(jax.ShapeDtypeStruct((), jnp.uint32))

  def lower_around(self) -> Any:
    """The program that makes the state at step 0 of the model's parameters, whose memory it takes, and a seed (uint32 scalar)
    for what is trained beside them."""
    places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    with use_mesh(self.model.mesh):
      around = jax.jit(self._around, donate_argnums=0, out_shardings=places)
      return around.lower(self.model.abstract_params, jax.ShapeDtypeStruct((), jnp.uint32))

  def lower_step(self, platform: str | None = None, *, careful: bool = False) -> Any:
    """The train step: (state, batch, known) -> (state, metrics). It takes the state's memory for the next state.

    Args:
      careful: in the careful form, which takes a state of which nothing is known.
      platform: what it is lowered for, where this process does not run on it ("tpu", ahead of time).
    """
    places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    with use_mesh(self.model.mesh):
      known = jax.ShapeDtypeStruct(UNKNOWN.shape, UNKNOWN.dtype, sharding=replicated(self.model.mesh))
      step = dataclasses.replace(self.step, careful=True) if careful else self.step
      out = places, replicated(self.model.mesh)
      program = jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=compiler_options.of_step(step))
      traced = program.trace(self.abstract_state, self.abstract_batch, known)
      return traced.lower(lowering_platforms=None if platform is None else (platform,))

  def lower_look(self) -> Any:
    """The look at a state that was given, or is to be saved: (params, opt_state) -> {"known" as the step takes it;
    "param_norm", float32 scalar; bool by row (``state_labels``), finite or not: "state_parameters", "state_optimizer"}."""

    def look(params, opt_state):
      parameters, optimizer = row_peaks(params), state_peaks(opt_state, self.selection.split(params)[0])
      known = jnp.stack([jnp.max(parameters), jnp.max(optimizer, initial=0.0)])
      found = {"known": known, "param_norm": plain_squares(params).norm().value}
      return found | {"state_parameters": jnp.isfinite(parameters), "state_optimizer": jnp.isfinite(optimizer)}

    with use_mesh(self.model.mesh):
      state = self.abstract_state
      return jax.jit(look, out_shardings=replicated(self.model.mesh)).lower(state["params"], state["opt_state"])

  def lower_eval(self) -> Any:
    """The held-out loss: (params, batch) -> (sum of the objective's evaluated term, the weight it is divided by)."""

    def evaluate(params, batch):
      _, weight, aux = self.step.apply(params, batch)
      return aux["terms"][self.objective.evaluated], weight

    with use_mesh(self.model.mesh):
      return jax.jit(evaluate).lower(self.abstract_state["params"], self._on_devices(self.batch_of(self.microbatch)))

  def place(self, batch: dict[str, np.ndarray]) -> Batch:
    """A batch of this process's rows as global arrays on the mesh.

    Raises:
      UserError: it has rows of several documents, and the program is one for rows of one.
    """
    segments = batch["segments"]
    if self.model.decoder.cfg.one_document and ((segments > 1).any() or (np.diff(segments) > 0).any()):
      raise UserError(
        "a batch has rows of several documents, and packing: false is a program for rows of one\n"
        "  fix: packing=true, which is right for every batch"
      )
    return self.model.place({name: batch[name] for name in self.abstract_batch})


def make_program(
  config: Config,
  *,
  mesh: Mesh | None = None,
  platform: str | None = None,
  capability: str | None = None,
  module_api: ModuleApi | None = None,
) -> TrainProgram:
  """Puts a run together, without any array.

  Args:
    config: of the run.
    mesh: default: the ``mesh:`` section over all devices.
    platform: "cpu", "gpu" or "tpu", where the program will run; needed for an abstract mesh, else that of its devices.
    capability: CUDA's compute capability, of devices that do not say it: those of an abstract mesh or a topology; None: not
      known, or no NVIDIA GPUs.
    module_api: default: the configuration's.

  Raises:
    UserError: as ``make_model``; nothing to train, an objective that does not fit the rows.
  """
  one_document = config.data.one_document
  model = with_given(make_model(config, mesh=mesh, platform=platform, capability=capability, one_document=one_document))
  config = model.config
  t = config.training
  model = with_base(model, config.adapter)
  decoder = model.decoder
  objective: Objective = make_objective(t.objective, model)
  adapter = None
  if config.adapter.lora_rank:
    adapter = configured_adapter(model, config.adapter, t.vision_tower)
    require_dropout(adapter, model)
    objective = Adapted(objective, adapter, model.base)
  spec = objective.params()
  selection = select(decoder, spec, config.model, t.trainable_parameters_mask, adapter, t.vision_tower)
  optimizer = make_optimizer(t, selection.split(spec)[0], "float32" if adapter else config.precision.weight_dtype)
  kind = TrainStep
  if t.optimizer_in_backward:
    kind, optimizer = functools.partial(StepInBackward, clip_by=t.clip), ByLayer.of(optimizer)
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
    careful=not optimizer.usually_proved(t.gradient_clipping_threshold),
  )
  return TrainProgram(model, objective, selection, step, adapter)


def _summed_once(decoder: Decoder, spec: Any, mesh: Mesh) -> tuple[str, ...]:
  """The mesh axes that split rows and no parameter; none where that cannot be had: two ways of splitting the rest of a program
  whose rows are split by hand abort XLA's partitioner (JAX 0.10 and 0.12), and a load-balancing loss of means over the complete
  batch is no sum over the devices' rows."""
  rules = decoder.cfg.rules
  split = {axis for p in jax.tree.leaves(spec) for entry in rules.spec(p.shape, p.axes, mesh) for axis in axes_of(entry)}
  axes = tuple(axis for axis in rules.mesh_axes("batch", mesh) if axis not in split)
  balanced = decoder.router_losses[0].needs_batch_load
  return () if balanced or len({*free_axes(mesh)} - {*axes}) > 1 else axes
