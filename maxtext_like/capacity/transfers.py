"""Transfers between devices in a step, calculated from shapes and the sharding of arrays.

docs/guides/parallelism.md explains what each mesh axis transfers. Bytes are those through one device's links.

P devices, t tokens of a device, k choices of a token, D model, K key-value heads.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from maxtext_like.capacity.compiled_program import HOST_COPIES, Transfer
from maxtext_like.capacity.gathered_weights import TABLE, GatheredWeight
from maxtext_like.layers.attention.context_parallel import past_of
from maxtext_like.layers.moe.expert_parallel import SLACK
from maxtext_like.layers.param import path_keys
from maxtext_like.layers.partition import axes_of
from maxtext_like.layers.sharding_rules import GATHERED
from maxtext_like.models.adapter import model_path
from maxtext_like.training.objectives.adapted import Adapted
from maxtext_like.training.step.program import TrainProgram

Axes = tuple[str, ...]


def transfers(program: TrainProgram, weights: list[GatheredWeight], host: int = 0, moments: int = 0) -> tuple[Transfer, ...]:
  """Return the transfers of one step, without those of 0 bytes.

  Args:
    program: program of the run.
    weights: the sharded weights that are gathered.
    host: bytes that the forward pass of a microbatch keeps in host memory.
    moments: bytes of the optimizer's state in host memory.
  """
  others = (_of_gradients, _of_tokens, _of_keys, _of_sums)
  found = (*_of_weights(program, weights), *(t for kind in others for t in kind(program)), *_of_host(program, host, moments))
  return tuple(t for t in found if t.bytes)


def _leaves_a_slice(program: TrainProgram, axes: Axes) -> bool:
  return any(getattr(program.config.mesh, f"dcn_{axis}_parallelism") > 1 for axis in axes if program.model.mesh.shape[axis] > 1)


def summed_bytes(program: TrainProgram) -> int:
  """Return the bytes of an element in a reduction between devices."""
  precision = program.config.precision
  return 4 if precision.reduction_dtype == "float32" else jnp.dtype(precision.dtype).itemsize


def passes(program: TrainProgram) -> int:
  """Return how often a microbatch transfers what a layer transfers in a forward pass: once per pass, plus recomputation."""
  again = program.config.training.remat_policy not in ("none", "minimal")
  return program.step.forward_passes + program.step.backward_passes * (1 + again)


def _microbatches(program: TrainProgram) -> int:
  return program.config.training.gradient_accumulation_steps


def pieces(program: TrainProgram) -> int:
  """Return the number of chunks of the logits; 1 for an objective without chunks."""
  objective = program.objective
  return getattr(objective.inner if isinstance(objective, Adapted) else objective, "chunks", 1)


def _of_weights(program: TrainProgram, weights: list[GatheredWeight]) -> Iterator[Transfer]:
  """Weights that are sharded only to save memory: gathered for the products of all passes, and their gradients scattered."""
  parts, layers, backward = _microbatches(program), len(program.model.decoder.layers), program.step.backward_passes
  chunks = pieces(program)
  grow = summed_bytes(program) / jnp.dtype(program.config.precision.dtype).itemsize
  for between in (False, True):
    own = [w for w in weights if _leaves_a_slice(program, w.axes) is between]
    every, head = (
      sum(w.bytes * (w.ways - 1) / w.ways for w in own if (w.part == TABLE) is of_table) for of_table in (False, True)
    )
    back, back_head = (
      sum(w.bytes * (w.ways - 1) / w.ways for w in own if w.trained and (w.part == TABLE) is of_table)
      for of_table in (False, True)
    )
    both = (1 + backward) * parts
    yield Transfer("all-gather", int(both * every), both * layers, asynchronous=True, between_slices=between)
    yield Transfer("all-gather", int(parts * chunks * head), parts * chunks, False, between)
    times = parts * (backward * layers + (chunks if back_head else 0))
    yield Transfer("reduce-scatter", int(parts * (backward * back + chunks * back_head) * grow), times, False, between)


def _of_host(program: TrainProgram, host: int, moments: int) -> Iterator[Transfer]:
  """Activations in host memory for each backward pass, and optimizer state that is updated on the device one layer at a
  time."""
  parts = _microbatches(program)
  layers = sum(s.repeats * len(s.layers) for s in program.model.decoder.loops)
  for kind, times in zip(HOST_COPIES, (parts, parts * program.step.backward_passes), strict=True):
    yield Transfer(kind, times * host, times * layers, asynchronous=True)
    # XLA for CUDA copies rows of them with kernels that do not overlap with computation.
    hidden = program.model.decoder.layers[0].cfg.mixer.platform != "gpu"
    yield Transfer(kind, moments, len(program.model.decoder.layers), asynchronous=hidden)


def _of_gradients(program: TrainProgram) -> Iterator[Transfer]:
  """Reductions of the gradients of arrays that are replicated over devices with different tokens. Over rows, a table's gradient
  is reduced for each chunk of the logits."""
  model = program.model
  table = "embedding" if model.decoder.cfg.tied else "head"
  mesh, rules = model.mesh, model.decoder.cfg.rules
  of_rows = rules.mesh_axes("batch", mesh)
  of_tokens = (*of_rows, *rules.mesh_axes("sequence", mesh))
  found: dict[bool, list[int]] = {}
  trained = program.selection.split(program.abstract_state["params"])[0]
  for path, x in jax.tree_util.tree_leaves_with_path(trained):
    split = {axis for entry in x.sharding.spec for axis in axes_of(entry)}
    axes = tuple(axis for axis in of_tokens if axis not in split)
    ways = math.prod(mesh.shape[axis] for axis in axes)
    once = set(axes) <= {*program.step.summed_once}
    times = 1 if once else _microbatches(program)
    if model_path(path_keys(path))[0].startswith("stack_"):
      times *= program.step.backward_passes
    if not once and model_path(path_keys(path))[0] == table:
      chunks = pieces(program) if set(axes) & {*of_rows} else 1
      times *= chunks + (1 if model.decoder.cfg.tied else 0)  # as an embedding it has a second gradient
    size = int(2 * math.prod(x.sharding.shard_shape(x.shape)) * summed_bytes(program) * (ways - 1) / ways) * times
    if size:
      group = found.setdefault(_leaves_a_slice(program, axes), [0, 0])
      group[0] += size
      group[1] += times
  for between, (size, times) in found.items():
    yield Transfer("all-reduce", size, times, between, between)


def _of_tokens(program: TrainProgram) -> Iterator[Transfer]:
  """Tokens sent to their experts and back, with an even load: one round."""
  model = program.model
  axes = model.decoder.cfg.rules.mesh_axes("expert", model.mesh)
  ways = math.prod(model.mesh.shape[axis] for axis in axes)
  item = jnp.dtype(program.config.precision.dtype).itemsize
  tokens = _tokens(program)
  layers = [e for e in (layer.cfg.ffn.experts for layer in model.decoder.layers) if e is not None]
  sent = sum(2 * SLACK * tokens * e.num_experts_per_tok * e.emb_dim * item * (ways - 1) / ways for e in layers)
  times = passes(program) * _microbatches(program)
  yield Transfer("all-to-all", int(sent * times), 2 * len(layers) * times, False, _leaves_a_slice(program, axes))


def _tokens(program: TrainProgram) -> int:
  """Number of tokens that a device processes at a time."""
  model = program.model
  rows = model.rows // model.ways("batch")
  return rows * program.config.training.max_target_length // model.ways("sequence")


def _of_keys(program: TrainProgram) -> Iterator[Transfer]:
  """Keys and values of a row sent to the devices with later positions, and their gradients back."""
  model, config = program.model, program.config
  ways, length = model.ways("sequence"), config.training.max_target_length
  item, parts = jnp.dtype(config.precision.dtype).itemsize, _microbatches(program)
  backward = program.step.backward_passes
  again = config.training.remat_policy in ("full", "save_mlp", "save_outputs")
  forward = (program.step.forward_passes + backward * again) * parts
  rows, size = model.rows // model.ways("batch"), length // ways
  gathered = neighbors = layers = windows = 0
  shared: dict[str, list[tuple[int, ...]]] = {}
  for layer in model.decoder.layers:
    cfg = layer.cfg.mixer
    shapes = list(layer.mixer.cache_shapes(length)[1].values()) or shared[getattr(cfg, "reuses_kv_of", "")]
    shared |= dict.fromkeys(layer.mixer.shared_kv(), shapes)
    # [K, H] per token with the heads of this device; latents are complete on all devices.
    numbers = sum(max(1, s[0] // model.ways("kv_heads")) * s[1] if len(s) == 2 else s[0] for s in shapes)
    images = config.vision.use_multimodal and getattr(cfg, "bidirectional_images", False)
    past = past_of(getattr(cfg, "window", None), images, size, ways)
    if past is None:
      gathered, layers = gathered + rows * (ways - 1) * size * numbers, layers + 1
    else:
      neighbors, windows = neighbors + rows * past * numbers, windows + 1
  between = _leaves_a_slice(program, model.decoder.cfg.rules.mesh_axes("sequence", model.mesh))
  if ways > 1:
    yield Transfer("all-gather", gathered * item * forward, layers * forward, False, between)
    times = backward * parts
    yield Transfer("reduce-scatter", gathered * summed_bytes(program) * times, layers * times, False, between)
    times += forward
    yield Transfer("collective-permute", neighbors * item * times, windows * times, True, between)


def _of_sums(program: TrainProgram) -> Iterator[Transfer]:
  """Reductions over devices that share heads or hidden sizes: of the outputs of a layer's weights, and of the gradients of
  their inputs, for each weight separately."""
  model, config = program.model, program.config
  mesh, rules = model.mesh, model.decoder.cfg.rules
  backward = program.step.backward_passes
  again = config.training.remat_policy not in ("none", "minimal", "save_mlp", "save_outputs")
  forward = program.step.forward_passes + backward * again
  size = times = 0
  for layer in model.decoder.layers:
    for p in jax.tree.leaves(layer.params()):
      shared = [i for i, axis in enumerate(p.axes) if axis not in GATHERED and "tensor" in rules.mesh_axes(axis, mesh)]
      widths = [i for i, axis in enumerate(p.axes) if axis in GATHERED]
      if shared and widths:
        count = backward if widths[0] < shared[0] else forward
        size, times = size + count * p.shape[widths[0]], times + count
  ways, parts = mesh.shape["tensor"], _microbatches(program)
  size *= int(2 * parts * _tokens(program) * summed_bytes(program) * (ways - 1) / ways)
  yield Transfer("all-reduce", size, times * parts, asynchronous=False, between_slices=_leaves_a_slice(program, ("tensor",)))
