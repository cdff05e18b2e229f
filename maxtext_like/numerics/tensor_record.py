"""One record for each measured tensor of a program: its place, its dtype and its statistics.

The report (``xray_report``) and its HTML page (``xray_html``) show these records.
"""

import dataclasses
import math

import numpy as np

from maxtext_like.numerics.cause import over_shards
from maxtext_like.numerics.plan import Frame, Site
from maxtext_like.numerics.tensor_statistics import Stats, decode


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One measured tensor of the program.

  Attributes:
    path: argument path of an input; otherwise the name stack with the calls and loops around the equation.
    op, source, direction, dtype, shape: as in Cause; shape is that of one iteration (and of one shard in a shard_map).
    loops: kinds of the surrounding loops, outermost first; they are the axes of every array in stats.
    stats: Stats.
    level: "full", "light" (maximum and non-finite counts only), or "flag" (maximum; a count of 1 means "some").
    frames: as in Cause.
    label: a readable name set by the caller; see name.
    minor: True if it is left out of the table and the heat maps.
    reads: the inputs of the program that the equation reads.
  """

  path: str
  op: str
  source: str
  direction: str
  dtype: str
  shape: tuple[int, ...]
  loops: tuple[str, ...]
  stats: Stats
  level: str
  order: int
  frames: tuple[str, ...] = ()
  label: str = ""
  minor: bool = False
  reads: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    """The label if there is one; otherwise the last named scope, the file and line, and the operation."""
    if self.label:
      return self.label
    if self.op in ("input", "tag"):
      return self.path
    scopes = [p for p in self.path.split("/") if p and p not in ("scan", "while", "shard_map") and "(" not in p]
    place = self.source.rsplit("/", 1)[-1]
    return " ".join(filter(None, ["/".join(scopes[-2:]), place, self.op]))

  @property
  def nonfinite(self) -> int:
    return int(self.stats.nonfinite.sum())


def severity(t: Tensor, fmt: str) -> tuple[bool, float]:
  """Sort key: tensors with non-finite numbers first, then by headroom."""
  bits = best(np.nanmin, t.stats.headroom[fmt])
  return (t.nonfinite == 0, math.inf if math.isnan(bits) else bits)


def sizeless(t: Tensor, infinite: str) -> str:
  """Return "NaN" or ``infinite`` for a tensor whose only finite numbers are zeros; "" for all others."""
  if t.nonfinite == 0 or not np.isnan(t.stats.max).all():
    return ""
  return "NaN" if t.stats.nan.any() else infinite


def worst_index(t: Tensor) -> tuple[int, ...]:
  """Return the iteration with the first non-finite number, or else with the largest maximum; () outside loops."""
  if not t.loops:
    return ()
  bad = t.stats.nonfinite > 0
  score = bad if bad.any() else np.nan_to_num(t.stats.max, nan=-1.0)
  return tuple(int(i) for i in np.unravel_index(int(np.argmax(score)), score.shape))


def records(frame: Frame, data, loops: tuple[str, ...] = ()) -> list[Tensor]:
  """Return the tensors of a frame and of the frames inside it, from its data (host arrays). ``loops`` are those around it."""
  found = []
  for site in dict.fromkeys(frame.sites):
    rows = data["rows"][..., site.row : site.row + site.rows, :] if site.rows else data["rows"][..., site.row, :]
    found.append(_tensor(site, rows, (*loops, "rows") if site.rows else loops))
  for node, child in zip(frame.children, data["children"], strict=True):
    if node.kind == "scan":
      found += records(node.frames[0], child, (*loops, "scan"))
    elif node.kind == "while":
      steps = max(1, int(np.max(child["steps"], initial=0)))
      found += records(node.frames[0], _first(child["history"], steps, len(loops)), (*loops, "while"))
    elif node.kind == "cond":
      for branch, branch_data in zip(node.frames, child["branches"], strict=True):
        found += records(branch, branch_data, loops)
    else:
      found += records(node.frames[0], over_shards(child, len(loops)), loops)
  return found


def _tensor(site: Site, rows: np.ndarray, loops: tuple[str, ...]) -> Tensor:
  stats = decode(rows, full=site.full, dtype=site.dtype)
  level = "flag" if site.flag else "full" if site.full else "light"
  dtype = str(np.dtype(site.dtype))
  place = (site.path, site.op, site.source, site.direction)
  return Tensor(*place, dtype, site.shape, loops, stats, level, site.order, site.frames, reads=site.reads)


def _first(data, n: int, axis: int):
  """Return the first n entries along an axis of every array: the iterations of a while loop that ran."""
  if isinstance(data, dict):
    return {k: _first(v, n, axis) for k, v in data.items()}
  if isinstance(data, list | tuple):
    return [_first(v, n, axis) for v in data]
  return data[(slice(None),) * axis + (slice(n),)]


def best(reduce, values: np.ndarray) -> float:
  """Reduce without NaN; NaN if all values are NaN."""
  return math.nan if np.isnan(values).all() else float(reduce(values))
