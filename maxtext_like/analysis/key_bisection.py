"""Which precision keys mend a step: the smallest set of them, of the whole model or of some layers, by delta debugging."""

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
"""Layers are looked at in so many groups at a time."""
TOLERANCE = 0.5
"""The least of the tolerances that are chosen for a configuration: half of the gradient, or of the update."""
USUAL = 2.0
"""They allow so many times the error that the dtype makes with every other key at its safer value."""
CAP = 3.0
"""And no more than this: two unrelated gradients of one size are 1.4 apart, and single arrays of a normal step up to 1.6."""
FREE_HALVINGS = 2
"""A float16 run halves the loss scale by itself: so many skipped steps at its beginning are no fault."""
MANY_HALVINGS = 1000
TIMING_SECONDS = 20.0
TIMING_TURNS = 3  # at least, however long they take

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Finding:
  """What one key of the answer does.

  Attributes:
    key: its name.
    layers: where it is set; None: in the whole model.
    before: with all of the answer but this key.
    after: with all of it.
    mends: the parts ("loss", "gradients", "update") that are beyond the tolerance before, and not after.
    arrays: names of the arrays whose gradient or update is beyond it before and not after, in the order of the model.
    cost: step time with the key / without it; None: not measured.
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
    outcome: "fine": within the tolerance as it is; "mended"; "hopeless": nothing mends it.
    before: the configuration as it is.
    after: the mended one, or the nearest that was found.
    remedies: what leads there.
    config: with it.
    findings: one for each key, when mended.
    steps: how many configurations were measured.
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
    config: of the run.
    params, batch: see ``Ruler``.
    tolerance: largest relative error of loss, gradients (together and of each array) and update; see ``Distance``. None:
      chosen by ``run``: ``TOLERANCE``, or for each part ``USUAL`` times what the dtype makes of this model at best.
    steps: compiled programs, to be shared among searches.
    say: gets a line for each measurement.
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
    """Of the configuration with some remedies; measured once."""
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
    """Whether a distance is within the limits."""
    return all(error <= self.limits[part] for part, error in d.parts().items())

  def mends(self, remedies: Sequence[Remedy]) -> bool:
    """Whether the configuration with some remedies is within the tolerance."""
    return self.fine(self.distance(remedies))

  def run(self, *, cost_repeats: int = 0) -> Result:
    """Searches.

    Args:
      cost_repeats: step times of each key to take, interleaved with those of the step without it; 0: none.
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
    """Sets the limits, from the error that is left with every key but ``dtype`` at its safer value: the dtype's own.

    Rounding grows through the layers of a model of random weights until a normal bfloat16 gradient is off by half.
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
    """A 1-minimal set of keys of the whole model; ``dtype`` only if nothing else does. None: nothing mends it."""
    if units and self.mends(units):
      return ddmin(units, self.mends)
    for resort in last_resorts(self.config):
      if self._undecided:
        self._choose(self.distance((*units, resort)))
      if self.mends((*units, resort)):
        return ddmin((*units, resort), self.mends)
    return None

  def _narrowed(self, found: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    """The same keys in as few layers as will do.

    Layers are taken in groups, and the groups that are needed in smaller ones. A key that more than half of the groups
    need stays one of the whole model: the fault is everywhere, and fewer layers would only tell where the tolerance ends.
    """
    places = {r: layers_of(self.config, r) for r in found if r.key in LAYER_KEYS}
    places = {r: layers for r, layers in places.items() if len(layers) > 1}
    if not places:
      return found
    whole = tuple(r for r in found if r not in places)
    pieces = {r: groups(layers, GROUPS) for r, layers in places.items()}
    first = True
    while True:
      units = sorted(((group, r) for r, parts in pieces.items() for group in parts), key=lambda u: (u[0], found.index(u[1])))
      chosen = self._some_layers(whole, units)
      if chosen is None:
        return found
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
    """A 1-minimal part of (layers, remedy) pairs that mends together with ``whole``; None: not even all of them do."""

    def mends(part):
      return self.mends((*whole, *(Remedy(r.key, r.value, layer) for group, r in part for layer in group)))

    # What acts outside of layers too may be needed there; of the rest, all layers are the whole model.
    outside = self.config.vision.use_multimodal or any(r.key in ("dtype", "matmul_precision") for _, r in units)
    if outside and not mends(units):
      return None
    return ddmin(units, mends)

  def _verified(self, found: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    """Without what can be left out after all; usually a look at what is known already.

    The keys that were narrowed and those that were not were minimal at different times.
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
    """Step time with ``found`` / with ``rest``: the median over pairs of whole train steps, one of each in turn.

    It ends after ``repeats`` pairs, or after ``TIMING_SECONDS``.
    """
    if {r.key for r in found} - {r.key for r in rest} == {LOSS_SCALE}:
      return 1.0  # an argument of the same program
    self._say(f"     timing {summary(found)} against {summary(rest) or 'none'}")
    runs = []
    for remedies in (found, rest):
      config = applied(self.config, remedies, self.distance(remedies).loss_scale)
      program = self.steps.program(config)
      step = self.steps.train_step(config)
      spec = program.model.spec  # what stands beside it, as an adapter, takes as long whatever its numbers are
      params = {name: jax.tree.map(lambda x, p: jnp.array(x, p.dtype), self._params[name], spec[name]) for name in spec}
      state = program.lower_around().compile()(params, np.uint32(config.training.seed % 2**32))  # a copy is given away
      runs.append([step, state, [], UNKNOWN])
    start = time.perf_counter()
    for turn in range(repeats + 1):
      if turn > TIMING_TURNS and time.perf_counter() - start > TIMING_SECONDS:
        break
      for run in runs:
        begin = time.perf_counter()
        run[1], metrics = run[0](run[1], self._batch, run[3])
        jax.block_until_ready((run[1], metrics))
        run[3] = metrics["known"]
        if turn:  # the first warms up
          run[2].append(time.perf_counter() - begin)
    return float(np.median(np.asarray(runs[0][2]) / np.asarray(runs[1][2])))


def summary(remedies: Sequence[Remedy]) -> str:
  """Remedies in a line, the layers of a key together."""
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
  """A relative error for people."""
  return "not finite" if not np.isfinite(error) else f"{error:.2g}"
