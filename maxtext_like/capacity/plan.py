"""Calculates the memory and the shortest time of a train step on machines that are not available, from shapes, in seconds.

It fills the table that ``compile`` prints for TPUs without a compiler: arrays from shapes and shardings, FLOPs from the layers,
transfers from the shardings. docs/results/memory.md compares both.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.capacity import memory, tpu_memory
from maxtext_like.capacity.chips import find_chip
from maxtext_like.capacity.compiled_program import Transfer
from maxtext_like.capacity.flops import backward_flops, forward_flops, train_flops
from maxtext_like.capacity.gathered_weights import gathered_weights
from maxtext_like.capacity.planned_traffic import KEPT, memory_bytes
from maxtext_like.capacity.roofline import Roofline, roofline
from maxtext_like.capacity.topologies import Cpus, GpuHost, Topology, assumed_gpu
from maxtext_like.capacity.transfers import transfers
from maxtext_like.config.parallelism import MeshConfig
from maxtext_like.config.schema import Config
from maxtext_like.errors import UserError
from maxtext_like.layers import tpu_layout
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys
from maxtext_like.layers.remat import offload_under
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.step.program import TrainProgram, make_program

GAPS = 1.06
"""Factor between a TPU program's memory layout (without its arguments) and its largest use, because of fragmentation. It is
1.00 to 1.21 for the programs of docs/results/memory.md; this is their mean."""

POLICIES = ("none", "save_mlp", "save_outputs", "save_attention", "full")
"""The remat policies that a search tries, in addition to the configured one."""

Target = Topology | GpuHost | Cpus


@dataclass(frozen=True, kw_only=True)
class Plan:
  """The table of a step. Bytes are per device.

  Attributes:
    config: configuration of the run.
    target: the machines.
    mesh: size of each mesh axis.
    parameters: number of parameters.
    classes: bytes by class.
    host: bytes of host memory for a device.
    limit: bytes that a device may use; None if unknown.
    flops: FLOPs of matrix products on one device, with recomputation.
    model_flops: the same without recomputation.
    memory_bytes: bytes through main memory.
    transfers: transfers between devices.
    roofline: bounds of the time; None if the device is not in the table.
  """

  config: Config
  target: Target
  mesh: dict[str, int]
  parameters: int
  classes: dict[str, int]
  host: int
  limit: int | None
  flops: float
  model_flops: float
  memory_bytes: float
  transfers: tuple[Transfer, ...]
  roofline: Roofline | None

  @property
  def bytes(self) -> int:
    """All bytes of a device."""
    return sum(self.classes.values())

  @property
  def fits(self) -> bool:
    """True if they are within the limit."""
    return self.limit is None or self.bytes <= self.limit


def plan(config: Config, target: Target) -> Plan:
  """Return the table of a configuration on machines.

  Raises:
    UserError: the mesh does not fit the machines.
  """
  platform = "tpu" if isinstance(target, Topology) else "gpu" if isinstance(target, GpuHost) else "cpu"
  slices = target.slices if isinstance(target, Topology) else None
  capability = target.capability if isinstance(target, GpuHost) else None
  try:
    mesh = abstract_mesh(config.mesh, target.devices, slices)
    program = make_program(config, mesh=mesh, platform=platform, capability=capability)
  except UserError as error:
    several = f" num_slices={slices}" if slices is not None else ""
    raise UserError(f"topology={target.name}{several}: {error}") from error
  # Memory: the estimate of a run, with the terms of the platform.
  with assumed_gpu():
    saved = memory.activation_bytes(program)
    need = memory.estimate(program, tpu_layout.numbers if platform == "tpu" else math.prod, saved)
  kept, everything = saved.kept, saved.everything
  gathered = gathered_weights(program)
  classes = {"parameters": need.parameters, "optimizer": need.optimizer, "gradients": need.gradients, "activations": kept}
  everything -= _casts(program)
  if platform == "tpu":
    again = 0 if config.training.remat_policy == "none" else everything / len(program.model.decoder.layers)
    most = GAPS * tpu_memory.in_use(program, need, kept, again, gathered)
    classes["temporaries"] = max(0, int(most) - kept - need.gradients)
  else:
    classes["activations"] = min(kept, need.activations)
    classes["temporaries"] = need.activations - classes["activations"] + need.copies + need.logits
    classes["temporaries"] += need.dequantized + need.fetched
  # Work and time: FLOPs, memory traffic, transfers and their roofline.
  t, decoder = config.training, program.model.decoder
  devices = target.devices
  model_flops = train_flops(decoder, program.spec, program.selection, program.global_batch, t.max_target_length) / devices
  flops = model_flops + _taken_again(program) / devices
  moved = memory_bytes(program, gathered, everything)
  chip = _chip(target)
  travels = transfers(program, gathered, saved.host, need.host - saved.host)
  bounds = None
  if chip is not None and chip.memory is not None:
    near = target.chips_of_slice if isinstance(target, Topology) else devices
    low = _in_float8(program) / devices
    bounds = roofline(
      chip,
      near,
      flops=flops,
      memory_bytes=moved,
      transfers=travels,
      model_flops=model_flops,
      float8_flops=low,
      dtype=config.precision.dtype,
      precision=config.precision.matmul_precision,
    )
  return Plan(
    config=config,
    target=target,
    mesh=dict(program.model.mesh.shape),
    parameters=program.size,
    classes=classes,
    host=need.host,
    limit=target.bytes,
    flops=flops,
    model_flops=model_flops,
    memory_bytes=moved,
    transfers=travels,
    roofline=bounds,
  )


def _chip(target: Target) -> Any:
  if isinstance(target, Topology):
    return find_chip(f"tpu {target.generation}")
  return find_chip(target.card) if isinstance(target, GpuHost) else None


def _casts(program: TrainProgram) -> int:
  """Return the bytes of the layers' weights in ``dtype``. They are not activations, although they would be kept if the stored
  dtype is different. They are divided among devices as in ``memory.activation_bytes``."""
  precision = program.config.precision
  if precision.dtype == precision.weight_dtype:
    return 0
  quantized = program.model.base.weights if program.model.base else {}
  stacks = [
    (path_keys(path), p)
    for path, p in jax.tree_util.tree_leaves_with_path(program.model.decoder.params())
    if path_keys(path)[0].startswith("stack_")
  ]
  size = sum(math.prod(p.shape) for path, p in stacks if len(p.shape) > 2 and path not in quantized)
  return size * jnp.dtype(precision.dtype).itemsize // (program.model.ways("heads") * program.model.ways("sequence"))


def _taken_again(program: TrainProgram) -> float:
  """Return the FLOPs, summed over all devices, of repeated computation.

  Remat repeats the layers' forward pass in each backward pass. A step repeats the forward pass if a first one finds the load of
  experts, and the backward pass if a first one measures the gradients before another one updates.
  """
  decoder, t, rows = program.model.decoder, program.config.training, program.global_batch
  backward = program.step.backward_passes
  again = backward_flops(decoder, program.spec, program.selection, rows, t.max_target_length) if backward > 1 else 0.0
  first = sum(forward_flops(decoder, program.spec, rows, t.max_target_length)) if program.step.forward_passes > 1 else 0.0
  return (backward - 1) * again + backward * _recomputed(program) + first


def _recomputed(program: TrainProgram) -> float:
  """Return the FLOPs, summed over all devices, of the layers' forward pass that remat recomputes in a backward pass."""
  decoder, t, rows = program.model.decoder, program.config.training, program.global_batch
  policy, length = t.remat_policy, t.max_target_length
  if policy == "none":
    return 0.0
  products, pairs = forward_flops(decoder, program.spec, rows, length)
  if policy in KEPT:
    return products + pairs - 2.0 * rows * length * _numbers(decoder, KEPT[policy])
  return {"full": products + pairs, "save_attention": products, "minimal": pairs}[policy]


def _in_float8(program: TrainProgram) -> float:
  """Return the FLOPs, summed over all devices, of float8 products, repeated ones included."""
  t, decoder, rows = program.config.training, program.model.decoder, program.global_batch
  length, policy, backward = t.max_target_length, t.remat_policy, program.step.backward_passes
  low = train_flops(decoder, program.spec, program.selection, rows, length, float8_alone=True)
  if backward > 1:
    low += backward_flops(decoder, program.spec, program.selection, rows, length, float8_alone=True)
  if policy in ("none", "minimal"):
    return low
  again, _ = forward_flops(decoder, program.spec, rows, length, float8_alone=True)
  kept = 2.0 * rows * length * _numbers(decoder, KEPT[policy]) if policy in KEPT else 0.0
  return low + backward * max(0.0, again - kept)


def _numbers(decoder: Decoder, weights: tuple[str, ...]) -> int:
  """Return the number of elements of weights with these names in all layers."""
  leaves = (leaf for layer in decoder.layers for leaf in jax.tree_util.tree_leaves_with_path(layer.params()))
  return sum(math.prod(p.shape) for path, p in leaves if ".".join(path_keys(path)[-2:]) in weights)


def search(config: Config, target: Target) -> list[Plan]:
  """Return the plans that fit, the best bound first, over remat policies, rows per device and meshes. Note that other rows per
  device are another batch size."""
  found = []
  for policy in dict.fromkeys((*POLICIES, config.training.remat_policy)):
    for mesh in _meshes(config, target):
      for rows in (1, 2, 4, 8):
        offload = offload_under(policy, config.training.remat_offload)
        values = {"remat_policy": policy, "remat_offload": offload, "per_device_batch_size": rows}
        training = dataclasses.replace(config.training, **values)
        try:
          tried = plan(dataclasses.replace(config, training=training, mesh=mesh), target)
        except UserError:
          break  # this model's sizes are not divisible by the mesh
        if not tried.fits:
          break
        found.append(tried)
  return sorted(found, key=lambda p: (p.roofline.step / p.model_flops if p.roofline else 0.0, p.bytes))


def _meshes(config: Config, target: Target) -> Iterator[MeshConfig]:
  """Yield meshes over tensor and data, or with experts over expert and data. fsdp takes the rest, and slices are data
  parallel."""
  slices = target.slices if isinstance(target, Topology) else 1
  inside = target.devices // slices
  ones = {name: 1 for name in vars(config.mesh) if name.endswith("_parallelism")}
  grid = [(tensor, data, 1) for tensor, data in itertools.product((1, 2, 4), (1, 2))]
  if getattr(config.model, "num_experts", 0):
    grid = [(1, 1, 1), (1, 2, 1), *((1, 1, 2**n) for n in range(2, inside.bit_length()))]
  for tensor, data, expert in grid:
    if inside % (tensor * data * expert) == 0:
      sizes = {"ici_tensor_parallelism": tensor, "ici_data_parallelism": data, "ici_expert_parallelism": expert}
      rest = {"ici_fsdp_parallelism": inside // (tensor * data * expert), "dcn_data_parallelism": slices}
      yield dataclasses.replace(config.mesh, **ones | sizes | rest)
