"""The shortest possible time of a step on a chip, from the work of its program: products, memory traffic, transfers.

It is a bound, not a forecast: products run at the peak of the matrix units, everything that can overlap does, and only
transfers that the program waits for are added.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from maxtext_like.capacity.chips import Chip, links_of
from maxtext_like.capacity.compiled_program import HOST_COPIES, Array, Operation, Transfer
from maxtext_like.capacity.flops import visible_pairs
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.kernels.attention.registry import fused_kernels
from maxtext_like.layers.kernels.grouped_matmul import registry as grouped


@dataclass(frozen=True, kw_only=True)
class Roofline:
  """Bounds of a step, in seconds.

  Attributes:
    bounds: by unit: "matrix units", "HBM", "ICI", "DCN", "host". Links only include transfers that overlap with computation.
      Copies to the host happen in the forward pass and copies back in the backward pass, so both directions are added.
    waiting: transfers that do not overlap with computation.
    step: the largest bound plus the waiting time.
    mfu: the model's FLOPs (without recomputation) relative to the bfloat16 peak in that time, or to the float16 peak with
      float16.
    binds: the largest term.
    float8: True if some products are float8, which has a separate peak.
  """

  bounds: dict[str, float]
  waiting: float
  step: float
  mfu: float
  binds: str
  float8: bool = False


def roofline(
  chip: Chip,
  devices: int,
  *,
  flops: float,
  memory_bytes: float,
  transfers: Iterable[Transfer],
  model_flops: float,
  float8_flops: float = 0.0,
  dtype: str = "bfloat16",
  precision: str = "default",
) -> Roofline:
  """Return the bounds of one device.

  Args:
    chip: the device.
    devices: number of devices in its slice or host.
    flops: FLOPs of products of the program.
    memory_bytes: bytes through its memory.
    transfers: transfers of a step.
    model_flops: FLOPs of the model for this device's share of the batch.
    float8_flops: the part of ``flops`` in float8.
    dtype: dtype of all other products.
    precision: a value of ``matmul_precision``, for float32 products.
  """
  # Float8 products have a separate peak rate.
  peak = chip.peak(dtype, precision)
  assert chip.memory is not None
  products = (flops - float8_flops) / peak + float8_flops / (chip.float8 or peak)
  bounds = {"matrix units": products / 1e12, "HBM": memory_bytes / chip.memory, "ICI": 0.0, "DCN": 0.0, "host": 0.0}
  waiting = 0.0
  # Asynchronous transfers can overlap with computation; the others add to the time of a step.
  for t in transfers:
    if t.kind in HOST_COPIES:
      unit, rate = "host", chip.host
    else:
      unit, rate = ("DCN", chip.network) if t.between_slices else ("ICI", links_of(chip, devices))
    assert rate is not None, (chip.kind, unit)
    seconds = t.bytes / rate
    if t.asynchronous:
      bounds[unit] += seconds
    else:
      waiting += seconds
  step = max(bounds.values()) + waiting
  longest = max(bounds, key=lambda name: bounds[name])
  return Roofline(
    bounds=bounds,
    waiting=waiting,
    step=step,
    mfu=model_flops / (chip.peak("float16" if dtype == "float16" else "bfloat16") * 1e12) / step,
    binds="exposed transfers" if waiting > bounds[longest] else longest,
    float8=float8_flops > 0,
  )


def kernel_flops(decoder: Decoder, padding: float = 1.0) -> Callable[[Operation, list[Array]], float]:
  """Return a function for the FLOPs of a call of a kernel, whose inside the compiler does not see. Attention counts the pairs
  that its layer's mask allows; a grouped product counts all rows that it may process.

  Args:
    decoder: the model.
    padding: number of expert rows relative to an even load.
  """
  windows = {}
  for s in decoder.stacks:
    for j, layer in enumerate(s.layers):
      windows[f"{s.name}/layer_{j}"] = getattr(layer.cfg.mixer, "window", None)

  def of(op: Operation, operands: list[Array]) -> float:
    scopes = tuple(op.path.split("/"))
    target = "tpu_custom_call" if "tpu_custom_call" in op.text else ""
    for kernel in fused_kernels():
      if (name := kernel.operation(target, scopes)) is not None:
        # Queries, keys and values are [N, T, H] each, or [B, N, T, H] for several rows on a chip.
        q, _, v = [a.shape for a in operands if len(a.shape) in (3, 4) and a.dtype in ("bf16", "f32")][:3]
        *heads, length, size = q
        window = next((w for layer, w in windows.items() if f"{layer}/" in op.path), None)
        of_values = kernel.products(name) // 2
        wide = (kernel.products(name) - of_values) * size + of_values * v[-1]
        # In a vision tower all patches of an image attend to each other.
        pairs = length**2 if re.search(r"\bvision\b", op.path) else visible_pairs(length, window)
        return 2.0 * wide * math.prod(heads) * pairs
    floats = [a for a in (*operands, *op.results) if a.dtype in ("bf16", "f32")]
    rows, weights = ([a for a in floats if len(a.shape) == rank] for rank in (2, 3))
    by = next((k for k in map(grouped.kernel, grouped.NAMES) if k.called(op.path, op.name)), None)
    if not target or by is None or not rows or not weights:
      return 0.0
    real = int(rows[0].shape[0] / padding) if by.skips else rows[0].shape[0]
    return 2.0 * by.rows(real, weights[0].shape[0]) * weights[0].size / weights[0].shape[0]

  return of


def to_json(r: Roofline) -> dict[str, Any]:
  """Return JSON values."""
  return {"seconds": {**r.bounds, "waiting": r.waiting, "step": r.step}, "mfu": r.mfu, "binds": r.binds}
