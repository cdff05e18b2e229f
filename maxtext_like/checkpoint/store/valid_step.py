"""Finds the newest step of a run whose files match their hashes."""

import logging
from collections.abc import Callable
from pathlib import Path

from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.remote_steps import RemoteSteps
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.errors import UserError
from maxtext_like.storage import Place

_log = logging.getLogger(__name__)


def newest_valid(
  steps: StepDirectories | RemoteSteps,
  require_fit: Callable[[Path | Place, manifest.Manifest], None],
  copied_back: Callable[[int, Exception], bool],
  upto: int | None = None,
) -> int | None:
  """Returns the newest valid step. Newer steps with wrong hashes are logged and set aside.

  Args:
    steps: the steps of the run.
    require_fit: raises UserError if a step has another model or other arrays.
    copied_back: (step, damage) -> True if the step was replaced from the mirror.
    upto: the newest step to consider; None for no limit.

  Returns:
    The number of the step, or None if there is no checkpoint at all.

  Raises:
    UserError: all steps are corrupt, the newest does not fit, ``upto`` does not exist, or a step has another step's name.
  """
  steps.require_names()
  candidates = steps.with_manifest()
  if upto is not None:
    if upto not in candidates:
      raise UserError(f"{steps.directory}: there is no step {upto}; the complete steps are {steps.complete() or 'none'}")
    candidates = [number for number in candidates if number <= upto]

  def require_valid(path: Path | Place) -> None:
    stored = manifest.read(path)
    require_fit(path, stored)
    manifest.check_hashes(path, stored)

  damaged: list[tuple[int, str]] = []
  # Search from the newest step. Set the corrupt ones aside only after a valid one was found.
  for number in reversed(candidates):
    try:
      require_valid(steps.path(number))
    except manifest.DamageError as error:
      if not copied_back(number, error):
        damaged.append((number, str(error)))
        continue
      require_valid(steps.path(number))
    for corrupt, reason in damaged:
      _log.error("step %d is corrupt: %s; using step %d", corrupt, reason, number)
      steps.set_aside(corrupt)
    return number
  if damaged:
    reasons = "\n".join(f"  step {corrupt} is corrupt: {reason}" for corrupt, reason in damaged)
    raise UserError(
      f"{steps.directory}: no valid checkpoint is left\n{reasons}\n"
      "  fix: restore one of them from a copy, or start a new run with another run_name or resume=false"
    )
  return None
