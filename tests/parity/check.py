"""Compares our results of a case with those of transformers, and finds the first array that differs.

A difference counts if it is larger than the tolerance and larger than the effect of rounding on transformers' own results. If
a choice of a router or an indexer depends on the last bit, results differ between machines. Such cases get new weights.
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

TOLERANCE = 1e-4  # of logits, hidden states and loss in float32: relative to the largest entry, or to 1 if that is larger
GRADIENT_TOLERANCE = 1e-3  # relative to the largest entry of a gradient
NEGLIGIBLE = 1e-6  # relative to the largest entry of all gradients: smaller gradients are rounding errors
ROUNDING = 1e-7  # relative change of every weight, to measure the effect of rounding
TIMES = 4.0  # a difference is rounding if it is at most this many times the effect of rounding on transformers' results
SALTS = 5


@dataclass(frozen=True)
class Failure:
  """The difference or error of a case.

  Attributes:
    stage: "transformers" (which raised an error for the case), "forward", "gradients", "export".
    where: the first array that differs, or the error.
    lines: one line for every compared array, from the first layer on.
    folder: folder of the checkpoint and inputs, if they were kept.
  """

  stage: str
  where: str
  lines: tuple[str, ...] = ()
  folder: Path | None = None


@dataclass
class Outcome:
  """The result of a case: no difference, undecided (for every draw of the weights rounding decided), or a failure."""

  case: Case
  failure: Failure | None = None
  undecided: bool = False
  redrawn: int = 0
  worst: dict[str, float] = field(default_factory=dict)  # largest difference in units of the tolerance, by kind


def check(case: Case, *, exports: bool = True, keep: Path | None = None) -> Outcome:
  """Compares our results of a case with those of transformers.

  Args:
    case: the case.
    exports: import and export the checkpoint too, and to read the exported one with transformers.
    keep: folder for the checkpoint and inputs of a failure.
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
  except Exception as error:  # transformers may raise anything for a case it cannot run
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
  """Returns the names of the compared arrays: hidden states, logits and loss in the order of computation, then gradients."""
  states = ["hidden.embed", *sorted(name for name in theirs if name.startswith("hidden.layer")), "hidden.final_norm"]
  return [*states, "logits", "loss", *(name for name in theirs if name.startswith("grad."))]


def differences(
  ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], seen: np.ndarray, worst: dict[str, float] | None = None
) -> list[str]:
  """Returns the names of the arrays that differ by more than the tolerance, in the order of ``_kinds``.

  Args:
    ours, theirs: outputs by name.
    seen: bool [B, T], True at positions that are not padding.
    worst: receives the largest difference of each kind of array, in units of the tolerance.
  """
  found = []
  largest = _largest_gradient(theirs)
  for name in _kinds(theirs):
    if name.startswith("grad.") and name not in ours:  # ours omits a tower without images; theirs is 0
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
  """Returns the largest difference outside padding, or infinity if the shapes differ."""
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
  """Returns True if rounding explains all differences.

  Transformers' own results then change by a similar amount if every weight changes by a rounding error, or in float64.
  """
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
  """Returns a line for every compared array."""
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
  """Imports and exports the checkpoint, and checks that transformers reads the same tensors and computes the same logits."""
  try:
    import_checkpoint(checkpoint, folder / "imported")
    export_checkpoint(folder / "imported", folder / "exported", dtype="float32")
  except UserError as wrong:
    return Failure("export", f"refused: {wrong}")
  try:
    again = reference.load(folder / "exported")
  except Exception as wrong:  # transformers may raise anything for the exported files
    return Failure("export", f"transformers does not read it: {type(wrong).__name__}: {wrong}")
  before, after = model.state_dict(), again.state_dict()
  pooling_head = "vision_tower.head."  # of SigLIP: no features depend on it and no released file has it
  names = {name for name in before if pooling_head not in name}
  if names != (present := {name for name in after if pooling_head not in name}):
    return Failure("export", f"other tensors: {sorted(names ^ present)}")
  different = [name for name in sorted(names) if not bool((before[name] == after[name]).all())]
  if different:
    return Failure("export", f"other values: {different}")
  got = reference.run(again, inputs, gradients=False)
  off = _largest(got["logits"] - theirs["logits"])
  # Not bitwise: torch may sum in another order if the tensors are at other addresses of the file.
  if not off <= TOLERANCE * max(1.0, _largest(theirs["logits"])):
    with (folder / "exported" / "config.json").open() as file:
      return Failure("export", f"logits differ by {off:.3g}; exported config.json: {json.dumps(json.load(file))}")
  return None
