"""Finds out from the files of a run directory, without JAX, from which step a run can resume and whether checkpoints are lost.

A directory without a complete step belongs to a new run, to a run that ended before its first checkpoint, or to a run whose
checkpoints are missing: not mounted, not copied, or deleted. In the last case a start at step 0 would be wrong. A file next to
``checkpoints/`` therefore records the newest step that was ever saved. If an earlier version made the directory and that file
is missing, the last row of metrics.jsonl and the checkpoint interval in config.yml decide.
"""

import contextlib
import errno
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from maxtext_like import atomic, strict_json
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.weight_sources import open_steps
from maxtext_like.config.schema import CheckpointConfig
from maxtext_like.config.yaml_file import Mapping, Scalar, read_yaml
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.storage import Place, failed
from maxtext_like.training.run.run_directory import require_regular_files

NEWEST = "newest_checkpoint.json"
_METRICS, _FINITENESS, _CONFIG = "metrics.jsonl", "finiteness.json", "config.yml"
_TAIL_BYTES = 1 << 20  # enough of the end of metrics.jsonl to contain its last row
_OF_THE_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
_log = logging.getLogger(__name__)


def record_newest(run: Path, step: int | None, fence: atomic.Fence = contextlib.nullcontext) -> None:
  """Record the newest saved step; None if none was saved. If the disk refuses, only a warning is logged."""
  try:
    atomic.write_text(run / NEWEST, json.dumps({"step": step}) + "\n", fence)
  except OSError as error:
    _log.warning(
      "%s: cannot be written (%s). If the checkpoints are lost later, the next start may not notice it",
      run / NEWEST,
      error.strerror,
    )


def recorded_newest(run: Path) -> int | None:
  """Return the newest step that was ever saved, including damaged and deleted ones; None if none was saved.

  Raises:
    FileNotFoundError: there is no record.
    ValueError: the record is invalid.
  """
  # A damaged file raises ValueError, so that it is not taken for "no step".
  record = strict_json.loads((run / NEWEST).read_bytes())
  step = record.get("step", "") if isinstance(record, dict) else ""
  if not isinstance(step, int | None):
    raise ValueError(f"no step in {json.dumps(record)}")
  return step


def newest_saved(run: Path, checkpoints: Path | Place) -> int | None:
  """Return the newest complete step, or the newest step ever saved, which a mirror may bring back; None if there is neither.

  Raises:
    UserError, RetryableError: as ``read``.
  """
  newest = read(run, checkpoints).newest
  if newest is None:
    with contextlib.suppress(OSError, ValueError):
      return recorded_newest(run)
  return newest


def missing_step(run: Path, checkpoints: Path | Place, newest: int | None) -> int | None:
  """Return a saved step later than ``newest`` whose directory no longer exists, or None."""
  try:
    saved = recorded_newest(run)
  except (FileNotFoundError, ValueError):
    return None
  # Only a step that is newer than the existing ones can be missing.
  if newest is None or saved is None or saved <= newest:
    return None
  there = saved in open_steps(checkpoints).numbered() if isinstance(checkpoints, Place) else any(checkpoints.glob(f"{saved}*"))
  return None if there else saved


@dataclass(frozen=True)
class ResumeState:
  """The state of a run directory.

  Attributes:
    run: the directory, which need not exist.
    checkpoints: directory of its steps.
    newest: its newest complete step, or None.
    damaged: True if it has steps with a manifest but no complete one.
    evidence: one line for each file that proves that a missing step was saved.
  """

  run: Path
  checkpoints: Path | Place
  newest: int | None
  damaged: bool
  evidence: tuple[str, ...]

  def require(self, settings: CheckpointConfig) -> None:
    """Raise if a start would lose checkpoints or mix two runs.

    Args:
      settings: the ``checkpoint:`` section of the run that is about to start.

    Raises:
      UserError: the checkpoints are missing; or there are checkpoints and the run would not resume from them.
    """
    # A new start would overwrite the run's files.
    if (self.newest is not None or self.damaged) and not settings.enable_checkpointing:
      raise UserError(
        f"{self.checkpoints} contains steps of an earlier run, but enable_checkpointing=false would start again at step 0 in "
        "the same run directory\n  fix: choose another run_name, or remove enable_checkpointing=false"
      )
    # New checkpoints would be mixed with old ones.
    if self.newest is not None and not settings.resume:
      raise UserError(
        f"{self.checkpoints} contains step {self.newest} of an earlier run, but resume=false would mix its checkpoints with "
        "new ones\n  fix: choose another run_name, remove that directory, or use resume=true"
      )
    # Missing checkpoints: a start at step 0 would lose the run's progress unnoticed.
    if self.evidence and (settings.resume or not settings.enable_checkpointing):
      known = "\n".join(f"  {line}" for line in self.evidence)
      afresh = ", or resume=false, which renames metrics.jsonl and starts a new one" if settings.enable_checkpointing else ""
      raise UserError(
        f"{self.run}: the checkpoints of this run are missing, so training would start again at step 0\n{known}\n"
        "  fix: restore the checkpoints (mount or copy them) and run the same command again;\n"
        f"       to start from step 0: another run_name{afresh}"
      )


def read(run: Path, checkpoints: Path | Place) -> ResumeState:
  """Read the state of a run directory. Nothing is written.

  Args:
    run: the run directory.
    checkpoints: directory of its steps.

  Raises:
    UserError: the directory cannot be read.
    RetryableError: its disk does not respond.
  """
  try:
    # A new run.
    if isinstance(checkpoints, Path) and not run.is_dir():
      return ResumeState(run, checkpoints, None, False, ())
    # Read the directory of steps. Evidence is only collected if no step exists at all.
    if run.is_dir():
      require_regular_files(run)
    steps = open_steps(checkpoints)
    there = steps.is_there()
    newest = max(steps.complete(), default=None) if there else None
    damaged = newest is None and there and bool(steps.with_manifest())
    evidence = () if newest is not None or damaged else tuple(_evidence(run, checkpoints))
  except OSError as error:
    if isinstance(checkpoints, Place):
      raise failed(error, writes=True) from error
    kind = UserError if error.errno in _OF_THE_PATH else RetryableError
    raise kind(f"{error.filename or run}: {error.strerror}") from error
  return ResumeState(run, checkpoints, newest, damaged, evidence)


def _evidence(run: Path, checkpoints: Path | Place) -> list[str]:
  """Return the lines that prove that a step was saved; empty if no step was ever due."""
  # Files that mention finished steps.
  finished = _finished_steps(run)
  lines = [f"{name}: contains step {step}" for name, step in finished.items()]
  try:
    # The record of saved steps decides. Without it, the first due step of the stored configuration does.
    saved = recorded_newest(run)
  except FileNotFoundError:
    due = _first_due(run)
    if due is None or max(finished.values(), default=0) < due:
      return []
    lines.append(f"{_CONFIG}: the first checkpoint was due at step {due}")
  except ValueError as error:
    lines.insert(0, f"{NEWEST}: cannot be read ({error})")
  else:
    if saved is None:
      return []
    lines.insert(0, f"{NEWEST}: step {saved} was saved")
  return [*lines, f"checkpoints/: {_what_is_there(checkpoints)}"]


def _what_is_there(checkpoints: Path | Place) -> str:
  # A store has no links and no single files.
  if isinstance(checkpoints, Place):
    found = checkpoints.folders()
    return f"no step, only {', '.join(found[:4])}" if found else "empty"
  # A broken link or a missing folder is often a mount that is missing.
  if checkpoints.is_symlink() and not checkpoints.exists():
    return f"a link to {checkpoints.readlink()}, which does not exist"
  if not checkpoints.is_dir():
    return "does not exist"
  # Show step folders without a manifest first: their copy was probably interrupted.
  names = sorted(path.name for path in checkpoints.iterdir())
  if not names:
    return "empty"
  bare = [name for name in names if name.isdecimal() and not (checkpoints / name / manifest.FILE_NAME).exists()]
  shown = ", ".join((bare or names)[:4]) + (", ..." if len(bare or names) > 4 else "")
  return f"{shown} without {manifest.FILE_NAME}" if bare else f"no step, only {shown}"


def _finished_steps(run: Path) -> dict[str, int]:
  """Return {file: last step it mentions}, without files that mention none."""
  found = {_METRICS: _last_row(run / _METRICS), _FINITENESS: _checked_steps(run / _FINITENESS)}
  return {name: step for name, step in found.items() if step}


def _last_row(path: Path) -> int:
  try:
    with path.open("rb") as file:
      file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
      lines = file.read().splitlines()
  except FileNotFoundError:
    return 0
  # Read backwards to the last complete row.
  for line in reversed(lines):
    try:
      return int(strict_json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
      continue  # a line cut short by a kill, or by the start of the tail
  return 0


def _checked_steps(path: Path) -> int:
  """Return how many steps finiteness.json knows: it has the loss of the first and of the second step."""
  try:
    checks = strict_json.loads(path.read_bytes())
    return sum(checks[name]["result"] != "not run" for name in ("loss0", "loss1"))
  except (FileNotFoundError, ValueError, KeyError, TypeError):
    return 0


def _first_due(run: Path) -> int | None:
  """Return the first step that the stored configuration saves; None if it saves none."""
  try:
    # Read the keys as text, because an earlier version may have had other keys.
    sections = read_yaml(run / _CONFIG, str(run / _CONFIG)).items
  except UserError:
    return 1  # the configuration cannot be read, so assume that every step was due
  values = {key: node.text for section in sections.values() if isinstance(section, Mapping)
            for key, node in section.items.items() if isinstance(node, Scalar)}  # fmt: skip
  if values.get("enable_checkpointing") == "false":
    return None
  due = [int(values[key]) for key in ("checkpoint_interval", "steps") if values.get(key, "").isdecimal()]
  return min(due, default=1)
