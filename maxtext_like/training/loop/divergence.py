"""Divergence: losses and parameter norms that explode, and whether a run leaves weights that can be used.

The loop passes each step to a ``Divergence``, which reports a rise by an order of magnitude and judges the run at its end. Its
state is part of every checkpoint, so a resumed run compares with the first loss of all, and finished runs and exports are
judged from the manifest alone, without JAX.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxtext_like.checkpoint.store.manifest import Manifest
from maxtext_like.config.schema import Config
from maxtext_like.errors import NonFiniteError
from maxtext_like.training.loop.remedies import after_a_rise, lower_rate

EXTRA = "divergence"  # name in a checkpoint's extra values

RISE = 10.0
"""A loss or a parameter norm that grows by this factor in one step is reported. Losses below 1 count as 1: a batch of 0.5 after
one of 0.01 is an ordinary difference between batches."""
REPORTED_RISES = 5

# A run has failed if the smallest of its last losses is above both ``first + ABOVE`` and ``ABOVE_FACTOR * first``. Losses are
# in nats per token: 4 more of them is a perplexity 55 times higher. Batches of one data set differ by less, and a run from
# random weights, which starts at the logarithm of the vocabulary (5.5 to 12.5), rises by less before it recovers. The smallest
# of five losses keeps one hard batch from failing a run.
ABOVE, ABOVE_FACTOR, LAST = 4.0, 1.5, 5
# One loss alone is enough if it is above both ``first + EXPLODED`` and ``EXPLODED * first``.
EXPLODED = 10.0
# Parameters whose norm has grown by this factor are ruined, even if the loss is that of uniform guesses: softmax and norms hide
# their size, and their gradients are zero. Ordinary training grows the norm by a small factor.
GROWN = 100.0
LARGEST = 3.4e38  # stored in place of a norm beyond float32: JSON has no infinity
# Float16 skips a step or two whenever it lowers its loss scale. More of them in a row at the end are a failure.
OVERFLOWS = 3
RECENT_STEPS = 20  # steps after a rise in which a non-finite number is explained by it


@dataclass
class History:
  """The losses of a run that a checkpoint stores, and the judgment on its weights.

  Attributes:
    first: loss of the first step; None before it.
    last: losses of the newest applied steps, without the first step.
    skipped: steps in a row, up to the newest one, whose updates were not applied.
    overflowed: True if all of these were float16 overflows of gradients.
    final: loss of the weights that the last step left; None while the run continues.
    first_norm: parameter norm before the first step; None if it is not known.
    norm: parameter norm after the newest applied step.
  """

  first: float | None = None
  last: tuple[float, ...] = ()
  skipped: int = 0
  overflowed: bool = False
  final: float | None = None
  first_norm: float | None = None
  norm: float | None = None

  @classmethod
  def from_json(cls, state: dict[str, Any] | None) -> "History":
    """Returns the history that a checkpoint stores. None gives an empty one, because earlier versions stored none."""
    if state is None:
      return cls()
    final = state["final"]
    return cls(**state | {"last": tuple(state["last"]), "final": None if final is None else float(final)})

  def to_json(self) -> dict[str, Any]:
    """Returns the fields as JSON."""
    return vars(self) | {"final": None if self.final is None else repr(self.final)}  # JSON has no NaN

  def add(self, loss: float | None, *, skipped: bool, overflow: bool) -> None:
    """Records a step.

    Args:
      loss: loss of the step; None if its batch had no targets, so that its loss of 0 has no meaning.
      skipped: the update was not applied.
      overflow: it was skipped because float16 gradients overflowed.
    """
    # The loss of the final weights is measured again at the end of each run.
    self.final = None
    self.overflowed = skipped and overflow and (self.overflowed or not self.skipped)
    self.skipped = self.skipped + 1 if skipped else 0
    if loss is None:
      return
    if self.first is None and math.isfinite(loss):
      self.first = loss
    elif not skipped:
      self.last = (*self.last, loss)[-LAST:]

  @property
  def newest(self) -> float | None:
    """The newest finite loss of an applied step, or the first one."""
    return self.last[-1] if self.last else self.first

  @property
  def high(self) -> float | None:
    """The last finite loss if it is far above the first one, otherwise None."""
    # The loss of the final weights counts as the newest one.
    final = [self.final] if self.final is not None and math.isfinite(self.final) else []
    last = [*self.last, *final][-LAST:]
    if self.first is None or not last:
      return None
    # Either all recent losses are high, or the last one alone is extreme.
    stays = min(last) > max(self.first + ABOVE, self.first * ABOVE_FACTOR)
    exploded = last[-1] > max(self.first + EXPLODED, self.first * EXPLODED)
    return last[-1] if stays or exploded else None

  def reasons(self, step: int) -> list[str]:
    """Reasons why the weights after ``step`` finished steps are not usable; empty if they are usable."""
    found = []
    # The last updates were rejected.
    if self.skipped >= (OVERFLOWS if self.overflowed else 1):
      last = f"the last {self.skipped} steps ({step - self.skipped + 1} to {step}) were"
      found.append(f"{last if self.skipped > 1 else f'the last step ({step}) was'} skipped because of non-finite numbers")
    if self.final is not None and not math.isfinite(self.final):
      found.append(f"a forward pass of the final weights on the last batch gives loss {self.final}")
    # Losses or parameters that have grown too far.
    if (high := self.high) is not None:
      found.append(f"the last finite loss is {high:.4g}, far above {self.first:.4g} at the first step")
    if self.norm is not None and self.first_norm and self.norm > GROWN * self.first_norm:
      found.append(f"the parameter norm is {self.norm:.4g}, far above {self.first_norm:.4g} before the first step")
    return found


class Divergence:
  """Watches losses and the parameter norm of a run.

  Args:
    config: configuration of the run.

  Attributes:
    history: losses so far.
  """

  def __init__(self, config: Config) -> None:
    self._config = config
    self.restart({}, None)

  def restart(self, extra: Mapping[str, Any], identity: Any) -> None:
    """Continues from a checkpoint.

    Args:
      extra: extra values of the checkpoint; empty for a new run.
      identity: identity of the data of this run. Losses on other data cannot be compared, so they are forgotten; the
        parameter norms are kept.
    """
    self.history = History.from_json(extra.get(EXTRA))
    if extra.get("data", {}).get("identity") != identity:
      self.history.first, self.history.last = None, ()
    self._norm: float | None = None  # after the newest applied step
    self._reported = 0
    self._rose_at: int | None = None

  def get_state(self) -> dict[str, Any]:
    """Returns the history as JSON, for a checkpoint."""
    return self.history.to_json()

  def observe(self, step: int, metrics: Mapping[str, float], norm_before: float | None, *, overflow: bool) -> list[str]:
    """Records a finished step.

    Args:
      step: number of the step, starting at 1.
      metrics: metrics of the step, as Python numbers.
      norm_before: parameter norm before the first step of this process; None if unknown.
      overflow: the step was skipped because float16 gradients overflowed.

    Returns:
      A line if the loss or the parameter norm rose by an order of magnitude in this step.
    """
    # Compare with the newest loss, and with the parameter norm before this step.
    loss, norm, skipped = metrics["loss"], metrics["param_norm"], bool(metrics["skipped"])
    rises, before = [], self.history.newest
    if before is not None and math.isfinite(loss) and loss > RISE * max(before, 1.0):
      rises.append(f"the loss rose from {before:.4g} to {loss:.4g}")
    if self.history.first_norm is None and self.history.first is None:
      self.history.first_norm = None if norm_before is None else min(norm_before, LARGEST)
    before = norm_before if self._norm is None else self._norm
    if not skipped and before and math.isfinite(norm) and norm > RISE * before:
      rises.append(f"the parameter norm rose from {before:.4g} to {norm:.4g}")
    # Record the step.
    self.history.add(loss if metrics["tokens"] else None, skipped=skipped, overflow=overflow)
    if not skipped:
      self._norm, self.history.norm = norm, min(norm, LARGEST)
    if not rises:
      return []
    # Report the first few rises only.
    self._rose_at = step
    self._reported += 1
    if self._reported > REPORTED_RISES:
      return []
    more = " (further rises are not reported)" if self._reported == REPORTED_RISES else ""
    remedies = "; ".join(after_a_rise(self._config))
    return [f"step {step}: {' and '.join(rises)} in one step{more}\n  what to try: {remedies}"]

  def explained(self, error: NonFiniteError, step: int) -> NonFiniteError:
    """Adds a lower learning rate as the first remedy if the loss or the parameters exploded before the error."""
    rose = self._rose_at is not None and step - self._rose_at <= RECENT_STEPS
    if not rose and self.history.high is None:
      return error
    first = lower_rate(self._config.training)
    return NonFiniteError(error.what, [first, *(remedy for remedy in error.remedies if remedy != first)], error.notes)

  def failure(self, step: int, kept: str | None, best: int | None) -> NonFiniteError | None:
    """Return the error that ends a run whose weights are not usable, or None.

    Args:
      step: the last step.
      kept: path of its checkpoint; None if it was not saved.
      best: step with the lowest evaluation loss, if its checkpoint was kept.
    """
    if not (reasons := self.history.reasons(step)):
      return None
    other = [] if best is None else [f"the best checkpoint, of step {best}"]
    saved = f" (saved in {kept})" if kept else ""
    return failed_run(f"the run ended at step {step}{saved}", reasons, self._config, *other)


def reasons_of(stored: Manifest) -> list[str]:
  """Reasons why the weights of a checkpoint are not usable, from the history that it stores; empty if they are usable."""
  return History.from_json(stored.extra.get(EXTRA)).reasons(stored.step)


def failed_notes(stored: Manifest) -> tuple[str, ...]:
  """Return a remark if the run of a checkpoint has failed, so that its weights are not usable; empty if it has not."""
  reasons = reasons_of(stored)
  return (f"the run has failed, and these weights are not usable: {'; '.join(reasons)}",) if reasons else ()


def failed_run(what: str, reasons: list[str], config: Config, *other: str) -> NonFiniteError:
  """Return the error that ends a run whose weights are not usable.

  Args:
    what: the run and its last step.
    reasons: as from ``History.reasons``.
    config: configuration of the run.
    other: further remedies.
  """
  return NonFiniteError(
    "\n  ".join([f"{what}; the run has failed:", *reasons]),
    [
      f"{lower_rate(config.training)} with another run_name",
      *other,
      "an earlier checkpoint, from before the loss rose: init_from=RUN/checkpoints/N with another run_name",
    ],
  )
