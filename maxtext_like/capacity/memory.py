"""Estimates the memory of a run before any is allocated, and compares it with the memory of a device."""

import contextlib
import dataclasses
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from maxtext_like.capacity import gpu_memory, memory_limits
from maxtext_like.capacity.array_bytes import Numbers, as_dtype, by_place, bytes_as, bytes_of
from maxtext_like.capacity.gathered_weights import TABLE, gathered_weights
from maxtext_like.capacity.memory_limits import GB, PINNED, Limit
from maxtext_like.capacity.topologies import GpuHost, assumed_gpu
from maxtext_like.config.schema import Config
from maxtext_like.config.training_keys import TrainingConfig
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import DoesNotFitError, UserError
from maxtext_like.layers.param import abstract
from maxtext_like.layers.quantization.quantized import ShapesOnly
from maxtext_like.layers.remat import offload_under
from maxtext_like.layers.sharding_rules import MESH_AXES
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.objectives.adapted import Adapted
from maxtext_like.training.objectives.objective import Objective
from maxtext_like.training.optimizers import on_host
from maxtext_like.training.optimizers.by_layer import parts_of, take
from maxtext_like.training.optimizers.registry import make_rule
from maxtext_like.training.step.program import TrainProgram, make_program
from maxtext_like.training.step.trainable import merge


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
  """Bytes on one device.

  The terms copies, activations and logits of a GPU's estimate are those that are in use at the same time
  (docs/results/memory.md).

  Attributes:
    parameters: the stored parameters.
    optimizer: the optimizer's state.
    gradients: the gradients; with accumulation also their sum; with ``optimizer_in_backward`` only those that exist at the same
      time.
    copies: on a GPU, further arrays of the loss or of the update: the head's gradient of one chunk and the head in 16 bits; the
      updates of all arrays, if the optimizer's rule needs complete arrays and the update is checked; with
      ``optimizer_in_backward``, updated layers before they are written to their stacks.
    activations: kept from the forward pass for the backward pass, and working memory.
    logits: logits of a chunk, and their gradient.
    dequantized: the largest quantized weight of a layer, dequantized for both passes at the same time.
    fetched: on GPUs that shard the weights, the gathered weights of the largest part of a layer, and their float32 gradient
      before it is scattered.
    host: bytes in host memory for the device (``remat_offload``, ``optimizer_memory_host_offload``), which are not part of the
      total.
  """

  parameters: int
  optimizer: int
  gradients: int
  copies: int
  activations: int
  logits: int
  dequantized: int
  fetched: int = 0
  host: int = 0

  @property
  def total(self) -> int:
    """The sum of everything on the device."""
    return sum(getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "host")


class Saved(NamedTuple):
  """Bytes that the forward pass keeps for one device.

  Attributes:
    kept: kept for the backward pass on the device.
    everything: what it would keep without rematerialization.
    host: kept for the backward pass in host memory. On a CPU this counts as kept.
  """

  kept: int
  everything: int
  host: int = 0


def _saved_bytes(objective: Objective, program: TrainProgram, casts: bool = True) -> tuple[int, int]:
  """Return the bytes that ``jax.vjp`` of the loss keeps for one device's part of the rows, in addition to the parameters and
  the batch: on the device, and in host memory.

  Positions are sharded over the sequence axis. Arrays with heads or a hidden size are sharded over the tensor axis; arrays of
  the width of the residual stream, and the layers' own inputs, are complete on all devices of the tensor axis. Logits, which a
  loss without chunks keeps, are counted separately. Without ``casts``, the layers' weights in ``dtype`` are not counted: on
  several GPUs XLA casts those of unrolled layers where it needs them. On a single GPU they are cast while the weights are
  unstacked (``weight.unstacked``), and stay until the backward pass.
  """
  model = program.model
  batch = program.batch_of(model.rows // model.ways("batch"))

  def residuals(params, batch):
    trained, frozen = program.selection.split(params)

    def total(trained):
      value, _, aux = objective(merge(trained, frozen), batch)
      return value + sum(aux["means"].values())

    _, backward = jax.vjp(total, trained)
    given = {id(x) for x in jax.tree.leaves((params, batch))}
    kept = {id(x): x for x in jax.tree.leaves(backward) if id(x) not in given}.values()
    by_host = [[x for x in kept if (jax.typeof(x).memory_space == jax.memory.Space.Host) is there] for there in (False, True)]
    return tuple(by_host)

  params = abstract(objective.params())
  with _as_on_one_gpu() if _platform(program) == "gpu" else contextlib.nullcontext():
    kept, away = jax.eval_shape(residuals, params, batch)
  # Gradients that are computed in the forward pass are kept too, complete on every device, and counted as gradients.
  gradients = objective.made_in_forward(program.selection.split(params)[0])
  vocabulary = program.config.model.vocab_size
  kept = [x for x in kept if x.ndim < 3 or x.shape[-1] != vocabulary]
  for gradient in jax.tree.leaves(gradients):
    kept.pop(next(i for i, x in enumerate(kept) if (x.shape, x.dtype) == (gradient.shape, gradient.dtype)))
  # Layers outside of loops: XLA reads slices of their weights in place, so the slices are not counted.
  dtype = jnp.dtype(program.config.precision.dtype)
  for stack in model.decoder.stacks:
    for weight in jax.tree.leaves(params.get(stack.name, {})):
      shape = weight.shape[1:] if stack.repeats == 1 else weight.shape
      if stack.repeats == 1:
        _leave_out(kept, shape, weight.dtype)
      if not casts and len(weight.shape) > 2 and weight.dtype != dtype:
        _leave_out(kept, shape, dtype)
  inputs = model.decoder.cfg.per_layer_input
  whole = lambda x: (
    x.shape[-1] == program.config.model.emb_dim or (inputs is not None and x.shape[-2:] == (inputs.num_layers, inputs.width))
  )

  def own(arrays):
    stream = [x for x in arrays if x.ndim > 1 and whole(x)]
    split = (bytes_of(arrays) - bytes_of(stream)) // model.ways("heads")
    return (bytes_of(stream) + split) // model.ways("sequence")

  return own(kept), own(away)


def _as_on_one_gpu() -> AbstractContextManager[Any]:
  """Trace layers in the form for a single GPU, which keeps other arrays than on other devices. It is a single one because a
  device's own rows are traced."""
  ones = dict.fromkeys(MESH_AXES, 1)
  gpu = AbstractDevice(device_kind="any", num_cores=None, platform="gpu")
  kinds = (AxisType.Auto,) * len(ones)
  return jax.sharding.use_abstract_mesh(AbstractMesh((*ones.values(),), (*ones,), axis_types=kinds, abstract_device=gpu))


def _leave_out(kept: list[Any], shape: tuple[int, ...], dtype: Any) -> None:
  """Remove one such array from the list, if there is one."""
  same = (i for i, x in enumerate(kept) if (x.shape, x.dtype) == (shape, dtype))
  if (at := next(same, None)) is not None:
    kept.pop(at)


def _scanned(program: TrainProgram) -> Objective:
  """Return the objective with layers in loops: unrolled layers keep slices of the stacked weights, which XLA reads in place.

  A product with a quantized weight does not keep the dequantized weight, so it need not be materialized here.
  """
  decoder, objective = program.model.decoder, program.objective
  if isinstance(objective, Adapted) and objective.base is not None:
    outline = dataclasses.replace(objective.base, form=ShapesOnly(objective.base.form))
    objective = dataclasses.replace(objective, base=outline)
  return objective.with_decoder(dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, scan_layers=True)))


def activation_bytes(program: TrainProgram) -> Saved:
  """Return the bytes that the forward pass keeps for the backward pass, and those that it would keep without
  rematerialization."""
  objective, decoder = _scanned(program), program.model.decoder
  kept, host = _saved_bytes(objective, program)
  if _platform(program) == "cpu":
    kept, host = kept + host, 0
  if decoder.cfg.remat_policy == "none":
    return Saved(kept, kept)
  cfg = dataclasses.replace(decoder.cfg, scan_layers=True, remat_policy="none", remat_offload="none")
  everything, _ = _saved_bytes(objective.with_decoder(dataclasses.replace(decoder, cfg=cfg)), program)
  return Saved(kept, everything, host)


def _platform(program: TrainProgram) -> str:
  return program.model.decoder.layers[0].cfg.mixer.platform


def estimate(program: TrainProgram, numbers: Numbers = math.prod, saved: Saved | None = None) -> MemoryEstimate:
  """Estimate the memory that the train step needs on one device, from shapes and shardings, in about a second.

  Activations are those that JAX's own transformation keeps, so the remat policy, the attention kernel and the dtypes are taken
  into account. With rematerialization the activations of one layer are added, which are recomputed during its backward pass.

  The estimate is used to refuse runs that cannot fit. docs/results/memory.md compares it with XLA's own count.

  Args:
    program: program of the run.
    numbers: element count of the state and the gradients, if they are padded to tiles.
    saved: its ``activation_bytes``, which take most of the time; computed here if None.
  """
  t = program.config.training
  state = program.abstract_state
  # Gradients.
  trained, _ = program.selection.split(state["params"])
  gradient = jax.tree.map(lambda x: as_dtype(x, x.dtype), trained)
  gradients = _together(gradient, numbers) if t.optimizer_in_backward else bytes_of(gradient, numbers)
  platform = _platform(program)
  if t.gradient_accumulation_steps > 1:
    gradients += bytes_of(as_dtype(trained, jnp.float32), numbers)
  # Activations, and what remat recomputes of one layer at a time.
  objective, model = program.objective, program.model
  activations, everything, host = saved or activation_bytes(program)
  besides = {k: v for k, v in state.items() if k != "params"}
  here, away = (besides, []) if platform == "cpu" else by_place(besides)
  again = 0
  if t.remat_policy != "none":
    tower = model.decoder.cfg.vision
    paths = [{entry.key for entry in path} for path, _ in jax.tree_util.tree_leaves_with_path(trained)]
    # A tower without gradients keeps nothing.
    beside = tower.num_layers if tower and any({"vision", "layers"} <= names for names in paths) else 0
    again = everything // (len(model.decoder.layers) + beside)
  dequantized = 0 if model.base is None else 2 * model.base.bytes_at_work(jnp.dtype(program.config.precision.dtype).itemsize)
  # Logits, and on a GPU the arrays that are in use at the same time.
  logits = objective.logit_bytes(model.rows // model.ways("batch"), t.max_target_length)
  logits //= model.ways("sequence") * model.ways("vocab")
  copies = 0
  if program.adapter is not None and platform == "gpu":
    copies = _sliced(program, state["params"]) if model.base is None else 0
    whole = program.adapter.replaced(gradient)
    with_logits = bytes_of({key: whole[key] for key in ("embedding", "head") if key in whole})
    logits = max(0, logits - (bytes_of(gradient) - with_logits) - again - dequantized - copies)
  again += _in_tiles(program)
  kept, activations = activations, activations + again
  if platform == "gpu" and t.optimizer_in_backward:
    gradients, copies, activations, logits = gpu_memory.in_backward(program, gradient, kept, again, logits)
  elif platform == "gpu":
    if program.adapter is None and t.gradient_accumulation_steps == 1:
      activations, logits, copies = _in_use_together(program, gradient, activations, logits)
    if program.step.optimizer.rule.whole and program.step.checked:
      copies = max(copies, bytes_as(jnp.float32, gradient) - activations - logits)
  return MemoryEstimate(
    parameters=bytes_of(state["params"], numbers),
    optimizer=bytes_of(here, numbers),
    gradients=gradients,
    copies=copies,
    activations=activations,
    logits=logits,
    dequantized=dequantized,
    fetched=_gathered_bytes(program) if platform == "gpu" else 0,
    host=host + bytes_of(away),
  )


def _in_tiles(program: TrainProgram) -> int:
  """Return the bytes of a layer that processes its queries tile by tile; JAX does not keep them."""
  model, length = program.model, program.config.training.max_target_length
  rows, ways, parts = model.rows // model.ways("batch"), model.ways("heads"), model.ways("sequence")
  tile = lambda mixer, kv_b: mixer.tile_bytes(rows, length, mixer.cfg.num_heads // ways, kv_b, parts)
  return max((tile(*own) for own in program.latent_attention), default=0)


def _sliced(program: TrainProgram, params: Any) -> int:
  """Return the bytes of weights that a loop over rows of several layers has copied out of their stacks, in the dtype of the
  products: those of all its layers but one. If the weights are trained, their gradients use this memory."""
  if not program.config.training.scan_layers:
    return 0
  dtype = jnp.dtype(program.config.precision.dtype)
  loops = [stack for stack in program.model.decoder.stacks if stack.repeats > 1]
  row = lambda stack: bytes_as(dtype, params[stack.name]) // stack.repeats
  return max((row(stack) * (len(stack.layers) - 1) // len(stack.layers) for stack in loops), default=0)


def _in_use_together(program: TrainProgram, gradient: Any, activations: int, logits: int) -> tuple[int, int, int]:
  """Return activations, logits and copies on a GPU that are in use together with all gradients at the peak."""
  t = program.config.training
  made = program.objective.made_in_forward(gradient)
  head = bytes_as(jnp.float32, made)
  loops = [stack for stack in program.model.decoder.stacks if t.scan_layers and stack.repeats > 1]
  if any(len(stack.layers) > 1 for stack in loops):
    return activations, logits, head
  # The peak is in the loss or at the end of the backward pass. By then the memory of the loss is free, and without a loop with
  # stacks also that of the activations. Whatever fits into the memory of the gradients counts as 0.
  if not loops and t.remat_policy == "none":
    activations, _ = _saved_bytes(_scanned(program), program, casts=program.model.mesh.size == 1)
    loss = gpu_memory.in_loss(program, gradient, activations, logits)
    more, logits = sum(loss) - bytes_of(gradient), loss.logits
  else:
    dtype = jnp.dtype(program.config.precision.dtype)
    copies = head + (bytes_as(dtype, made) if dtype.itemsize < 4 else 0)
    more = head + activations + logits + copies - bytes_of(gradient)
  if loops:
    more -= activations
  else:
    activations = min(activations, max(0, more))
    more -= activations
  logits = min(logits, max(0, more))
  return activations, logits, max(0, more - logits)


def _gathered_bytes(program: TrainProgram) -> int:
  """Return the bytes of ``MemoryEstimate.fetched``."""
  parts: dict[str, int] = {}
  for weight in gathered_weights(program):
    if weight.part != TABLE:
      parts[weight.part] = parts.get(weight.part, 0) + weight.bytes + 4 * weight.numbers * weight.trained
  return max(parts.values(), default=0)


def _together(gradient: Any, numbers: Numbers) -> int:
  """Return the bytes of the gradients that exist at the same time if each layer is updated as soon as it has a gradient: those
  of a layer, and those of everything outside the stacks. The latter are float32 for a while: a head's gradient is summed in
  float32, and updates are computed in float32 before rounding."""
  parts = {part: take(gradient, part) for part in parts_of(gradient)}
  outside = as_dtype(parts.pop(()), jnp.float32)
  rows = {part: max((x.shape[0] for x in jax.tree.leaves(tree)), default=1) for part, tree in parts.items()}
  layer = max((bytes_of(tree, numbers) // rows[part] for part, tree in parts.items()), default=0)
  return bytes_of(outside, numbers) + layer


def table(need: MemoryEstimate, limit: Limit | None) -> str:
  """Format the estimate in GB (1e9 bytes) per device."""
  parts = [(f.name, getattr(need, f.name)) for f in dataclasses.fields(need) if f.name != "host"]
  always = ("parameters", "optimizer", "gradients", "activations")
  rows = [*((name, size) for name, size in parts if size or name in always), ("total", need.total)]
  lines = [f"  {name:<12} {size / GB:10.2f} GB" for name, size in rows]
  if limit is not None:
    lines.append(f"  {'available':<12} {limit.bytes / GB:10.2f} GB  ({limit.source})")
  if need.host:
    lines.append(f"  {'host':<12} {need.host / GB:10.2f} GB  (in host memory)")
  return "\n".join(lines)


def for_gpus(config: Config, host: GpuHost) -> tuple[TrainProgram, MemoryEstimate, Limit]:
  """Return the program of a run on GPUs that are not available (it cannot be compiled), the estimate that ``train`` makes, and
  the limit.

  Raises:
    UserError: as ``make_program``, or the mesh does not fit the host.
  """
  try:
    program = make_program(config, mesh=abstract_mesh(config.mesh, host.gpus), platform="gpu", capability=host.capability)
  except UserError as error:
    raise UserError(f"topology={host.name}: {error}") from error
  with assumed_gpu():
    need = estimate(program)
  return program, need, Limit(host.bytes, f"{host.share:g} of the {host.card_bytes / GB:.2f} GB of one {host.card}")


def require_fit(program: TrainProgram, saved: Saved | None = None) -> tuple[MemoryEstimate, Limit | None]:
  """Return the estimate and the limit, or raise if the estimate exceeds the limit.

  Raises:
    DoesNotFitError: with the table and the possible remedies.
    UserError: as ``host_room``.
  """
  need = estimate(program, saved=saved)
  here = [d for d in program.model.devices if d.process_index == jax.process_index()]
  limit = memory_limits.device_limit(here[0], len(here))
  if limit is not None and need.total > limit.bytes:
    raise DoesNotFitError(
      f"{program.config.model.model_name} does not fit: {need.total / GB:.1f} GB are needed on each of "
      f"{program.model.mesh.size} device(s), {limit.bytes / GB:.1f} GB are available\n"
      f"{table(need, limit)}\n{remedies(program, need, limit)}"
    )
  # Host memory is shared by the devices of the process.
  room, together = memory_limits.host_room(_platform(program)), need.host * len(here)
  if together and room is not None and together > room.bytes:
    t = program.config.training
    keys = {"remat_offload": t.remat_offload, on_host.KEY: t.optimizer_memory_host_offload}
    said = ", ".join(f"{key} = {to_text(value)}" for key, value in keys.items() if value not in ("none", False))
    words = [] if t.remat_offload == "none" else ["a smaller per_device_batch_size", "remat_offload=none"]
    if t.optimizer_memory_host_offload:
      words += [*filter(None, [_eight_bits(t)]), f"{on_host.KEY}=false"]
    words += [f"{PINNED} above {room.bytes >> 30} if the host has more"] if room.source.startswith(PINNED) else []
    raise DoesNotFitError(
      f"{said}: {together / GB:.1f} GB of host memory are needed for "
      f"the {len(here)} device(s) of this process, {room.bytes / GB:.1f} GB are available ({room.source})\n"
      f"what to try: {', or '.join(words)}"
    )
  return need, limit


def _eight_bits(training: TrainingConfig) -> str:
  """Return the settings that store all existing moments in 8 bits; "" if they already are, or there are none."""
  rule = make_rule(training)
  moments = (("mu_dtype", rule.first), ("nu_dtype", rule.second))
  return " ".join(f"{key}=dynamic8" for key, moment in moments if moment and getattr(training, key) != "dynamic8")


def remedies(program: TrainProgram, need: MemoryEstimate, limit: Limit | None) -> str:
  """Return the settings that reduce memory, in the order to try them."""
  t, precision = program.config.training, program.config.precision
  offload = offload_under("full", t.remat_offload)
  full = "remat_policy=full" + (f" remat_offload={offload}" if offload != t.remat_offload else "")
  lines = []
  if t.per_device_batch_size > 1:
    now, same = t.per_device_batch_size, t.per_device_batch_size * t.gradient_accumulation_steps
    update = "" if t.optimizer_in_backward or same % 1 else f"; gradient_accumulation_steps={same:g} keeps the update the same"
    lines.append(f"per_device_batch_size=1 (now {now:g}){update}")
  if t.remat_policy != "full":
    lines.append(f"{full} (now {t.remat_policy}): recompute activations instead of keeping them")
  elif t.remat_offload == "none" and program.model.decoder.loops and _platform(program) != "cpu":
    lines.append("remat_offload=layer_inputs: keep the layers' inputs in host memory instead of on the device")
  if t.max_target_length > 128 and need.activations + need.logits > need.parameters:
    lines.append(f"a smaller max_target_length (now {t.max_target_length})")
  states = need.parameters + need.optimizer + need.gradients
  if limit is not None and states > limit.bytes:
    ways = math.ceil(states * program.model.mesh.shape["fsdp"] / (0.8 * limit.bytes))
    lines.append(f"shard over more devices: about {ways} of this kind (ici_fsdp_parallelism)")
  if eight := _eight_bits(t):
    lines.append(f"{eight}: store the moments in 8 bits")
  if smaller := program.step.optimizer.rule.smaller:
    usual = "" if t.mu_dtype is None and t.nu_dtype == "float32" else " mu_dtype=null nu_dtype=float32"
    lines.append(f"{smaller}{usual}: moments that take almost no memory")
  if precision.weight_dtype == "float32" and precision.dtype != "float16":
    half = "parameters and gradients" if program.adapter is None else "weights that are not quantized"
    lines.append(f"weight_dtype=bfloat16: half the memory of the {half}, with less precision")
  apart = t.gradient_accumulation_steps == 1 and program.adapter is None and not program.config.logging.numerics_every
  if not t.optimizer_in_backward and apart:
    lines.append(
      f"optimizer_in_backward=true {full}: only one layer's gradients at a time (docs/guides/large-model-one-gpu.md)"
    )
  moments = t.optimizer_in_backward and t.scan_layers and not t.optimizer_memory_host_offload and _platform(program) != "cpu"
  if moments and 5 * need.optimizer > need.total:
    lines.append(f"{on_host.KEY}=true: keep the layers' moments in host memory instead of on the device")
  if not t.trainable_parameters_mask and program.adapter is None and t.vision_tower is None:
    lines.append("trainable_parameters_mask=[...]: train fewer parameters; frozen ones have no gradient and no moments")
  return "\n".join(["what to try, in this order:"] + [f"  - {line}" for line in lines])
