"""Reports the finiteness of every step and decides when non-finite numbers end the run.

The compiled step (``step.py``) does the checks. This module turns its flags into four report lines for the first steps (loss0,
gradients, parameters after the update, loss1), the file finiteness.json, and an error that names what failed, where, and which
precision keys to change.
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
from maxtext_like.training.loop.remedies import step_remedies
from maxtext_like.training.step.train_step import Batch, State

_log = logging.getLogger(__name__)
CHECKS = ("loss0", "gradients", "parameters", "loss1")
WORDS = {  # names used in messages
  "optimizer": "optimizer state",
  "state_parameters": "parameters",
  "state_optimizer": "optimizer state",
}
USUAL_NORM = "0.1 to 100"  # gradient norm of a first step, from random or trained weights
LARGE_NORM = 1000.0  # a larger gradient norm gets a remark
SHOWN = 8  # maximum number of listed names of non-finite arrays

Report = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class StepResult:
  """Results of a finished step on the host.

  Attributes:
    step: number of finished steps, including this one.
    scalars: metrics as Python numbers.
    finite: NumPy bools as in ``TrainStep.__call__``: "loss", and per row "gradients", "parameters", "optimizer",
      "state_parameters", "state_optimizer".
  """

  step: int
  scalars: dict[str, float]
  finite: dict[str, np.ndarray]

  @property
  def state_finite(self) -> bool:
    """True if the state after the step is finite and may be saved."""
    return bool(self.finite["state_parameters"].all() and self.finite["state_optimizer"].all())

  @property
  def overflow(self) -> bool:
    """True if the step was skipped because float16 gradients overflowed. A lower loss scale prevents this."""
    return "loss_scale" in self.scalars and bool(self.finite["loss"]) and not self.finite["gradients"].all()


def model_order(name: str) -> tuple:
  """Sort key that puts parameter names in the order of the forward pass."""
  if layer := re.match(r"(?:\w+\.)?layers\.(\d+)\.(.*)", name):
    return (1, int(layer[1]), layer[2])
  return (2 if re.search(r"\b(final_norm|head)\b", name) else 0, 0, name)


class Explainer(Protocol):
  """Keeps and explains the step that ends the run. ``analysis.failed_step`` implements it."""

  def explained(self, error: NonFiniteError, result: StepResult, state: State, batch: Batch) -> NonFiniteError:
    """Return the error with an explanation.

    Args:
      error: the error that ends the run.
      result: metrics of the failed step.
      state: state after the failed step.
      batch: batch of the failed step.
    """
    ...


class FinitenessGuard:
  """Watches a run: reports on its first steps, counts skipped ones, and ends the run after too many in a row.

  Args:
    config: configuration of the run.
    labels: parameter names of the rows of "gradients" and "parameters".
    state_labels: names of the other rows, ``TrainProgram.state_labels``.
    last_step: number of the run's last step.
    untouched: ``TrainStep.untouched`` of the run's step.
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
    # -1 checks every step.
    self._steps = config.training.finite_check_steps
    self._scaled = config.precision.dtype == "float16"
    self._applied = 0
    self._skipped_in_row = 0
    self.report: Report = {name: {"result": "not run", "finite": None} for name in CHECKS} if self._steps else {}
    self.changed = False

  @property
  def checking(self) -> bool:
    """True if the next step is reported in full and a failure of it ends the run."""
    return self._steps == -1 or self._applied < self._steps

  @property
  def may_end_the_run(self) -> bool:
    """True if non-finite numbers in the next step would end the run instead of only skipping that step."""
    return self.checking or self._skipped_in_row > 0 or self._limit == 1

  @property
  def _limit(self) -> int:
    return max(self._config.training.max_skipped_steps, 1)

  def observe(self, result: StepResult) -> tuple[list[str], NonFiniteError | None]:
    """Record a finished step.

    Returns:
      The lines to print, and the error that ends the run: a first step failed, too many updates in a row were skipped, or
      the state is not finite.
    """
    checked, skipped = self.checking, bool(result.scalars["skipped"])
    lines = self._fill_report(result) if self._steps and checked else []
    # A non-finite state always ends the run.
    if not result.state_finite:
      return lines + self._first_step_failed(), self._of_the_state(result, applied=not skipped)
    # An applied step resets the count of skipped ones.
    if not skipped:
      self._applied += 1
      self._skipped_in_row = 0
      return lines, None
    # A skipped step ends the run if it is one of the checked first steps (except for a float16 overflow) or one too many.
    self._skipped_in_row += 1
    failed = self._failed(result)
    overflow = self._scaled and failed == "gradients"
    if checked and not overflow:
      return lines + self._first_step_failed(), self._error(result, failed)
    limit = self._limit
    if self._skipped_in_row >= limit:
      return lines, self._error(
        result, failed, f"{limit} updates in a row were skipped because of non-finite numbers (max_skipped_steps={limit})\n"
      )
    what = f"at loss scale {result.scalars['loss_scale']:g}, now halved" if overflow else self._left_out(failed)
    where = self._where(result, failed)
    return [*lines, f"step {result.step}: non-finite {where}; {what} ({self._skipped_in_row} of {limit})"], None

  def before_save(self, step: int, seen: dict[str, np.ndarray]) -> NonFiniteError | None:
    """Return the error of a state that must not be saved, or None. ``seen``: result of ``TrainProgram.lower_check``."""
    result = StepResult(step, {}, seen)
    return None if result.state_finite else self._of_the_state(result, applied=True)

  def _first_step_failed(self) -> list[str]:
    if not self.report or self._applied:
      return []
    self.report["loss1"] = {"result": "not run", "finite": None, "reason": "the previous step failed"}
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
    """Return the error of a state with non-finite numbers. No step writes such a state."""
    # Name the arrays. Their numbers were wrong before this step, so its update is not the cause.
    where = " and ".join(
      self._where(result, what) for what in ("state_parameters", "state_optimizer") if not result.finite[what].all()
    )
    # A proof needs finite numbers before the step, so either these were wrong or memory was corrupted.
    if applied:
      return NonFiniteError(
        f"step {result.step}: non-finite {where} after an update that was proved finite. Either the numbers were already "
        "non-finite before the step, or the device's memory is faulty. No checkpoint was written.",
        ("the same command again; it resumes from the newest checkpoint", "another device, if the error returns"),
      )
    # No update was involved, so the state was not finite from the beginning.
    return NonFiniteError(
      f"step {result.step}: non-finite {where} already before the step, in the restored or initial state. No update was "
      "applied and no checkpoint was written.",
      step_remedies(self._config, "state"),
    )

  def _fill_report(self, result: StepResult) -> list[str]:
    """Enter one step into the report. The first applied step overwrites the entry of a float16 overflow."""
    self.changed = True
    # loss1 is the loss of the second applied step.
    before, s = self._applied, result.scalars
    if before == 1 or (before > 1 and not result.finite["loss"]):
      self.report["loss1"] = _entry(bool(result.finite["loss"]), step=result.step, value=_number(s["loss"]))
      return [self._line("loss1")]
    if before > 1 and not s["skipped"]:
      return []
    # The first applied step gives the other three checks.
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
    # Number of arrays and their norm, or the names of the non-finite ones.
    entry = _entry(not names, step=result.step, arrays=len(self._labels[check]))
    if not names or check == "gradients":
      entry["norm"] = _number(norm)  # a rejected update has no parameter norm
      if check == "gradients" and not names and (remark := _unusual(norm)):
        entry["remark"] = remark
    if names:
      entry |= {"non_finite": len(names), "first": names[:SHOWN]}
    if "loss_scale" in result.scalars and check == "gradients":
      entry["loss_scale"] = result.scalars["loss_scale"]
    return entry

  def _line(self, name: str) -> str:
    # A check without a result, a loss, or a list of arrays.
    e = self.report[name]
    # A check without a result, a loss, a complete check, or the first non-finite names.
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
    left = "the update was not applied" if whole else self._left_out(failed)
    what = f"step {result.step}: non-finite {self._where(result, failed)}; {left}; no checkpoint was written"
    return NonFiniteError(before + what, step_remedies(self._config, failed))

  def _is_untouched(self, failed: str) -> bool:
    return self._untouched("loss" if failed.startswith("loss") else failed)

  def _left_out(self, failed: str) -> str:
    if self._is_untouched(failed):
      return "the update is skipped"
    first = failed == "gradients" and self._config.training.gradient_clipping_threshold > 0
    whole = ". Use clip=exact to apply updates completely or not at all" if first else ""
    return f"the update was applied only partly: layers after this one in the model may already be updated{whole}"


def _entry(finite: bool, **values: Any) -> dict[str, Any]:
  return {"result": "finite" if finite else "not finite", "finite": finite, **values}


def _unusual(norm: float) -> str | None:
  """Return a remark about a gradient norm that is unusual for a first step, or None."""
  if norm > LARGE_NORM:
    return f"far above the usual {USUAL_NORM}; check the weights (maxtext-like risk) and the data, or lower learning_rate"
  return "no parameter has a gradient in this batch" if norm == 0 else None


def _number(x: float) -> float | str:
  """Return non-finite numbers as text, because JSON has no NaN or infinity."""
  return x if math.isfinite(x) else str(x)


def _text(x: float | str) -> str:
  return x if isinstance(x, str) else f"{x:.6g}"
