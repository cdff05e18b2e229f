"""X-ray of a training step: examines the step that the trainer runs, and names tensors by the model's names.

The library (``numerics.xray``) reports files, lines and rows of scans. This module translates a row of a scan and a layer of
its block into the model's layer, merges the same tensor of all layers into one, and names the precision keys for a cause.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.capacity import memory_limits
from maxtext_like.capacity.memory_limits import GB
from maxtext_like.config.schema import Config
from maxtext_like.errors import DoesNotFitError, NonFiniteError, is_out_of_memory
from maxtext_like.layers import precision, weight
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys
from maxtext_like.models import row_norms
from maxtext_like.models.naming import row_names
from maxtext_like.numerics import plan
from maxtext_like.numerics.cause import Loop
from maxtext_like.numerics.explain import Cause
from maxtext_like.numerics.tensor_statistics import Stats
from maxtext_like.numerics.xray import XRay, on_host, xray
from maxtext_like.numerics.xray_report import Report, Tensor
from maxtext_like.sharding import processes
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.training.loop.remedies import Spot, step_remedies
from maxtext_like.training.step.program import TrainProgram
from maxtext_like.training.step.train_step import UNKNOWN, Batch, State

_LOOPS = ("scan", "while")
# Files that compute products for all layers: the caller's line is the one to report.
_HELPERS = tuple("/".join(Path(str(module.__file__)).parts[-2:]) for module in (precision, weight))
_RESIDUAL = r"(^|/)residual \S* (add|mul)$"  # adds to the residual stream or scales it, by its named scope
_NORMS = re.escape("/".join(Path(row_norms.__file__).parts[-2:]) + ":")  # squares of gradients, updates and parameters
_PRODUCTS = ("dot_general", "ragged_dot_general")
_INPUT = re.compile(r"(state|batch)((?:\[[^\]]+\]|\.\w+)+)")


def xray_step(program: TrainProgram, state: State, batch: Batch, *, everything: bool = False) -> Report:
  """Examine one training step: loss, gradients, optimizer update. Neither state nor batch is changed.

  Args:
    program: program of the run, with its mesh, module wrapper, dtypes and remat policy.
    state: before the step.
    batch: global arrays (``TrainProgram.place``).
    everything: measure every tensor, not only the key ones; compilation takes ten times as long.

  Returns:
    The report in the model's names: layers are the model's layers, parameters are named as ``layers.7.mlp.down``.

  Raises:
    DoesNotFitError: the program needs more memory than available.
  """
  with use_mesh(program.model.mesh):
    try:
      report = step_xray(program, everything=everything)(state, batch)
    except jax.errors.JaxRuntimeError as error:
      if not is_out_of_memory(error):
        raise
      raise DoesNotFitError(f"x-ray: out of memory: {str(error).strip().splitlines()[0]}") from error
  return translate(report, program.model.decoder, state)


def step_xray(program: TrainProgram, *, everything: bool = False) -> XRay:
  """Return the library's x-ray of (state, batch) -> the step's float metrics. Call it under the program's mesh.

  Norms are not outputs: the norm of finite numbers can be infinite, and a metric of the step is not a cause. The squares that
  they add up are skipped, because they were two thirds of the program (gemma4-tiny).
  """
  step = dataclasses.replace(program.step, watch=_tagged, probed_stacks=None)

  def looked_at(state, batch):
    _, metrics = step(state, batch, jnp.asarray(UNKNOWN))
    measures = ("finite", "magnitude_bound", "watched", "grad_norm", "param_norm")
    floats = {name: x for name, x in metrics.items() if name not in measures and jnp.issubdtype(x.dtype, jnp.floating)}
    return floats | {"watched": metrics["watched"]}

  fit = functools.partial(_require_fit, program)
  return xray(looked_at, key_tensors_only=not everything, key=_RESIDUAL, skipped=_NORMS, before_run=fit)


def _tagged(kind: str, tree: Any) -> Any:
  """Tag every array of a tree with the parameters' structure for x-ray, stacked arrays row by row."""

  def leaf(path, x):
    keys = path_keys(path)
    return plan.tag(x, kind, ".".join(keys), by_row=keys[0].startswith("stack_"))

  return jax.tree_util.tree_map_with_path(leaf, tree)


def _require_fit(program: TrainProgram, compiled: Any) -> None:
  """Raise DoesNotFitError in all processes if one of them has too little memory, so that all or none run the program."""
  problems = processes.everyone(_does_not_fit(program, compiled), program.config.watchdog.watchdog_peers_seconds)
  if problem := next(filter(None, problems), None):
    raise DoesNotFitError(problem)


def _does_not_fit(program: TrainProgram, compiled: Any) -> str:
  needed = compiled.memory_analysis()
  here = [d for d in program.model.devices if d.process_index == jax.process_index()]
  limit = memory_limits.device_limit(here[0], len(here))
  if needed is None or limit is None:
    return ""
  # A CPU's limit is its free memory, and the arguments are already allocated. A GPU's limit is its total memory.
  more = needed.temp_size_in_bytes + (0 if here[0].platform == "cpu" else needed.argument_size_in_bytes)
  if more <= limit.bytes:
    return ""
  return f"x-ray: needs {more / GB:.1f} GB on each device, {limit.bytes / GB:.1f} GB are available ({limit.source})"


# Names.


@dataclasses.dataclass(frozen=True)
class LayerPlace:
  """Where in the model a tensor of an equation is.

  Attributes:
    scopes: names of the model's parts, such as ("mlp",).
    layers: the model's layer for each row of the stack's scan; a single one if the stack is unrolled.
    axis: which of the surrounding loops is the stack's scan; None if there is none.
  """

  scopes: tuple[str, ...]
  layers: tuple[int, ...] = ()
  axis: int | None = None


def place_of(decoder: Decoder, path: str) -> LayerPlace:
  """Parse the scopes that ``Decoder`` leaves in a path: ``scan/stack_0/layer_2/mlp``, or ``row_1/stack_0/layer_2/mlp``."""
  parts = path.split("/")
  stacks = {s.name: s for s in decoder.stacks}
  where = next((i for i, part in enumerate(parts) if part in stacks), None)
  inner = next((i for i, part in enumerate(parts) if re.fullmatch(r"layer_\d+", part)), None)
  after = parts if inner is None else parts[inner + 1 :]
  known = lambda p: re.fullmatch(r"[A-Za-z_]\w*", p) and p not in (*_LOOPS, *stacks) and not p.startswith(("remat", "custom_"))
  scopes = tuple(p for p in after if known(p) and p not in ("checkpoint", "closed_call", "shard_map"))
  if where is None or inner is None:
    return LayerPlace(scopes)
  s, j = stacks[parts[where]], int(parts[inner].removeprefix("layer_"))
  rows = [(i, int(p.removeprefix("row_"))) for i, p in enumerate(parts[:where]) if re.fullmatch(r"row_\d+", p)]
  layer = lambda row: s.first + row * len(s.layers) + j
  first, length = 0, s.repeats
  if rows:
    at, first = rows[-1]
    if not any(p in _LOOPS for p in parts[at:where]):
      return LayerPlace(scopes, (layer(first),))
    # Rows with the same precision have a separate scan.
    length, starts = 0, 0
    for length, _ in s.split(decoder.layers):
      if starts == first:
        break
      starts += length
  axis = sum(p in _LOOPS for p in parts[:where]) - 1
  if axis < 0:  # jax computes values that are the same in every layer once, before the scan
    return LayerPlace(scopes)
  return LayerPlace(scopes, tuple(layer(first + row) for row in range(length)), axis)


def line_of(frames: Sequence[str]) -> str:
  """Return the frame to report: the innermost one outside the shared helpers."""
  return next((f for f in frames if not f.rsplit(":", 1)[0].endswith(_HELPERS)), frames[0] if frames else "")


def _parameter(tensor: Tensor, *, in_layer: bool) -> str:
  """Return the only parameter that an equation reads, "mlp.down", with its stack outside of layers; "" if there is not exactly
  one."""
  names = {_input_keys(name) for name in tensor.reads if name.startswith("state['params']")}
  keys = names.pop() if len(names) == 1 else ()
  return ".".join(keys[2:] if in_layer else keys)


def _call(t: Tensor, place: LayerPlace) -> tuple:
  """Return a key that is the same for all equations of one product."""
  asked = [f for f in t.frames if not f.rsplit(":", 1)[0].endswith(_HELPERS)]
  return place, tuple(asked[:2]) if t.op in _PRODUCTS else id(t)  # several products can have the same line in one method


def _labels(tensors: Sequence[Tensor], places: Sequence[LayerPlace]) -> list[str]:
  """Return readable names of tensors: the parameter that the equation reads, or the innermost named scopes.

  The equation of a product's cotangent for the parameter does not read the parameter; it is named like the product.
  """
  read = [_parameter(t, in_layer=bool(p.layers)) for t, p in zip(tensors, places, strict=True)]
  calls = [_call(t, p) for t, p in zip(tensors, places, strict=True)]
  known: dict[tuple, set[str]] = {}
  for call, name in zip(calls, read, strict=True):
    known.setdefault(call, set()).update([name] if name else [])
  labels = []
  for t, place, name, call in zip(tensors, places, read, calls, strict=True):
    if not name and len(known[call]) == 1:
      (name,) = known[call]
    # the norm already has its own name
    scopes = place.scopes[:-1] if "".join(place.scopes[-2:]).endswith("normnorm") else place.scopes
    name = name or ".".join(scopes[-2:]) or Path(line_of(t.frames)).name
    labels.append(" ".join(filter(None, [name, "" if t.op in _PRODUCTS else t.op])))
  return labels


def translate(report: Report, decoder: Decoder, state: State) -> Report:
  """Translate a report of the training step to the model's names."""
  groups: dict[tuple, list[tuple[tuple[int, ...], int | None, Tensor]]] = {}
  rest: list[Tensor] = []
  seen: dict[tuple, int] = {}
  inside = [t for t in report.tensors if t.op not in ("input", "tag")]
  places = {id(t): place_of(decoder, t.path) for t in inside}
  labels = {id(t): label for t, label in zip(inside, _labels(inside, [places[id(t)] for t in inside]), strict=True)}
  # Group the tensors by name and dtype; each group has the same tensor of several layers.
  for t in report.tensors:
    if t.op in ("input", "tag"):
      keys = tuple(t.path.split(".")) if t.op == "tag" else _input_keys(t.path)
      stack = next((s for s in decoder.stacks if keys and s.name == keys[0]), None)
      if t.op == "tag" and stack is not None:
        j, label = int(keys[1].removeprefix("layer_")), ".".join(keys[2:])
        layers = tuple(stack.first + row * len(stack.layers) + j for row in range(stack.repeats))
        groups.setdefault((label, t.direction, t.dtype, t.loops), []).append((layers, 0, t))
      else:
        rest.append(dataclasses.replace(t, label=".".join(keys) or t.path))
      continue
    place, label, source = places[id(t)], labels[id(t)], line_of(t.frames)
    same = (label, t.direction, place.layers)
    seen[same] = seen.get(same, 0) + 1
    label += f" #{seen[same]}" if seen[same] > 1 else ""
    t = dataclasses.replace(t, label=label, source=source)
    # A tensor that jax moved out of the layers' scan may still be inside the scan of the microbatches, which has another
    # length.
    in_scan = place.axis is None or t.stats.max.shape[place.axis : place.axis + 1] == (len(place.layers),)
    if place.layers and in_scan:
      loops = tuple(k for i, k in enumerate(t.loops) if i != place.axis)
      groups.setdefault((label, t.direction, t.dtype, loops), []).append((place.layers, place.axis, t))
    else:
      rest.append(t)
  # Merge each group over its layers, and translate the faults.
  tensors = [*rest, *(_gathered(parts, label, len(decoder.layers)) for (label, *_), parts in groups.items())]
  faults = tuple(_translated(f, decoder, state) for f in report.faults)
  first = None if report.first_cause is None else _translated(report.first_cause, decoder, state)
  ordered = tuple(sorted((_ranked(t) for t in tensors), key=lambda t: t.order))
  return dataclasses.replace(report, tensors=ordered, faults=faults, first_cause=first)


def _ranked(t: Tensor) -> Tensor:
  """Mark tensors as minor (in xray.json, not in the table) if they are single numbers or were measured only for
  completeness."""
  spoilt_input = t.op == "input" and t.nonfinite > 0
  return dataclasses.replace(t, minor=not spoilt_input and (t.level != "full" or int(np.max(t.stats.count)) <= 1))


def _gathered(parts: list[tuple[tuple[int, ...], int | None, Tensor]], label: str, layers: int) -> Tensor:
  """Merge the same tensor of several layers into one whose first axis is the model's layers."""
  first = parts[0][2]

  def whole(read) -> np.ndarray:
    out = None
    for numbers, axis, t in parts:
      values = np.asarray(read(t.stats))
      values = values[None] if axis is None else np.moveaxis(values, axis, 0)
      if out is None:
        blank = 0 if np.issubdtype(values.dtype, np.integer) else np.nan
        out = np.full((layers, *values.shape[1:]), blank, values.dtype)
      out[list(numbers)] = values
    assert out is not None
    return out

  simple = [f.name for f in dataclasses.fields(Stats) if f.name not in ("flushed", "headroom")]
  fields: dict[str, Any] = {name: whole(lambda s, n=name: getattr(s, n)) for name in simple}
  for name in ("flushed", "headroom"):
    formats = getattr(first.stats, name)
    fields[name] = {fmt: whole(lambda s, n=name, f=fmt: getattr(s, n)[f]) for fmt in formats}
  axis = parts[0][1]
  loops = ("layer", *(k for i, k in enumerate(first.loops) if i != axis))
  return dataclasses.replace(first, stats=Stats(**fields), loops=loops, label=label)


def _input_keys(path: str) -> tuple[str, ...]:
  """Convert ``state['params']['stack_0']['layer_1']['mlp']['down']`` to the keys of the parameters, and ``batch['tokens']`` in
  the same way.

  For a moment of the optimizer, ``state['opt_state'][0].mu['head']['kernel']``, its name precedes the keys of its parameter.
  """
  found = _INPUT.fullmatch(path)
  keys = tuple(k.strip("'\"") for pair in re.findall(r"\[([^\]]+)\]|\.(\w+)", found[2]) for k in pair if k) if found else ()
  if keys[:1] == ("opt_state",):
    return tuple(k for k in keys[1:] if not k.isdecimal())
  return keys[1:] if keys[:1] == ("params",) else keys


def _translated(cause: Cause, decoder: Decoder, state: State) -> Cause:
  if cause.op == "input":
    return _translated_input(cause, decoder, state)
  place, source = place_of(decoder, cause.path), line_of(cause.frames)
  inside = place.axis is None or [loop.length for loop in cause.loops[place.axis : place.axis + 1]] == [len(place.layers)]
  if not place.layers or not inside:
    return dataclasses.replace(cause, source=source, layer=None)
  if place.axis is None:
    loops, layer = cause.loops, place.layers[0]
  else:
    row = cause.loops[place.axis].index
    loops, layer = tuple(loop for i, loop in enumerate(cause.loops) if i != place.axis), place.layers[row]
  loops = (Loop("scan", layer, len(decoder.layers)), *loops)
  return dataclasses.replace(cause, source=source, loops=loops, layer=layer)


def _translated_input(cause: Cause, decoder: Decoder, state: State) -> Cause:
  """Name a parameter, or an element of the optimizer state, that is not finite before the step, with its layers."""
  keys = _input_keys(cause.path)
  name = ".".join(keys)
  of_parameter = cause.path.startswith("state['params']")
  if of_parameter or cause.path.startswith("state['opt_state']"):
    leaves = {f"state{jax.tree_util.keystr(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(state)}
    x = leaves[cause.path]
    names = row_names(decoder, keys if of_parameter else keys[1:])
    if not of_parameter:
      names = [f"{keys[0]}.{n}" for n in names]
    if len(names) > 1 and x.shape[0] == len(names):
      good = on_host(jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))))
      names = [n for n, g in zip(names, good, strict=True) if not g]
    kind = "parameter" if of_parameter else "optimizer state"
    name = f"{kind} {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
  return dataclasses.replace(cause, path=name)


# Remedies.


def remedies(config: Config, cause: Cause) -> list[str]:
  """Return the settings that prevent this cause, by the named scopes around it; [] for an input that is already not finite."""
  if cause.op == "input":
    return []
  spot = Spot(frozenset(cause.path.split("/")), cause.direction, cause.dtype)
  return step_remedies(config, spot.failed, spot)


def cause_lines(config: Config, report: Report) -> str:
  """Return the first cause and the settings to try, one line each."""
  cause = report.first_cause
  if cause is None:
    return "every number is finite"
  return str(NonFiniteError(f"first cause: {cause}", remedies(config, cause)))
