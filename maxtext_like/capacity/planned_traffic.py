"""Bytes through a device's main memory in a step, calculated from shapes and shardings.

Weights are read where they multiply, as stored or as gathered from other devices. The update reads and writes the state. Logits
and the gradient of their table are in memory between products. The traffic of activations is a multiple of their size
without remat. docs/results/memory.md compares the results with compiled programs.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.capacity.array_bytes import by_place
from maxtext_like.capacity.gathered_weights import TABLE, GatheredWeight
from maxtext_like.capacity.transfers import passes, pieces, summed_bytes
from maxtext_like.layers.moe.expert_parallel import SLACK
from maxtext_like.layers.param import count, path_keys
from maxtext_like.layers.quantization.quantized import CODES
from maxtext_like.models.adapter import model_path
from maxtext_like.models.naming import ADAPTER
from maxtext_like.training.step.program import TrainProgram

PASSES = 5.5
"""How often the activations that layers would keep without remat go through memory in a step, temporaries included. This and
the next four constants were fitted to the compiled programs of docs/results/memory.md."""
EXPERT_ROWS, TRAVELING = 12, 9
"""How often in each pass the rows of experts go through memory in addition, and how often more if they are exchanged with
other devices."""
SCORES = 9
"""How often in each pass the float32 scores of tiles of queries go through memory, including the tiles' keys and values."""
UNPACKED = {False: 2.5, True: 7.5}
"""Bytes written and read to dequantize an element of which two are stored in a byte. True is for experts, whose block scales
are expanded to all elements in float32."""
ON_CHIP = 2**26
"""A layer's dequantized weight of up to this many bytes, and its codes of one byte each, stay on a TPU's chip."""
_OUTPUTS = ("attention.o", "mlp.down", "shared.down")
KEPT = {"save_outputs": _OUTPUTS, "save_mlp": (*_OUTPUTS, "mlp.gate", "mlp.up", "shared.gate", "shared.up")}
"""The weights whose products a remat policy keeps, by their names in the layers."""


def memory_bytes(program: TrainProgram, weights: list[GatheredWeight], everything: int) -> float:
  """Return the bytes of a step.

  Args:
    program: program of the run.
    weights: ``gathered_weights``.
    everything: bytes that the forward pass of a microbatch would keep without remat.
  """
  parts = program.config.training.gradient_accumulation_steps
  part = _of_layers(program) + _of_dequantized(program) + _of_gathered(program, weights) + _of_head(program, weights)
  # A backward pass has two products for each product of the forward pass.
  part += (
    PASSES * (program.step.forward_passes + 2 * program.step.backward_passes) / 3 * everything
    + _of_expert_rows(program)
    + _of_scores(program)
  )
  return parts * part + _of_update(program)


def _of_layers(program: TrainProgram) -> float:
  """Bytes of a device's own part of the layers' weights, as stored."""
  kept = KEPT.get(program.config.training.remat_policy, ())
  base = {} if program.model.base is None else program.model.base.weights
  total = 0.0
  for path, x in jax.tree_util.tree_leaves_with_path(program.abstract_state["params"]):
    keys = path_keys(path)
    if keys[keys[0] == ADAPTER].startswith("stack_"):
      weight = keys[:-1] if keys[:-1] in base else model_path(keys)
      total += _bytes(x) * (2 if ".".join(weight[-2:]) in kept else passes(program))
  return total


def _of_dequantized(program: TrainProgram) -> float:
  """Bytes written and read to dequantize weights of which a byte holds two elements. Other quantized weights are dequantized
  while a product reads them."""
  if program.model.base is None:
    return 0.0
  item, params = jnp.dtype(program.config.precision.dtype).itemsize, program.abstract_state["params"]
  total = 0.0
  for path, p in program.model.base.weights.items():
    codes = functools.reduce(lambda tree, key: tree[key], path, params)[CODES]
    if math.prod(codes.shape) < count(p):
      numbers = count(p) * math.prod(_shard(codes)) // math.prod(codes.shape)
      leaves = numbers // (p.rows or 1) * item > ON_CHIP
      total += passes(program) * numbers * (UNPACKED["experts" in path] + 2 * (1 + item) * leaves)
  return total


def _of_expert_rows(program: TrainProgram) -> float:
  """Bytes of tokens' rows that are sorted by expert, sent, multiplied and sorted back."""
  model = program.model
  tokens = model.rows // model.ways("batch") * program.config.training.max_target_length // model.ways("sequence")
  experts = [e for e in (layer.cfg.ffn.experts for layer in model.decoder.layers) if e is not None]
  rows = sum(tokens * e.num_experts_per_tok * e.emb_dim for e in experts)
  times = SLACK * (EXPERT_ROWS + TRAVELING) if model.ways("expert") > 1 else EXPERT_ROWS
  return passes(program) * times * rows * jnp.dtype(program.config.precision.dtype).itemsize


def _of_scores(program: TrainProgram) -> float:
  """Bytes of the float32 scores of attention without a kernel, of which JAX keeps none (``sparse_attention_tiles``)."""
  model, length, parts = program.model, program.config.training.max_target_length, program.model.ways("sequence")
  scores = sum(mixer.cfg.num_heads * mixer.pairs(length, kv_b, parts) for mixer, kv_b in program.latent_attention)
  return passes(program) * SCORES * 4 * scores * (model.rows // model.ways("batch")) / (model.ways("heads") * parts)


def _of_gathered(program: TrainProgram, weights: list[GatheredWeight]) -> float:
  """Bytes of weights that are gathered from other devices, which are written and read. Their gradients are too, before they are
  scattered."""
  own = [w for w in weights if w.part != TABLE]
  total = 2 * passes(program) * sum(w.bytes for w in own)
  return total + 2 * summed_bytes(program) * sum(w.numbers for w in own if w.trained)


def _of_head(program: TrainProgram, weights: list[GatheredWeight]) -> float:
  """Bytes of the table in both passes of each chunk of the logits, of the logits, of the table's gradient, and of the gradient
  of an embedding's rows."""
  params = program.abstract_state["params"]
  trained = program.selection.split(params)[0]
  placed = trained if program.adapter is None else program.adapter.replaced(trained)
  name = "embedding" if program.model.decoder.cfg.tied else "head"
  chunks, learns = pieces(program), bool(jax.tree.leaves(placed.get(name, {})))
  of_table = [w for w in weights if w.part == TABLE]
  model = program.model
  piece = program.objective.logit_bytes(model.rows // model.ways("batch"), program.config.training.max_target_length)
  # ``piece`` is a chunk in float32 and the same for its gradient.
  logits = piece / 2 * chunks / (model.ways("sequence") * model.ways("vocab"))
  total = logits * (3 if learns else 2)
  if of_table:
    total += 3 * chunks * sum(w.bytes for w in of_table) + 2 * chunks * 4 * sum(w.numbers for w in of_table if w.trained)
  else:
    total += 2 * chunks * _bytes(params[name]) + (2 * chunks - 1) * 4 * _numbers(params[name]) * learns
  return total + 2 * 4 * _numbers(placed.get("embedding", {}))


def _of_update(program: TrainProgram) -> float:
  """Bytes of the update. Trained parameters and the optimizer's state are read and written. Gradients are written once, and
  read for their norm and for the update. A sum over microbatches is read and written by each."""
  t, state = program.config.training, program.abstract_state
  trained = program.selection.split(state["params"])[0]
  gradients = _bytes(trained) * (2 if t.optimizer_in_backward else 3)
  sums = 2 * 4 * _numbers(trained) * t.gradient_accumulation_steps if t.gradient_accumulation_steps > 1 else 0
  # Data from the host is written before it is read, and read again when it is sent back.
  return 2 * (_bytes(trained) + _bytes(state["opt_state"]) + _bytes(by_place(state["opt_state"])[1])) + gradients + sums


def _numbers(tree: Any) -> int:
  """Number of elements of a device's part of a tree of shapes."""
  return sum(math.prod(_shard(x)) for x in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
  return sum(math.prod(_shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shard(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
  return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
