"""Lists which part of a program computes in which dtype. ``audit_keys`` compares this with the precision keys.

This module does not read the configuration. It groups the instructions that ``hlo`` read from the program's text by the named
parts of the model.
"""

import collections
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from maxtext_like.layers.kernels.attention.registry import AttentionKernel, fused_kernels
from maxtext_like.numerics.hlo import FLOATS, Instruction, Reading

SITES: dict[str, tuple[str, frozenset[str]]] = {
  # scope: (title, instructions that show its precision in addition to matrix products and kernels)
  "qk_product": ("qk product", frozenset({"tanh"})),  # tanh is the soft cap of scores, as in the softmax
  "softmax": ("softmax", frozenset({"exponential", "reduce", "divide", "tanh"})),
  "pv_product": ("pv product", frozenset()),
  **{kernel.scope: (kernel.title, frozenset()) for kernel in fused_kernels()},
  "attention": ("attention projections", frozenset()),
  "mla": ("latent projections", frozenset()),
  "indexer_product": ("indexer product", frozenset()),
  "indexer_sum": ("indexer sum", frozenset({"maximum"})),
  "indexer": ("indexer projections", frozenset()),
  "indexer_loss": ("indexer loss", frozenset({"exponential", "log", "reduce"})),
  "mlp": ("gate and up", frozenset()),
  "gate_product": ("gate product", frozenset({"multiply"})),
  "down_product": ("down product", frozenset()),
  "router": ("router", frozenset({"exponential", "logistic"})),
  "experts": ("experts", frozenset()),
  "weight_sum": ("weighted sum of experts", frozenset()),
  "moe": ("expert statistics", frozenset()),
  "per_layer_input": ("per-layer input", frozenset()),
  "norm": ("norms", frozenset({"rsqrt", "reduce"})),
  "residual": ("residual stream", frozenset({"add", "multiply"})),
  "embedding": ("embedding", frozenset({"gather", "scatter"})),
  "logits": ("logits", frozenset()),
  "soft_cap": ("soft cap", frozenset({"tanh"})),
  "loss": ("loss", frozenset({"exponential", "log", "reduce"})),
  "optimizer": ("optimizer", frozenset({"multiply", "add", "divide", "sqrt"})),
  "vision_pool": ("vision pooling", frozenset({"multiply", "subtract"})),
  "vision": ("vision tower", frozenset()),
  "shared_experts": ("shared experts", frozenset()),
  "head": ("head", frozenset()),
  "collectives": ("reductions between devices", frozenset({"all_reduce", "reduce_scatter"})),
}
"""The scope names of layers. An instruction belongs to the innermost scope in its path. Reductions between devices, most of
which the compiler inserts, are a separate site."""

OTHER = "elsewhere"
_UPDATE, _UNKNOWN = "update", ""


def site_of(instruction: Instruction) -> str:
  """Return the scope that an instruction belongs to, or ``OTHER``."""
  if (fused := fused_kernel(instruction)) is not None:
    return fused[0].scope
  if instruction.kind in SITES["collectives"][1]:
    return "collectives"
  for scope in reversed(instruction.scopes):
    if scope in SITES:
      return scope
  return OTHER


def fused_kernel(instruction: Instruction) -> tuple[AttentionKernel, str] | None:
  """Return the fused attention kernel of an instruction and the name of its operation; None for any other instruction."""
  for kernel in fused_kernels():
    if (operation := kernel.operation(instruction.target, tuple(instruction.scopes))) is not None:
      return kernel, operation
  return None


@dataclass(frozen=True, kw_only=True)
class Row:
  """Instructions of one site with the same properties.

  Attributes:
    site: its title.
    stage: "forward", "recomputed" or "backward"; "update" for the optimizer; "" for instructions without a name.
    operation: the instruction, with the precision of a product if it is not the default.
    operands, accumulation, output: dtypes. The accumulator of a sum has the dtype of its result. Products accumulate in
      float32: the matrix units of TPUs and NVIDIA GPUs add products of 16-bit numbers in float32, whatever the dtype of the
      result.
    places: how often the program has it; a loop over equal layers counts once.
    note: what a kernel guarantees.
  """

  site: str
  stage: str
  operation: str
  operands: str
  accumulation: str
  output: str
  places: int
  note: str = ""


def rows(reading: Reading) -> list[Row]:
  """Return the table of a program: all sites in the order of ``SITES`` with every kind of instruction that shows their
  precision."""
  found: collections.Counter[tuple[str, Row]] = collections.Counter()
  for instruction in reading.instructions:
    site = site_of(instruction)
    fused = fused_kernel(instruction)
    if not (fused is not None or instruction.kind == "dot" or (site in SITES and instruction.kind in SITES[site][1])):
      continue
    if not any(dtype in FLOATS or dtype.startswith("f8") for dtype in (*instruction.operands, *instruction.results)):
      continue
    found[site, _row(instruction, site, fused)] += 1
  order = {scope: i for i, scope in enumerate([*SITES, OTHER])}
  passes = {"forward": 0, "recomputed": 1, "backward": 2, _UPDATE: 3, _UNKNOWN: 4}
  listed = sorted(found.items(), key=lambda item: (order[item[0][0]], passes[item[0][1].stage], str(item[0][1])))
  return [replace(row, places=places) for (_, row), places in listed]


def _row(i: Instruction, site: str, fused: tuple[AttentionKernel, str] | None) -> Row:
  operation = i.kind + (f" {i.reducer}" if i.reducer else "")
  if i.precision not in ("", "default"):
    operation += f" {i.precision}"
  operands, accumulation = i.operands, ""
  if i.kind == "dot":
    operands = i.operands[:2]
    accumulation = "f64" if "f64" in i.results else "f32"
  elif i.reducer == "add":
    operands, accumulation = i.operands[:1], ", ".join(dict.fromkeys(i.results))
  elif i.kind in ("gather", "scatter", "reduce"):
    operands = i.operands[:1]
  if fused is not None:
    # The first three float operands are q, k and v. Segment ids and mask tables are integers.
    operation, operands, accumulation = fused[1], tuple(d for d in i.operands if d in FLOATS)[:3], "f32"
  return Row(
    site=SITES[site][0] if site in SITES else OTHER,
    stage=_UPDATE if site == "optimizer" else i.stage if i.path else _UNKNOWN,
    operation=operation,
    operands=" x ".join(operands),
    accumulation=accumulation,
    output=", ".join(dict.fromkeys(d for d in i.results if d in FLOATS or not fused)),
    places=0,
    note=fused[0].guarantee if fused else "",
  )


@dataclass(frozen=True, kw_only=True)
class Unasked:
  """Work in a dtype that no key requested: the place, the operation, and the number of occurrences."""

  path: str
  operation: str
  dtypes: str
  places: int


def unasked(reading: Reading, dtype: str, asked_float32: Iterable[str]) -> list[Unasked]:
  """Return the instructions that compute in float64, and the float32 products of a 16-bit model outside the sites that request
  them.

  Args:
    reading: the program.
    dtype: dtype of activations, such as "bfloat16".
    asked_float32: sites where a key or the layer itself requires float32 products ("experts" includes everything inside), and
      "backward" for the complete backward pass.
  """
  asked, found = set(asked_float32), collections.Counter()
  for i in reading.instructions:
    wide = "f64" in (*i.operands, *i.results)
    if i.kind == "dot" and dtype != "float32" and i.operands[:2].count("f32"):
      wide |= not {site_of(i), i.stage, *({"experts"} & set(i.scopes))} & asked
    if wide:
      found[i.path, i.kind, f"{' x '.join(i.operands[:2])} -> {', '.join(i.results)}"] += 1
  return [Unasked(path=p, operation=k, dtypes=d, places=n) for (p, k, d), n in sorted(found.items())]


def to_json(rows: list[Row], keys: list[Any], extra: list[Unasked]) -> dict[str, Any]:
  """Return the audit as JSON values."""
  return {"sites": [asdict(r) for r in rows], "keys": [asdict(k) for k in keys], "unasked": [asdict(u) for u in extra]}
