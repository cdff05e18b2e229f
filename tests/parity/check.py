"""One case on both sides: where the first number differs, if any does.

A difference counts if it is larger than the tolerance and larger than what rounding alone does to transformers' own numbers:
a router or an indexer whose choice hangs on the last bit makes other numbers on every machine. Such cases are drawn anew.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from maxtext_like.api.export import export_checkpoint
from maxtext_like.api.forward import forward
from maxtext_like.api.import_ import import_checkpoint
from maxtext_like.errors import UserError
from tests.parity import reference
from tests.parity.draw import Case, arrays

TOLERANCE = 1e-4  # logits, hidden states and loss in float32: of the largest entry, at least absolute
GRADIENT_TOLERANCE = 1e-3  # of the largest entry of a gradient
NEGLIGIBLE = 1e-6  # of the largest entry of all gradients: below, a gradient is rounding
ROUNDING = 1e-7  # relative, of every weight: what must not move a result by more than the tolerance
TIMES = 4.0  # how much worse than transformers' own rounding ours may be
SALTS = 5


@dataclass(frozen=True)
class Failure:
  """What is wrong.

  Attributes:
    stage: "transformers" (a case that it refuses), "forward", "gradients", "export".
    where: the first array that differs, or the error.
    lines: the differences, from the first layer on, a line each.
    folder: the checkpoint and inputs, if they were kept.
  """

  stage: str
  where: str
  lines: tuple[str, ...] = ()
  folder: Path | None = None


@dataclass
class Outcome:
  """What came of a case: nothing is wrong, it is not decided (every draw hung on rounding), or a failure."""

  case: Case
  failure: Failure | None = None
  undecided: bool = False
  redrawn: int = 0
  worst: dict[str, float] = field(default_factory=dict)  # of the tolerance, by kind of array


def check(case: Case, *, exports: bool = True, keep: Path | None = None) -> Outcome:
  """Compares a case on both sides.

  Args:
    case: what to compare.
    exports: import and export the checkpoint too, and read what was exported with transformers.
    keep: where to leave the checkpoint and inputs of a failure.
  """
  for salt in range(SALTS):
    drawn = replace(case, salt=salt)
    with tempfile.TemporaryDirectory() as folder:
      outcome = _once(drawn, Path(folder), exports)
      if outcome.failure and keep is not None:
        name = f"{case.family}-{case.seed}"
        shutil.rmtree(keep / name, ignore_errors=True)
        shutil.copytree(folder, keep / name)
    outcome.redrawn = salt
    if not outcome.undecided:
      return outcome
  return outcome


def _once(case: Case, folder: Path, exports: bool) -> Outcome:
  checkpoint, inputs = folder / "checkpoint", arrays(case)
  checkpoint.mkdir()
  np.savez(folder / "inputs.npz", allow_pickle=False, **inputs)
  try:
    model = reference.make(case, checkpoint)
    theirs = reference.run(model, inputs)
  except Exception as error:  # whatever transformers raises for a case it cannot run: the draw is at fault
    return Outcome(case, Failure("transformers", f"{type(error).__name__}: {error}"))
  try:
    ours = forward(checkpoint, folder / "inputs.npz", "dtype=float32", *case.words, gradients=True).arrays
  except UserError as error:
    return Outcome(case, Failure("forward", f"refused: {error}"))
  outcome = Outcome(case)
  seen = inputs.get("attention_mask", np.ones(inputs["input_ids"].shape)) == 1
  wrong = differences(ours, theirs, seen, outcome.worst)
  if wrong and _is_rounding(model, inputs, ours, theirs, seen, wrong):
    outcome.undecided = True
  elif wrong:
    first = wrong[0]
    outcome.failure = Failure("gradients" if first.startswith("grad.") else "forward", first, tuple(_table(ours, theirs, seen)))
  elif exports:
    outcome.failure = _export(case, checkpoint, folder, model, inputs, theirs)
  return outcome


def _kinds(theirs: Mapping[str, np.ndarray]) -> list[str]:
  """The names of what is compared, in the order of computation: states, logits, loss, then gradients from the last layer."""
  states = ["hidden.embed", *sorted(name for name in theirs if name.startswith("hidden.layer")), "hidden.final_norm"]
  return [*states, "logits", "loss", *(name for name in theirs if name.startswith("grad."))]


def differences(
  ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], seen: np.ndarray, worst: dict[str, float] | None = None
) -> list[str]:
  """Names of the arrays that differ by more than the tolerance, in the order of computation.

  Args:
    ours, theirs: outputs by name.
    seen: bool [B, T], positions that are no padding.
    worst: receives the largest difference, in units of the tolerance, of each kind.
  """
  found = []
  largest = _largest_gradient(theirs)
  for name in _kinds(theirs):
    if name.startswith("grad.") and name not in ours:  # a tower that is not read without images has none there either
      if _largest(theirs[name]) > NEGLIGIBLE * largest:
        found.append(name)
      continue
    part = error(ours, theirs, seen, name) / _allowed(theirs, seen, name, largest)
    if worst is not None:
      kind = name.partition(".")[0]
      worst[kind] = max(worst.get(kind, 0.0), part)
    if not part <= 1:
      found.append(name)
  return found


def _select(array: np.ndarray, seen: np.ndarray, name: str) -> np.ndarray:
  return array[seen] if array.ndim >= 2 and not name.startswith("grad.") else array


def error(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], seen: np.ndarray, name: str) -> float:
  """The largest difference where there is no padding; infinite where the shapes differ."""
  a, b = ours[name], theirs[name]
  if a.shape != b.shape:
    return float("inf")
  return _largest(_select(a, seen, name).astype(np.float64) - _select(b, seen, name))


def _largest(array: np.ndarray) -> float:
  return float(np.abs(array).max()) if array.size else 0.0


def _largest_gradient(theirs: Mapping[str, np.ndarray]) -> float:
  return max((_largest(array) for name, array in theirs.items() if name.startswith("grad.")), default=0.0)


def _allowed(theirs: Mapping[str, np.ndarray], seen: np.ndarray, name: str, largest: float) -> float:
  size = _largest(_select(theirs[name], seen, name))
  if name.startswith("grad."):
    return max(GRADIENT_TOLERANCE * size, NEGLIGIBLE * largest, 1e-12)
  return TOLERANCE * max(1.0, size)


def _is_rounding(model, inputs, ours, theirs, seen, wrong: list[str]) -> bool:
  """Whether transformers' own numbers move as far when every weight moves by a rounding, or every number is float64."""
  others = [reference.nudged(model, inputs, size=ROUNDING, seed=seed) for seed in range(3)]
  others.append(reference.in_float64(model, inputs))
  for name in wrong:
    if name not in ours or ours[name].shape != theirs[name].shape:
      return False
    own = max(error(other, theirs, seen, name) for other in others)
    if error(ours, theirs, seen, name) > TIMES * own:
      return False
  return True


def _table(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], seen: np.ndarray) -> list[str]:
  """A line for every array that is compared."""
  lines, largest = [], _largest_gradient(theirs)
  for name in _kinds(theirs):
    if name not in ours:
      lines.append(f"{name}: not here")
      continue
    off, allowed = error(ours, theirs, seen, name), _allowed(theirs, seen, name, largest)
    place = ""
    if not off <= allowed and ours[name].shape == theirs[name].shape and ours[name].ndim:
      gap = np.abs(ours[name] - theirs[name])
      if gap.ndim == 3 and not name.startswith("grad."):
        gap = np.where(seen[..., None], gap, 0)
        rows = np.argwhere(gap.max(axis=-1) > allowed)
        place = f", from [row, position] {rows[0].tolist()} on, {len(rows)} of {int(seen.sum())} positions" if len(rows) else ""
    lines.append(f"{name}: {off:.2g} of {allowed:.2g} allowed{' <-- differs' if not off <= allowed else ''}{place}")
  return lines


def _export(case: Case, checkpoint: Path, folder: Path, model, inputs, theirs) -> Failure | None:
  """Our checkpoint of theirs, exported again: every tensor the same, and the logits."""
  try:
    import_checkpoint(checkpoint, folder / "imported")
    export_checkpoint(folder / "imported", folder / "exported", dtype="float32")
  except UserError as wrong:
    return Failure("export", f"refused: {wrong}")
  try:
    again = reference.load(folder / "exported")
  except Exception as wrong:  # whatever transformers raises for what we wrote
    return Failure("export", f"transformers does not read it: {type(wrong).__name__}: {wrong}")
  before, after = model.state_dict(), again.state_dict()
  pooling_head = "vision_tower.head."  # of SigLIP, which no features need and no released file has
  names = {name for name in before if pooling_head not in name}
  if names != (present := {name for name in after if pooling_head not in name}):
    return Failure("export", f"other tensors: {sorted(names ^ present)}")
  different = [name for name in sorted(names) if not bool((before[name] == after[name]).all())]
  if different:
    return Failure("export", f"other values: {different}")
  got = reference.run(again, inputs, gradients=False)
  off = _largest(got["logits"] - theirs["logits"])
  # Not bit by bit: torch sums in another order where a file's tensors lie at other addresses.
  if not off <= TOLERANCE * max(1.0, _largest(theirs["logits"])):
    with (folder / "exported" / "config.json").open() as file:
      return Failure("export", f"logits differ by {off:.3g}; exported config.json: {json.dumps(json.load(file))}")
  return None
