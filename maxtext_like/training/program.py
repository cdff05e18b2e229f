"""From a configuration to what runs on the devices: shapes, shardings and the compiled programs of a training run."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import abstract, init, shardings
from maxtext_like.models.attention_kernels import KernelUse, settle
from maxtext_like.models.build import build_decoder, precision_of
from maxtext_like.sharding.mesh import Mesh, batch_sharding, make_mesh, replicated, use_mesh
from maxtext_like.training import loss_scale
from maxtext_like.training.faces import ModuleApi, make_apply
from maxtext_like.training.loss import IGNORED, LossLayer, automatic_pieces
from maxtext_like.training.optimizer import make_certainly_finite, make_optimizer, state_shardings, usually_proved
from maxtext_like.training.rounding import StochasticRounding
from maxtext_like.training.router_bias import find_router_bias
from maxtext_like.training.row_norms import row_labels, split_squares, state_labels, state_peaks
from maxtext_like.training.schedule import make_schedule
from maxtext_like.training.step import UNKNOWN, Batch, State, TrainStep
from maxtext_like.training.trainable import Selection, select

BATCH_KEYS = ("tokens", "targets", "positions", "segments")


@dataclass(frozen=True, eq=False)
class Program:
  """Everything about a run that follows from its configuration and its devices. Holds no array.

  Attributes:
    config: of the run.
    mesh: devices in a grid; an abstract mesh has sizes only, so that its programs can be lowered and not run.
    decoder: the model.
    loss: the decoder with its loss.
    selection: what is trained.
    optimizer: the direction of descent.
    step: the pure train step.
    kernels: what the attention layers run on, and why; empty where no fused kernel could do them.
  """

  config: Config
  mesh: Mesh
  decoder: Decoder
  loss: LossLayer
  selection: Selection
  optimizer: optax.GradientTransformation
  step: TrainStep
  kernels: tuple[KernelUse, ...] = ()

  @functools.cached_property
  def spec(self) -> Any:
    """The decoder's declared parameters."""
    return self.decoder.params()

  @property
  def devices(self) -> list[Any]:
    """The devices of the mesh, which is not an abstract one."""
    assert isinstance(self.mesh, jax.sharding.Mesh)
    return list(self.mesh.devices.flat)

  @property
  def microbatch(self) -> int:
    """Rows that all devices work on at a time."""
    return self.config.training.per_device_batch_size * self.mesh.size

  @property
  def global_batch(self) -> int:
    """Rows of an update over all devices and parts."""
    return self.microbatch * self.config.training.gradient_accumulation_steps

  @functools.cached_property
  def labels(self) -> list[str]:
    """Parameter names behind the entries of the metrics' "gradients" and "parameters"."""
    return row_labels(self.decoder, self.selection.split(self.spec)[0])

  @functools.cached_property
  def state_labels(self) -> dict[str, list[str]]:
    """Names behind the entries of the metrics' "optimizer", "state_parameters" and "state_optimizer"."""
    state = self.abstract_state
    optimizer = state_labels(self.decoder, state["opt_state"], self.selection.split(state["params"])[0])
    everything = row_labels(self.decoder, self.spec)
    return {"optimizer": optimizer, "state_parameters": everything, "state_optimizer": optimizer}

  def initial_state(self, seed: jax.Array) -> State:
    """The state at step 0, a pure function of the seed (uint32 scalar). Traced, never run as it stands."""
    params = init(self.spec, jax.random.key(seed))
    return self._around(params)

  def _around(self, params: Any) -> State:
    state: State = {
      "step": jnp.zeros((), jnp.int32),
      "params": params,
      "opt_state": self.optimizer.init(self.selection.split(params)[0]),
    }
    if self.config.precision.dtype == "float16":
      state["loss_scale"] = loss_scale.initial(self.config.training.loss_scale_init)
    return state

  @functools.cached_property
  def abstract_state(self) -> State:
    """``jax.ShapeDtypeStruct`` with a sharding for every array of the state."""
    shapes = jax.eval_shape(self._around, abstract(self.spec))
    params = shardings(self.spec, self.mesh)
    everywhere = replicated(self.mesh)
    places = jax.tree.map(lambda _: everywhere, shapes) | {"params": params}
    trained_shapes, trained_places = (self.selection.split(tree)[0] for tree in (shapes["params"], params))
    places["opt_state"] = state_shardings(shapes["opt_state"], trained_shapes, trained_places, everywhere)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)

  def batch_of(self, rows: int, sharding: jax.sharding.Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """``jax.ShapeDtypeStruct`` of so many rows: [rows, T] each; with images [rows, max_images_per_row, ...] too."""
    length, v = self.config.training.max_target_length, self.config.vision
    shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(BATCH_KEYS, (rows, length, jnp.int32))
    if v.use_multimodal:
      images = (rows, v.max_images_per_row)
      shapes["token_types"] = (rows, length, jnp.int32)
      for name, shape in v.image_shapes().items():
        shapes[name] = (*images, *shape, jnp.float32 if name == "pixel_values" else jnp.int32)
    return {k: jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding) for k, (*shape, dtype) in shapes.items()}

  @functools.cached_property
  def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """``jax.ShapeDtypeStruct`` of a global batch."""
    return self.batch_of(self.global_batch, batch_sharding(self.mesh))

  def lower_init(self) -> Any:
    """The program that makes the initial state; every device makes its own part of every array."""
    with use_mesh(self.mesh):
      places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
      return jax.jit(self.initial_state, out_shardings=places).lower(jax.ShapeDtypeStruct((), jnp.uint32))

  def lower_around(self) -> Any:
    """The program that makes the state at step 0 around given parameters, whose memory it takes."""
    places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    with use_mesh(self.mesh):
      return jax.jit(self._around, donate_argnums=0, out_shardings=places).lower(self.abstract_state["params"])

  def lower_step(self, platform: str | None = None, *, careful: bool = False) -> Any:
    """The train step: (state, batch, known) -> (state, metrics). It takes the state's memory for the next state.

    Args:
      careful: in the careful form, which takes a state of which nothing is known.
      platform: what it is lowered for, where this process does not run on it ("tpu", ahead of time).
    """
    places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
    with use_mesh(self.mesh):
      known = jax.ShapeDtypeStruct(UNKNOWN.shape, UNKNOWN.dtype, sharding=replicated(self.mesh))
      step = dataclasses.replace(self.step, careful=True) if careful else self.step
      program = jax.jit(step, donate_argnums=0, out_shardings=(places, replicated(self.mesh)))
      traced = program.trace(self.abstract_state, self.abstract_batch, known)
      return traced.lower(lowering_platforms=None if platform is None else (platform,))

  def lower_look(self) -> Any:
    """The look at a state that was given, or is to be saved: (params, opt_state) -> {"known" as the step takes it; bool by
    row (``state_labels``), finite or not: "state_parameters", "state_optimizer"}."""

    def look(params, opt_state):
      sizes, peaks = split_squares(params), state_peaks(opt_state, self.selection.split(params)[0])
      known = jnp.stack([sizes.largest(), jnp.max(peaks, initial=0.0)])
      return {"known": known, "state_parameters": sizes.finite, "state_optimizer": jnp.isfinite(peaks)}

    with use_mesh(self.mesh):
      state = self.abstract_state
      return jax.jit(look, out_shardings=replicated(self.mesh)).lower(state["params"], state["opt_state"])

  def lower_eval(self) -> Any:
    """The held-out loss: (params, batch) -> (sum of the cross entropies, number of real targets)."""

    def evaluate(params, batch):
      _, aux = self.step.apply(params, batch)
      return aux["terms"]["cross_entropy"], jnp.sum(batch["targets"] != IGNORED)

    with use_mesh(self.mesh):
      batch = self.batch_of(self.microbatch, batch_sharding(self.mesh))
      return jax.jit(evaluate).lower(self.abstract_state["params"], batch)

  def place(self, batch: dict[str, np.ndarray]) -> Batch:
    """A batch of this process's rows as global arrays on the mesh."""
    sharding = batch_sharding(self.mesh)
    return {k: jax.make_array_from_process_local_data(sharding, batch[k]) for k in self.abstract_batch}


def make_program(
  config: Config,
  *,
  mesh: Mesh | None = None,
  platform: str | None = None,
  module_api: ModuleApi | None = None,
  runs_attention: bool = True,
) -> Program:
  """Puts a run together, without any array.

  On a device that is here, a fused attention kernel is tried before it is used (see ``kernels.settle``).

  Args:
    config: of the run.
    mesh: default: the ``mesh:`` section over all devices.
    platform: "cpu", "gpu" or "tpu", where the program will run; needed for an abstract mesh, else that of its devices.
    module_api: default: the configuration's.
    runs_attention: False where the decoder's attention over whole rows is never called, as in generation: its kernels
      are not looked at then.

  Raises:
    UserError: sizes that no model can have, nothing to train, axes that do not fit the devices, a kernel that the
      configuration names and that cannot do this or failed its self-test.
  """
  t = config.training
  mesh = make_mesh(config.mesh) if mesh is None else mesh
  device = None  # to try kernels on; a topology's device is known to a compiler only
  if not isinstance(mesh, jax.sharding.AbstractMesh):
    first = mesh.devices.flat[0]
    own = "gpu" if first.platform in ("cuda", "rocm") else first.platform
    platform = platform or own
    device = mesh.local_devices[0] if platform == own and first in jax.devices() else None
  assert platform is not None, "an abstract mesh does not say where the program will run"
  try:
    decoder = build_decoder(
      config.model,
      precision_of(config.precision),
      layer_precision=config.precision.layer_precision,
      vision=config.vision,
      scan_layers=t.scan_layers,
      remat_policy=t.remat_policy,
      attention=t.attention,
      platform=platform,
    )
  except ValueError as error:
    raise UserError(str(error)) from error
  kernels = ()
  if runs_attention:
    decoder, kernels = settle(
      decoder,
      length=t.max_target_length,
      images=config.vision.use_multimodal,
      device=device,
      cache=config.logging.compilation_cache_dir,
    )
  spec = decoder.params()
  selection = select(decoder, spec, config.model, t.trainable_parameters_mask)
  pieces = t.num_vocab_tiling or automatic_pieces(t.per_device_batch_size, t.max_target_length, config.model.vocab_size)
  if pieces > t.max_target_length:
    raise UserError(
      f"num_vocab_tiling = {pieces} is more than max_target_length = {t.max_target_length}: the loss is cut along the sequence"
    )
  loss = LossLayer(decoder, t.z_loss_multiplier, pieces)
  optimizer = make_optimizer(t, selection.split(spec)[0], config.precision.weight_dtype)
  # Where a mask or the model says what is trained, the biases of the routers stay as they are.
  everything = not t.trainable_parameters_mask and not config.model.trained_part
  step = TrainStep(
    apply=make_apply(loss, t.module_api if module_api is None else module_api),
    selection=selection,
    optimizer=optimizer,
    certainly_finite=make_certainly_finite(t, config.precision.weight_dtype),
    schedule=make_schedule(t),
    clip=t.gradient_clipping_threshold,
    parts=t.gradient_accumulation_steps,
    grad_dtype=config.precision.grad_dtype,
    router_bias=find_router_bias(decoder, config.model.router_bias_rate) if everything else None,
    probed_stacks={s.name: (s.repeats, len(s.block)) for s in decoder.stacks} if config.logging.numerics_every else None,
    rounding=StochasticRounding(t.seed) if t.stochastic_rounding else None,
    careful=not usually_proved(t, config.precision.weight_dtype),
  )
  return Program(config, mesh, decoder, loss, selection, optimizer, step, kernels)
