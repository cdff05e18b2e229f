"""Finds the smallest set of precision keys that fixes a step, for the complete model or for some layers, by delta debugging."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.analysis.ddmin import ddmin
from maxtext_like.analysis.distance import Distance, Ruler, Steps
from maxtext_like.analysis.precision_overrides import LOSS_SCALE, Remedy, applied, candidates, groups, last_resorts, layers_of
from maxtext_like.config.precision_keys import LAYER_KEYS
from maxtext_like.config.schema import Config
from maxtext_like.training.loop.finiteness import model_order
from maxtext_like.training.step.train_step import UNKNOWN

GROUPS = 8
"""Layers are searched in at most this many groups at a time."""
TOLERANCE = 0.5
"""Smallest automatic tolerance: an error of half the gradient, or half the update."""
USUAL = 2.0
"""Automatic tolerances are this multiple of the error of the dtype with every other key at its safer value."""
CAP = 3.0
"""Largest automatic tolerance. Two unrelated gradients of equal size have a distance of 1.4; single arrays of a normal step
reach 1.6."""
FREE_HALVINGS = 2
"""A float16 run lowers its loss scale automatically, so this many skipped steps at the start are normal."""
MANY_HALVINGS = 1000
TIMING_SECONDS = 20.0
TIMING_TURNS = 3  # smallest number of pairs, regardless of TIMING_SECONDS

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Finding:
  """The effect of one key of the answer.

  Attributes:
    key: its name.
    layers: where it is set; None for the complete model.
    before: distance with all of the answer except this key.
    after: distance with all of the answer.
    mends: the parts ("loss", "gradients", "update") that exceed the tolerance before, and not after.
    arrays: names of the arrays whose gradient or update exceeds the tolerance before and not after, in model order.
    cost: step time with the key / step time without it; None if not measured.
  """

  key: str
  layers: tuple[int, ...] | None
  before: Distance
  after: Distance
  mends: tuple[str, ...]
  arrays: tuple[str, ...]
  cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
  """The answer.

  Attributes:
    outcome: "fine" if the configuration is within the tolerance, "mended" if keys were found, "hopeless" if no keys fix it.
    before: distance of the unchanged configuration.
    after: distance of the fixed configuration, or of the nearest one that was found.
    remedies: the changes that lead to it.
    config: the configuration with these changes.
    findings: one for each key, if the outcome is "mended".
    steps: number of configurations that were measured.
  """

  outcome: Literal["fine", "mended", "hopeless"]
  before: Distance
  after: Distance
  remedies: tuple[Remedy, ...]
  config: Config
  findings: tuple[Finding, ...] = ()
  steps: int = 0


class Bisection:
  """One search.

  Args:
    config: configuration of the run.
    params, batch: see ``Ruler``.
    tolerance: largest relative error of loss, gradients (all together and each array) and update; see ``Distance``. With None,
      ``run`` chooses it: ``TOLERANCE``, or for each part ``USUAL`` times the smallest error that the dtype allows for this
      model.
    steps: compiled programs, which can be shared among searches.
    say: receives a line for each measurement.
  """

  def __init__(self, config: Config, params: Any, batch: Any, tolerance: float | None, steps: Steps, say: Say = lambda _: None):
    self.config, self.steps = config, steps
    self.chosen = tolerance is None
    self._undecided = self.chosen
    limit = TOLERANCE if tolerance is None else tolerance
    self.limits: dict[str, float] = dict.fromkeys(("loss", "gradients", "update"), limit)
    self._params, self._batch, self._say = params, batch, say
    self._ruler = Ruler(config, params, batch, steps)
    self._measured: dict[frozenset[Remedy], Distance] = {}
    self._platform = steps.program(config).model.devices[0].platform

  def distance(self, remedies: Sequence[Remedy]) -> Distance:
    """Return the distance of the configuration with some remedies. Results are cached."""
    key = frozenset(remedies)
    if key not in self._measured:
      begin = time.monotonic()
      halvings = MANY_HALVINGS if any(r.key == LOSS_SCALE for r in remedies) else FREE_HALVINGS
      found = self._measured[key] = self._ruler.measure(applied(self.config, remedies), halvings=halvings)
      good = ("mended" if remedies else "fine") if self.fine(found) else "?" if self._undecided else "no"
      names = summary(remedies) or "as it is"
      self._say(f"{len(self._measured):3}  {error_text(found.worst):>10}  {good:6}  {time.monotonic() - begin:5.1f} s  {names}")
    return self._measured[key]

  def fine(self, d: Distance) -> bool:
    """Return True if a distance is within the limits."""
    return all(error <= self.limits[part] for part, error in d.parts().items())

  def mends(self, remedies: Sequence[Remedy]) -> bool:
    """Return True if the configuration with some remedies is within the tolerance."""
    return self.fine(self.distance(remedies))

  def run(self, *, cost_repeats: int = 0) -> Result:
    """Run the search.

    Args:
      cost_repeats: number of step times to measure for each key, alternating with the step without it; 0 for none.
    """
    before = self.distance(())
    if self.fine(before):
      return Result(outcome="fine", before=before, after=before, remedies=(), config=self.config, steps=1)
    units = candidates(self.config, self._platform)
    if self._undecided:
      self._choose(self.distance(units))
      if self.fine(before):
        steps = len(self._measured)
        return Result(outcome="fine", before=before, after=before, remedies=(), config=self.config, steps=steps)
    found = self._search(units)
    if found is None:
      nearest = min(self._measured, key=lambda r: (self._measured[r].worst, len(r)))
      remedies = tuple(u for u in (*units, *last_resorts(self.config)) if u in nearest)
      return self._result("hopeless", before, remedies)
    found = self._verified(self._narrowed(found))
    result = self._result("mended", before, found)
    return dataclasses.replace(result, findings=tuple(self._findings(found, cost_repeats)), steps=len(self._measured))

  def _choose(self, best: Distance) -> None:
    """Set the limits from the error that remains with every key except ``dtype`` at its safer value, which is the error of the
    dtype.

    In a model with random weights, rounding errors grow through the layers until an ordinary bfloat16 gradient is off by half.
    """
    if best.finite:
      self.limits = {part: min(max(TOLERANCE, USUAL * error), CAP) for part, error in best.parts().items()}
      self._undecided = False

  def _result(self, outcome: Literal["mended", "hopeless"], before: Distance, remedies: tuple[Remedy, ...]) -> Result:
    after = self.distance(remedies)
    config = applied(self.config, remedies, after.loss_scale)
    return Result(
      outcome=outcome, before=before, after=after, remedies=remedies, config=config, steps=len(self._measured)
    )  # fmt: skip

  def _search(self, units: tuple[Remedy, ...]) -> tuple[Remedy, ...] | None:
    """Return a 1-minimal set of keys for the complete model, or None if no keys fix the step. ``dtype`` is used only if nothing
    else works."""
    if units and self.mends(units):
      return ddmin(units, self.mends)
    for resort in last_resorts(self.config):
      if self._undecided:
        self._choose(self.distance((*units, resort)))
      if self.mends((*units, resort)):
        return ddmin((*units, resort), self.mends)
    return None

  def _narrowed(self, found: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    """Return the same keys, restricted to as few layers as possible.

    Layers are tested in groups, and the required groups in smaller groups. A key that more than half of the groups require
    stays a key of the complete model: the fault is everywhere, and fewer layers would only show where the error crosses the
    tolerance.
    """
    places = {r: layers_of(self.config, r) for r in found if r.key in LAYER_KEYS}
    places = {r: layers for r, layers in places.items() if len(layers) > 1}
    if not places:
      return found
    # Start with large groups of layers for each key that can differ between layers.
    whole = tuple(r for r in found if r not in places)
    pieces = {r: groups(layers, GROUPS) for r, layers in places.items()}
    first = True
    while True:
      units = sorted(((group, r) for r, parts in pieces.items() for group in parts), key=lambda u: (u[0], found.index(u[1])))
      chosen = self._some_layers(whole, units)
      if chosen is None:
        return found
      # A key that most groups need is not narrowed.
      if first:
        first = False
        spread = [r for r in places if 2 * sum(u[1] == r for u in chosen) > len(pieces[r])]
        if spread:
          whole = tuple(r for r in found if r in whole or r in spread)
          pieces = {r: parts for r, parts in pieces.items() if r not in spread}
          if not pieces:
            return found
          first = True
          continue
      if all(len(group) == 1 for group, _ in chosen):
        return whole + tuple(Remedy(r.key, r.value, group[0]) for group, r in chosen)
      pieces = {}
      for group, r in chosen:
        pieces.setdefault(r, []).extend(groups(group, 2))

  def _some_layers(self, whole: tuple[Remedy, ...], units: list[tuple[tuple[int, ...], Remedy]]):
    """Return a 1-minimal subset of (layers, remedy) pairs that fixes the step together with ``whole``; None if not even all
    pairs do."""

    def mends(part):
      return self.mends((*whole, *(Remedy(r.key, r.value, layer) for group, r in part for layer in group)))

    # Keys that also act outside of layers may be needed there. For all other keys, all layers together are the same as the
    # complete model.
    outside = self.config.vision.use_multimodal or any(r.key in ("dtype", "matmul_precision") for _, r in units)
    if outside and not mends(units):
      return None
    return ddmin(units, mends)

  def _verified(self, found: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    """Remove remedies that are not needed after all. Most measurements are cached already.

    The narrowed keys and the other keys were minimal at different stages of the search.
    """
    for remedy in reversed(found):
      rest = tuple(r for r in found if r != remedy)
      if rest and self.mends(rest):
        return self._verified(rest)
    return found

  def _findings(self, found: tuple[Remedy, ...], cost_repeats: int):
    after = self.distance(found)
    for key in dict.fromkeys(r.key for r in found):
      rest = tuple(r for r in found if r.key != key)
      before = self.distance(rest)
      layers = tuple(r.layer for r in found if r.key == key and r.layer is not None) or None
      old, new = before.parts(), after.parts()
      limit = self.limits["gradients"]
      broken = (before.arrays > limit) & (after.arrays <= limit)
      limit = self.limits["update"]
      if before.update > limit >= after.update:
        broken |= (before.updates > limit) & (after.updates <= limit)
      cost = self._cost(found, rest, cost_repeats) if cost_repeats else None
      yield Finding(
        key=key,
        layers=layers,
        before=before,
        after=after,
        mends=tuple(part for part in old if old[part] > self.limits[part] >= new[part]),
        arrays=tuple(sorted((self._ruler.labels[i] for i in np.flatnonzero(broken)), key=model_order)),
        cost=cost,
      )

  def _cost(self, found: tuple[Remedy, ...], rest: tuple[Remedy, ...], repeats: int) -> float:
    """Return step time with ``found`` / step time with ``rest``: the median over pairs of complete train steps, run
    alternately.

    It stops after ``repeats`` pairs or after ``TIMING_SECONDS``.
    """
    if {r.key for r in found} - {r.key for r in rest} == {LOSS_SCALE}:
      return 1.0  # the loss scale is an argument of the same program
    self._say(f"     timing {summary(found)} against {summary(rest) or 'none'}")
    runs = []
    for remedies in (found, rest):
      config = applied(self.config, remedies, self.distance(remedies).loss_scale)
      program = self.steps.program(config)
      step = self.steps.train_step(config)
      spec = program.model.spec  # other arrays, such as an adapter's, are initialized: their values do not affect the time
      params = {name: jax.tree.map(lambda x, p: jnp.array(x, p.dtype), self._params[name], spec[name]) for name in spec}
      # a copy, because the step donates its state
      state = program.lower_around().compile()(params, np.uint32(config.training.seed % 2**32))
      runs.append([step, state, [], UNKNOWN])
    start = time.perf_counter()
    for turn in range(repeats + 1):
      if turn > TIMING_TURNS and time.perf_counter() - start > TIMING_SECONDS:
        break
      for run in runs:
        begin = time.perf_counter()
        run[1], metrics = run[0](run[1], self._batch, run[3])
        jax.block_until_ready((run[1], metrics))
        run[3] = metrics["magnitude_bound"]
        if turn:  # the first turn warms up
          run[2].append(time.perf_counter() - begin)
    return float(np.median(np.asarray(runs[0][2]) / np.asarray(runs[1][2])))


def summary(remedies: Sequence[Remedy]) -> str:
  """Return remedies in one line, with the layers of each key together."""
  layers: dict[str, list[str]] = {}
  for r in remedies:
    layers.setdefault(str(Remedy(r.key, r.value)), []).extend([] if r.layer is None else [str(r.layer)])
  return ", ".join(key + (f" in {_ranges([int(i) for i in where])}" if where else "") for key, where in layers.items())


def _ranges(layers: list[int]) -> str:
  parts, at = [], 0
  while at < len(layers):
    end = at
    while end + 1 < len(layers) and layers[end + 1] == layers[end] + 1:
      end += 1
    parts.append(str(layers[at]) if end == at else f"{layers[at]}-{layers[end]}")
    at = end + 1
  return ("layer " if len(layers) == 1 else "layers ") + ", ".join(parts)


def error_text(error: float) -> str:
  """Format a relative error for display."""
  return "not finite" if not np.isfinite(error) else f"{error:.2g}"
