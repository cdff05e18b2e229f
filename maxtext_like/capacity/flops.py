"""Model FLOPs of a train step, computed from the shapes, and the peak rate of the device: tflops_per_device and mfu.

XLA's own count cannot be used, because it counts the body of a scan once.
"""

from collections.abc import Iterator
from typing import Any

import jax

from maxtext_like.capacity.chips import find_chip
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys
from maxtext_like.layers.quantization.quantized import CODES
from maxtext_like.models.adapter import model_path
from maxtext_like.models.naming import ADAPTER
from maxtext_like.training.step.trainable import Selection


def peak_tflops(device_kind: str, dtype: str = "bfloat16") -> float | None:
  """Return the dense TFLOP/s that mfu is relative to: the float16 rate for float16, otherwise the bfloat16 rate. None if
  unknown."""
  chip = find_chip(device_kind)
  return None if chip is None else chip.peak("float16" if dtype == "float16" else "bfloat16")


def visible_pairs(length: int, window: int | None = None) -> int:
  """Return the (query, key) pairs of one row of ``length`` tokens under a causal mask with a window of W keys, self
  included."""
  w = length if window is None else min(window, length)
  return w * (w + 1) // 2 + (length - w) * w


def train_flops(
  decoder: Decoder, spec: Any, selection: Selection, rows: int, length: int, *, float8_alone: bool = False
) -> float:
  """Return the floating point operations of one step on ``rows`` rows of ``length`` tokens, without recomputation.

  Products with parameters count 2 per parameter and token in the forward pass and 4 in the backward pass if the parameter is
  trained (6 N in total), or 2 if it is frozen and the gradient only passes through. The head counts once, tied or not. A table
  that is only looked up does not count, nor does an array that an adapter replaces completely. Of routed experts the chosen
  share counts. Attention counts 12 x heads x head size for each visible pair, forward and backward (PaLM, appendix B, without
  masked pairs, as in MaxText). Packed documents count as one row.

  float8_alone: count only the products that ``matmul_dtype`` computes in float8.
  """
  indexer_alone = _indexer_alone(decoder, selection)
  trained = dict(zip(_paths(spec), jax.tree.leaves(selection.leaves), strict=True))
  products = sum(
    size * (6 if trained[keys] else 2 if indexer_alone else 4) for keys, size in _factors(decoder, spec, float8_alone)
  )
  if float8_alone:
    return rows * products * length
  return rows * (products * length + _pairs(decoder, length, indexer_alone))


def forward_flops(decoder: Decoder, spec: Any, rows: int, length: int, *, float8_alone: bool = False) -> tuple[float, float]:
  """Return the FLOPs of the layers' forward pass: (products with parameters, attention pairs). Otherwise like ``train_flops``.

  The forward pass is a third of the training FLOPs if the weights are trained, and half if they are frozen.
  """
  products = sum(size for keys, size in _factors(decoder, spec, float8_alone) if _in_layers(keys))
  return 2.0 * rows * length * products, 0.0 if float8_alone else rows * _pairs(decoder, length) / 3


def backward_flops(
  decoder: Decoder, spec: Any, selection: Selection, rows: int, length: int, *, float8_alone: bool = False
) -> float:
  """Return the FLOPs of the layers' backward pass. Otherwise like ``train_flops``."""
  trained = dict(zip(_paths(spec), jax.tree.leaves(selection.leaves), strict=True))
  products = sum(size * (4 if trained[keys] else 2) for keys, size in _factors(decoder, spec, float8_alone) if _in_layers(keys))
  return rows * (products * length + (0.0 if float8_alone else _pairs(decoder, length) * 2 / 3))


def _in_layers(keys: tuple[str, ...]) -> bool:
  return keys[keys[0] == ADAPTER].startswith("stack_")


def _paths(spec: Any) -> list[tuple[str, ...]]:
  return [path_keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(spec)]


def _factors(decoder: Decoder, spec: Any, float8_alone: bool) -> Iterator[tuple[tuple[str, ...], float]]:
  """Yield (keys, elements that a token is multiplied with) of every array that multiplies."""
  leaves = jax.tree_util.tree_leaves_with_path(spec)
  declared = {path_keys(path): p for path, p in jax.tree_util.tree_leaves_with_path(decoder.params())}
  replaced = {model_path(keys) for keys in (path_keys(path) for path, _ in leaves) if model_path(keys) != keys}
  for path, p in leaves:
    own = keys = path_keys(path)
    if keys in replaced:
      continue
    if keys[:-1] in declared:  # a stored part of a quantized weight; only its codes multiply
      if keys[-1] != CODES:
        continue
      keys, p = keys[:-1], declared[keys[:-1]]
    if keys[0] == ADAPTER:  # multiplies like the weight that it belongs to
      keys = keys[1:-1]
    if not _multiplies(keys, len([a for a in p.axes if a != "layers"]), decoder.cfg.tied):
      continue
    if float8_alone and not _in_float8(decoder, own):
      continue
    size = 1.0
    for s in p.shape:
      size *= s
    if "experts" in keys:
      moe = _layer_of(decoder, keys).cfg.ffn.experts
      size *= moe.num_experts_per_tok / moe.num_experts
    yield own, size


def _pairs(decoder: Decoder, length: int, indexer_alone: bool = False) -> float:
  return sum(_attention(layer.cfg.mixer, length, indexer_alone) for layer in decoder.layers)


def _multiplies(keys: tuple[str, ...], rank: int, tied: bool) -> bool:
  if keys == ("embedding", "table"):
    return tied
  return rank >= 2 and keys != ("ple", "table")


def _in_float8(decoder: Decoder, keys: tuple[str, ...]) -> bool:
  """Return True if a weight multiplies in float8: weights of attention or an MLP, but not of an adapter, indexer or expert."""
  if not keys[0].startswith("stack_") or _layer_of(decoder, keys).precision.matmul_dtype != "float8":
    return False
  return not {"indexer", "experts", "router"} & {*keys} and bool({"attention", "mla", "mlp", "shared"} & {*keys})


def _layer_of(decoder: Decoder, keys: tuple[str, ...]) -> Any:
  stack = next(s for s in decoder.stacks if s.name == keys[0])
  return stack.layers[int(keys[1].removeprefix("layer_"))]


def _indexer_alone(decoder: Decoder, selection: Selection) -> bool:
  leaves = jax.tree_util.tree_leaves_with_path(selection.leaves)
  return all("indexer" in path_keys(path) for path, trained in leaves if trained)


def _attention(cfg: Any, length: int, indexer_alone: bool) -> float:
  """Return the FLOPs of one layer's scores and weighted sums on one row."""
  if not hasattr(cfg, "kv_lora_rank"):
    return 12.0 * cfg.num_query_heads * cfg.head_dim * visible_pairs(length, cfg.window)
  pairs = visible_pairs(length)
  passes = 1 if indexer_alone else 3
  extra = 0.0
  if cfg.indexer:
    extra = 6.0 * cfg.indexer.num_heads * cfg.indexer.head_dim * pairs
    if cfg.indexer_sparse:
      pairs = visible_pairs(length, cfg.indexer.topk)  # min(t, k) keys for token t, as with a window of k
  return extra + passes * 2.0 * cfg.num_heads * (cfg.nope_dim + cfg.rope_dim + cfg.value_dim) * pairs
