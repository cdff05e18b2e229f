"""Settles the kernel for a single new token: uses it if it supports the model and passes its self-test, otherwise XLA."""

import dataclasses
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from maxtext_like.layers.attention.attention import Attention
from maxtext_like.layers.block import Block
from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.kernel_verdicts import Target, numbers_of
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.decode_selfcheck import DecodeShape, self_test

_log = logging.getLogger(__name__)
_OLDEST = (8, 0)  # compute capability of the first GPUs with bfloat16 products
_SMALLEST, _LARGEST = 16, 512


def first_shapes(decoder: Decoder, target: Target) -> list[DecodeShape]:
  """Return the shapes of the layers that can use the kernel, without duplicates. Arguments: as for ``settle``."""
  if target.platform != "gpu" or target.devices > 1 or importlib.util.find_spec("jax.experimental.pallas.triton") is None:
    return []
  if target.capability is not None and (numbers_of(target.capability) or (0, 0)) < _OLDEST:
    return []
  return list(dict.fromkeys(shape for layer in decoder.layers if (shape := _shape(layer)) is not None))


def settle(
  decoder: Decoder, target: Target, *, test: Callable[[DecodeShape], list[CaseResult]] = self_test
) -> tuple[Decoder, str]:
  """Return the decoder, and a note about its kernel ("" if all layers use XLA and nothing failed).

  Args:
    decoder: the model.
    target: the devices that it will run on. The partitioner cannot split a kernel, so there must be one.
    test: the self-test.
  """
  shapes = first_shapes(decoder, target)
  if not shapes:
    return decoder, ""
  if target.device is None:
    return _with(decoder, set(shapes)), "decode_attention, not self-tested: there is no device"
  known = target.tested([(shape, test) for shape in shapes]).known
  problems = {shape: known[shape][0] for shape in shapes if known[shape][0]}
  used = _with(decoder, set(shapes) - set(problems))
  if problems:
    note = f"xla instead of decode_attention, which failed its self-test: {'; '.join(problems.values())}"
    _log.warning("%s", note)
    return used, note
  return used, f"decode_attention, self-test passed on {target.device.device_kind}"


def _shape(layer: Block) -> DecodeShape | None:
  """Return the shape of a layer's attention, or None if the kernel does not support it."""
  if not isinstance(layer.mixer, Attention):
    return None
  c, dtype = layer.mixer.cfg, layer.precision.dtype
  if dtype == "float32" or c.head_dim & (c.head_dim - 1) or not _SMALLEST <= c.head_dim <= _LARGEST:
    return None
  # The kernel computes scores and softmax in float32.
  if layer.precision.qk_dtype != "float32" or layer.precision.softmax_dtype != "float32":
    return None
  return DecodeShape(
    dtype=dtype, query_heads=c.num_query_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim, soft_cap=c.soft_cap
  )


def _with(decoder: Decoder, shapes: set[DecodeShape]) -> Decoder:
  """Use the kernel in all layers with one of these shapes."""

  def using(layer: Block) -> Block:
    if _shape(layer) not in shapes:
      return layer
    mixer: Any = layer.cfg.mixer
    mixer = dataclasses.replace(mixer, decode="pallas_triton")
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, mixer=mixer))

  layers = {layer: using(layer) for layer in dict.fromkeys(decoder.layers)}
  return dataclasses.replace(decoder, layers=tuple(layers[layer] for layer in decoder.layers))
