"""The step-1 finiteness check: loss0, gradients, parameters after the update, loss1; and the guard that watches every step.

The looking is done inside the compiled step (``step.py``), in every step; this module turns its flags into four lines, a
file, and an error that says which of the four failed, where, and which precision keys to try.
"""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from maxtext_like.config.schema import Config
from maxtext_like.errors import NonFiniteError
from maxtext_like.training.loop.remedies import what_to_try
from maxtext_like.training.step.train_step import Batch, State

_log = logging.getLogger(__name__)
CHECKS = ("loss0", "gradients", "parameters", "loss1")
WORDS = {  # what is called otherwise in messages
  "optimizer": "optimizer state",
  "state_parameters": "parameters",
  "state_optimizer": "optimizer state",
}
USUAL_NORM = "0.1 to 100"  # gradient norm of a first step, from random and from trained weights
LARGE_NORM = 1000.0  # one above this is remarked on
SHOWN = 8  # names of non-finite arrays that are listed

Report = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class StepResult:
  """What the host knows about a finished step.

  Attributes:
    step: finished steps, this one included.
    scalars: metrics as Python numbers.
    finite: numpy bools as in ``TrainStep.__call__``: "loss", and by row "gradients", "parameters", "optimizer",
      "state_parameters", "state_optimizer".
  """

  step: int
  scalars: dict[str, float]
  finite: dict[str, np.ndarray]

  @property
  def state_finite(self) -> bool:
    """Whether the state after the step is, and so may be saved."""
    return bool(self.finite["state_parameters"].all() and self.finite["state_optimizer"].all())

  @property
  def overflow(self) -> bool:
    """True if it was skipped because float16 gradients overflowed, which a lower loss scale prevents."""
    return "loss_scale" in self.scalars and bool(self.finite["loss"]) and not self.finite["gradients"].all()


def model_order(name: str) -> tuple:
  """Sorts parameter names as a forward pass meets them."""
  if layer := re.match(r"(?:\w+\.)?layers\.(\d+)\.(.*)", name):
    return (1, int(layer[1]), layer[2])
  return (2 if re.search(r"\b(final_norm|head)\b", name) else 0, 0, name)


class Explainer(Protocol):
  """Watches a run for the step that ends it; analysis.failed_step has the one there is."""

  def remember(self, state: State) -> None:
    """Gets the state before each step, which takes the state's memory."""
    ...

  def explained(self, error: NonFiniteError, step: int, state: State, batch: Batch, *, applied: bool) -> NonFiniteError:
    """The error with what is known about it, of finished steps, the state after the failed one, and its batch.

    Args: ``applied``: the update was taken over, so the state before it is gone.
    """
    ...


class FinitenessGuard:
  """Follows a run: reports on its first steps, counts skipped ones, and ends it when they do not stop.

  Args:
    config: of the run.
    labels: parameter names behind the rows of "gradients" and "parameters".
    state_labels: names behind the other rows, ``TrainProgram.state_labels``.
    last_step: steps at the end of the run.
    untouched: ``TrainStep.untouched`` of its step.
  """

  def __init__(
    self,
    config: Config,
    labels: list[str],
    state_labels: dict[str, list[str]],
    last_step: int,
    untouched: Callable[[str], bool] = lambda failed: True,
  ):
    self._config, self._last_step, self._untouched = config, last_step, untouched
    self._labels = {"gradients": labels, "parameters": labels} | state_labels
    self._steps = config.training.finite_check_steps
    self._scaled = config.precision.dtype == "float16"
    self._applied = 0
    self._skipped_in_row = 0
    self.report: Report = {name: {"result": "not run", "finite": None} for name in CHECKS} if self._steps else {}
    self.changed = False

  @property
  def checking(self) -> bool:
    """Whether a failure of the next step is reported in full and ends the run."""
    return self._steps == -1 or self._applied < self._steps

  @property
  def may_end_the_run(self) -> bool:
    """Whether non-finite numbers in the next step would end the run, not only cost that step."""
    return self.checking or self._skipped_in_row > 0 or self._limit == 1

  @property
  def _limit(self) -> int:
    return max(self._config.training.max_skipped_steps, 1)

  def observe(self, result: StepResult) -> tuple[list[str], NonFiniteError | None]:
    """Takes note of a finished step.

    Returns:
      The lines to print about it, and the error that ends the run, when a check failed, too many updates were left out
      in a row, or the state itself is not finite.
    """
    checked, skipped = self.checking, bool(result.scalars["skipped"])
    lines = self._fill_report(result) if self._steps and checked else []
    if not result.state_finite:
      return lines + self._first_step_failed(), self._of_the_state(result, applied=not skipped)
    if not skipped:
      self._applied += 1
      self._skipped_in_row = 0
      return lines, None
    self._skipped_in_row += 1
    failed = self._failed(result)
    overflow = self._scaled and failed == "gradients"
    if checked and not overflow:
      return lines + self._first_step_failed(), self._error(result, failed)
    limit = self._limit
    if self._skipped_in_row >= limit:
      return lines, self._error(
        result, failed, f"{limit} updates in a row were left out because of non-finite numbers (max_skipped_steps)\n"
      )
    what = f"at loss scale {result.scalars['loss_scale']:g}, now halved" if overflow else self._left_out(failed)
    where = self._where(result, failed)
    return [*lines, f"step {result.step}: non-finite {where}; {what} ({self._skipped_in_row} of {limit})"], None

  def before_save(self, step: int, seen: dict[str, np.ndarray]) -> NonFiniteError | None:
    """The error of a state that must not be saved; ``seen``: ``TrainProgram.lower_look`` of it."""
    result = StepResult(step, {}, seen)
    return None if result.state_finite else self._of_the_state(result, applied=True)

  def _first_step_failed(self) -> list[str]:
    if not self.report or self._applied:
      return []
    self.report["loss1"] = {"result": "not run", "finite": None, "reason": "the step before it failed"}
    return [self._line("loss1")]

  def _failed(self, result: StepResult) -> str:
    if not result.finite["loss"]:
      return "loss0" if self._applied == 0 else "loss1" if self._applied == 1 else "loss"
    return next(what for what in ("gradients", "parameters", "optimizer") if not result.finite[what].all())

  def _names(self, result: StepResult, what: str) -> list[str]:
    return sorted((self._labels[what][i] for i in np.flatnonzero(~result.finite[what])), key=model_order)

  def _where(self, result: StepResult, failed: str) -> str:
    if failed.startswith("loss"):
      return f"{failed} ({result.scalars['loss']})"
    names = self._names(result, failed)
    return f"{WORDS.get(failed, failed)} in {len(names)} of {len(self._labels[failed])} arrays, first {names[0]}"

  def _of_the_state(self, result: StepResult, *, applied: bool) -> NonFiniteError:
    """The error of a state that holds non-finite numbers, which no step writes."""
    where = " and ".join(
      self._where(result, what) for what in ("state_parameters", "state_optimizer") if not result.finite[what].all()
    )
    if applied:
      return NonFiniteError(
        f"step {result.step}: non-finite {where} after an update that was finite by proof: they were not finite before it, "
        "or the device's memory changed; nothing of it is saved",
        ("the same command again, which goes on from the newest checkpoint", "another device if it comes again"),
      )
    return NonFiniteError(
      f"step {result.step}: non-finite {where}, before the step already, so it was restored or given; nothing was applied "
      "and nothing saved",
      what_to_try(self._config, "state"),
    )

  def _fill_report(self, result: StepResult) -> list[str]:
    """Enters one step into the report. A float16 overflow is entered, and overwritten by the first applied step."""
    self.changed = True
    before, s = self._applied, result.scalars
    if before == 1 or (before > 1 and not result.finite["loss"]):
      self.report["loss1"] = _entry(bool(result.finite["loss"]), step=result.step, value=_number(s["loss"]))
      return [self._line("loss1")]
    if before > 1 and not s["skipped"]:
      return []
    if before == 0:
      self.report["loss0"] = _entry(bool(result.finite["loss"]), step=result.step, value=_number(s["loss"]))
    self.report["gradients"] = self._arrays(result, "gradients", s["grad_norm"])
    if result.finite["loss"] and result.finite["gradients"].all():
      bad = "optimizer" if result.finite["parameters"].all() and not result.finite["optimizer"].all() else "parameters"
      self.report["parameters"] = self._arrays(result, bad, s["param_norm"])
    return [self._line(name) for name in CHECKS[:3]] + self._no_loss1(result)

  def _no_loss1(self, result: StepResult) -> list[str]:
    if result.step < self._last_step or result.scalars["skipped"]:
      return []
    self.report["loss1"] = {"result": "not run", "finite": None, "reason": f"the run ends at step {self._last_step}"}
    return [self._line("loss1")]

  def _arrays(self, result: StepResult, check: str, norm: float) -> dict[str, Any]:
    names = self._names(result, check)
    entry = _entry(not names, step=result.step, arrays=len(self._labels[check]))
    if not names or check == "gradients":
      entry["norm"] = _number(norm)  # of parameters that were not taken over there is none
      if check == "gradients" and not names and (remark := _unusual(norm)):
        entry["remark"] = remark
    if names:
      entry |= {"non_finite": len(names), "first": names[:SHOWN]}
    if "loss_scale" in result.scalars and check == "gradients":
      entry["loss_scale"] = result.scalars["loss_scale"]
    return entry

  def _line(self, name: str) -> str:
    e = self.report[name]
    if e["result"] == "not run":
      return f"finiteness  {name:<10}  not run" + (f": {e['reason']}" if "reason" in e else "")
    if name.startswith("loss"):
      return f"finiteness  {name:<10}  {e['result']:<10}  {_text(e['value'])}"
    if "first" not in e:
      detail = f"{e['arrays']} arrays, norm {_text(e['norm'])}" + (f": {e['remark']}" if "remark" in e else "")
    else:
      more = ", ..." if e["non_finite"] > 3 else ""
      detail = f"{e['non_finite']} of {e['arrays']} arrays: {', '.join(e['first'][:3])}{more}"
    return f"finiteness  {name:<10}  {e['result']:<10}  {detail}"

  def _error(self, result: StepResult, failed: str, before: str = "") -> NonFiniteError:
    whole = self._is_untouched(failed)
    left = (
      "the update was not applied and nothing of it saved" if whole else f"{self._left_out(failed)}; nothing of it is saved"
    )
    what = f"step {result.step}: non-finite {self._where(result, failed)}; {left}"
    return NonFiniteError(before + what, what_to_try(self._config, failed))

  def _is_untouched(self, failed: str) -> bool:
    return self._untouched("loss" if failed.startswith("loss") else failed)

  def _left_out(self, failed: str) -> str:
    if self._is_untouched(failed):
      return "the update is left out"
    first = failed == "gradients" and self._config.training.gradient_clipping_threshold > 0
    whole = ", where clip=exact would have left all as it was" if first else ""
    return f"the update is left out from there on, layers behind it in the model may have moved{whole}"


def _entry(finite: bool, **values: Any) -> dict[str, Any]:
  return {"result": "finite" if finite else "not finite", "finite": finite, **values}


def _unusual(norm: float) -> str | None:
  """Returns a remark on a gradient norm that is unusual for a first step, else None."""
  if norm > LARGE_NORM:
    return f"far above the usual {USUAL_NORM}; check the weights (maxtext-like risk) and the data, and lower learning_rate"
  return "no parameter has a gradient in this batch" if norm == 0 else None


def _number(x: float) -> float | str:
  """JSON has no NaN and no infinity."""
  return x if math.isfinite(x) else str(x)


def _text(x: float | str) -> str:
  return x if isinstance(x, str) else f"{x:.6g}"
