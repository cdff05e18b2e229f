"""Checks that dimensions divide evenly over the mesh, so that no array is silently replicated. Errors give sizes and a remedy.

Parameters that are split only to save memory (data, fsdp) may be uneven: they are replicated, and the memory estimate knows.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from maxtext_like.errors import UserError
from maxtext_like.layers.param import Param
from maxtext_like.layers.partition import Mesh, axes_of
from maxtext_like.layers.quantization.quantized import CODES, Form, MatrixView
from maxtext_like.layers.sharding_rules import GATHERED, Rules

Axes = tuple[str, ...]


def require_divisible(spec: Any, length: int, rules: Rules, mesh: Mesh) -> None:
  """Refuses a mesh over which the dimensions of the model do not divide evenly.

  It refuses three cases: heads, hidden sizes, experts, vocabulary or positions that do not divide; an axis that splits both the
  sequences and their positions; tokens that are split over only some of the experts' axes. Key-value heads may be fewer than
  the devices: they are copied (see ``copied_kv_heads``).

  Args:
    spec: tree of declared parameters.
    length: positions of a sequence.
    rules, mesh: how the dimensions are split.

  Raises:
    UserError: names each dimension with its size, the mesh axis and the remedy.
  """
  found: dict[tuple[str, int, Axes], str] = {}
  # Dimensions of parameters.
  for name, axis, size, axes in _uneven(spec, rules, mesh):
    if not _may_copy(axis, size, axes, mesh):
      found.setdefault((axis, size, axes), name)
  faults = [_fault(f"{axis} of {size} ({name})", size, axis, axes, mesh) for (axis, size, axes), name in found.items()]
  # Positions of a sequence, and axes that split sequences and positions at once.
  if length % rules.ways("sequence", mesh):
    axes = rules.mesh_axes("sequence", mesh)
    faults.append(_fault(f"{length} positions (max_target_length)", length, "sequence", axes, mesh))
  batch, sequence = rules.mesh_axes("batch", mesh), rules.mesh_axes("sequence", mesh)
  if shared := [a for a in batch if a in sequence]:
    of_batch, of_sequence = ([a for a in axes if a not in shared] for axes in (batch, sequence))
    faults.append(
      f"sharding_rules: batch and sequence are both split over the mesh axis {' x '.join(shared)}; an axis can split only one "
      f"dimension of the tokens\n"
      f"  fix: sharding_rules='{{batch: [{', '.join(of_batch)}], sequence: [{', '.join(sequence)}]}}' to split positions, "
      f"or sharding_rules='{{batch: [{', '.join(batch)}], sequence: [{', '.join(of_sequence)}]}}' to split sequences"
    )
  # Tokens travel to their experts along the experts' axes: either all of these axes split the tokens, or none.
  if any("expert" in p.axes for p in jax.tree.leaves(spec)):
    experts, tokens = rules.mesh_axes("expert", mesh), {*batch, *sequence}
    if 0 < len(own := [a for a in experts if a in tokens]) < len(experts):
      faults.append(
        f"experts are split over the mesh axes {' x '.join(experts)}, but tokens over {' x '.join(own)} only\n"
        f"  fix: sharding_rules='{{expert: [{', '.join(own)}]}}'"
      )
  if faults:
    raise UserError("\n".join(faults))


def require_unsplit_blocks(weights: Mapping[tuple[str, ...], Param], form: Form, rules: Rules, mesh: Mesh) -> None:
  """Refuses a mesh on which a device would multiply by a part of a quantization block.

  Axes that split a weight only to save memory are allowed: the device gathers the rest before it multiplies.

  Args:
    weights: the quantized weights by path.
    form: their storage format.
    rules, mesh: how the weights are split.

  Raises:
    UserError: names each weight with its size, the mesh axes and the remedy.
  """
  faults: dict[tuple[str | None, int, Axes], str] = {}
  for path, p in weights.items():
    view, codes = MatrixView.of(p), form.params(MatrixView.of(p))[CODES]
    split = [*rules.spec(codes.shape, codes.axes, mesh), *(None,) * len(codes.shape)]
    for axis, size, block in ((view.input, view.K, form.input_block), (view.input + 1, view.M, form.output_block)):
      axes = axes_of(split[axis])
      ways = math.prod(mesh.shape[a] for a in axes)
      if codes.axes[axis] not in GATHERED and ways > 1 and size % (ways * block):
        what = f"{'/'.join(path)}: {size} {'inputs' if axis == view.input else 'outputs'} in blocks of {block}"
        faults.setdefault((codes.axes[axis], size, axes), f"{what} over {ways} devices of the mesh axis {' x '.join(axes)}")
  if faults:
    listed = "\n  ".join(faults.values())
    whole = ", ".join(dict.fromkeys(f"{axis}: null" for axis, _, _ in faults))
    raise UserError(
      f"base_weights={form.name}: the mesh would split quantization blocks\n  {listed}\n"
      f"  fix: use fewer devices along this axis, sharding_rules='{{{whole}}}' to replicate the weights, or base_weights=int8"
    )


def copied_kv_heads(spec: Any, rules: Rules, mesh: Mesh) -> str | None:
  """Describes the key-value heads that several devices compute redundantly; None if there are none."""
  found = {
    f"{size} on {math.prod(mesh.shape[a] for a in axes)} devices ({' x '.join(axes)})"
    for _, axis, size, axes in _uneven(spec, rules, mesh)
    if _may_copy(axis, size, axes, mesh)
  }
  return f"there are fewer key-value heads than devices, so they are copied: {' and '.join(sorted(found))}" if found else None


def _uneven(spec: Any, rules: Rules, mesh: Mesh) -> Iterator[tuple[str, str, int, Axes]]:
  """Yields (name, logical axis, size, mesh axes) of every dimension that must divide evenly and does not."""
  for path, p in jax.tree_util.tree_leaves_with_path(spec):
    for dimension, axes in rules.uneven(p.shape, p.axes, mesh):
      if p.axes[dimension] not in GATHERED and not {"data", "fsdp"}.issuperset(axes):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), p.axes[dimension], p.shape[dimension], axes


def _may_copy(axis: str, size: int, axes: Axes, mesh: Mesh) -> bool:
  return axis == "kv_heads" and math.prod(mesh.shape[a] for a in axes) % size == 0


def _fault(what: str, size: int, axis: str, axes: Axes, mesh: Mesh) -> str:
  names, devices = " x ".join(axes), math.prod(mesh.shape[a] for a in axes)
  possible = " or ".join(str(n) for n in range(1, devices) if size % n == 0 and mesh.size % n == 0)
  whole = "" if axis == "sequence" else f", or sharding_rules='{{{axis}: null}}' to replicate it on every device"
  return (
    f"{what} cannot be split over the {devices} devices of the mesh axis {names}\n"
    f"  fix: use {possible} devices along it (ici_{axes[-1]}_parallelism){whole}"
  )
