"""Where a run stands, by the files of its directory and without JAX: what its checkpoints hold, and what outlives them.

A directory without a whole step is that of a new run, of one that ended before its first checkpoint, or of one whose
checkpoints are lost: not mounted, not copied, deleted. The last must not start again at step 0 as the other two may. So the
newest step that was ever saved stands in a file beside ``checkpoints/``; a directory without that file, made by an earlier
version, is judged by how far metrics.jsonl goes and how often config.yml saved.
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
_TAIL_BYTES = 1 << 20  # of metrics.jsonl; its last row lies there
_OF_THE_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
_log = logging.getLogger(__name__)


def remember_newest(run: Path, step: int | None, fence: atomic.Fence = contextlib.nullcontext) -> None:
  """Writes down the newest step that was saved; None: none yet. Told, and nothing else, where the disk does not take it."""
  try:
    atomic.write_text(run / NEWEST, json.dumps({"step": step}) + "\n", fence)
  except OSError as error:
    _log.warning("%s: %s; should the checkpoints be lost, the next start may not see it", run / NEWEST, error.strerror)


def remembered_newest(run: Path) -> int | None:
  """The newest step that was ever saved, damaged and deleted ones too; None: none was.

  Raises:
    FileNotFoundError: nobody wrote it down.
    ValueError: what stands there is nothing of the kind.
  """
  record = strict_json.loads((run / NEWEST).read_bytes())
  step = record.get("step", "") if isinstance(record, dict) else ""
  if not isinstance(step, int | None):
    raise ValueError(f"no step in {json.dumps(record)}")
  return step


def newest_saved(run: Path, checkpoints: Path | Place) -> int | None:
  """The newest complete step that is there, else the newest that ever was, which a mirror may bring back; None: none.

  Raises:
    UserError, RetryableError: as ``look``.
  """
  newest = look(run, checkpoints).newest
  if newest is None:
    with contextlib.suppress(OSError, ValueError):
      return remembered_newest(run)
  return newest


def gone_step(run: Path, checkpoints: Path | Place, newest: int | None) -> int | None:
  """A later step than ``newest`` that was saved once, and that no directory is left of; None: there is none."""
  try:
    saved = remembered_newest(run)
  except (FileNotFoundError, ValueError):
    return None
  if newest is None or saved is None or saved <= newest:
    return None
  there = saved in open_steps(checkpoints).numbered() if isinstance(checkpoints, Place) else any(checkpoints.glob(f"{saved}*"))
  return None if there else saved


@dataclass(frozen=True)
class Standing:
  """What a run's directory says.

  Attributes:
    run: the directory, which need not exist.
    checkpoints: where its steps lie.
    newest: its newest complete step.
    damaged: it has steps with a manifest, and none of them is complete.
    evidence: what says that steps were saved which are not there, a line for each file.
  """

  run: Path
  checkpoints: Path | Place
  newest: int | None
  damaged: bool
  evidence: tuple[str, ...]

  def require(self, settings: CheckpointConfig) -> None:
    """Refuses to start where that would lose something or mix two runs.

    Args:
      settings: of the run that is about to start.

    Raises:
      UserError: the checkpoints are lost; or there are some, and the run would not go on from them.
    """
    if (self.newest is not None or self.damaged) and not settings.enable_checkpointing:
      raise UserError(
        f"{self.checkpoints} holds steps of an earlier run, and enable_checkpointing is false: training would start again at "
        "step 0 in that run's directory\n  fix: choose another run_name, or leave enable_checkpointing=false out"
      )
    if self.newest is not None and not settings.resume:
      raise UserError(
        f"{self.checkpoints} holds step {self.newest} of an earlier run, and resume is false: its checkpoints would be mixed "
        "with new ones\n  fix: choose another run_name, remove that directory, or resume=true"
      )
    if self.evidence and (settings.resume or not settings.enable_checkpointing):
      known = "\n".join(f"  {line}" for line in self.evidence)
      afresh = ", or resume=false, which moves the rows of metrics.jsonl aside" if settings.enable_checkpointing else ""
      raise UserError(
        f"{self.run}: the checkpoints of this run are missing, training would start again at step 0\n{known}\n"
        "  fix: put them back (mount what is to be mounted, copy what was moved) and run the same command again;\n"
        f"       to start afresh: another run_name{afresh}"
      )


def look(run: Path, checkpoints: Path | Place) -> Standing:
  """Reads where a run stands; writes nothing.

  Args:
    run: where its files are.
    checkpoints: where its steps are.

  Raises:
    UserError: the directory may not be read.
    RetryableError: its disk does not answer.
  """
  try:
    if isinstance(checkpoints, Path) and not run.is_dir():
      return Standing(run, checkpoints, None, False, ())
    if run.is_dir():
      require_regular_files(run)
    steps = open_steps(checkpoints)
    there = steps.is_there()
    newest = max(steps.complete(), default=None) if there else None
    damaged = newest is None and there and bool(steps.with_manifest())
    evidence = () if newest is not None or damaged else tuple(_evidence(run, checkpoints))
  except OSError as error:
    if isinstance(checkpoints, Place):
      raise failed(error) from error
    kind = UserError if error.errno in _OF_THE_PATH else RetryableError
    raise kind(f"{error.filename or run}: {error.strerror}") from error
  return Standing(run, checkpoints, newest, damaged, evidence)


def _evidence(run: Path, checkpoints: Path | Place) -> list[str]:
  """What says that a step was saved once; nothing where none was ever due."""
  finished = _finished_steps(run)
  lines = [f"{name}: knows of step {step}" for name, step in finished.items()]
  try:
    saved = remembered_newest(run)
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
  if isinstance(checkpoints, Place):
    found = checkpoints.folders()
    return f"no step, only {', '.join(found[:4])}" if found else "empty"
  if checkpoints.is_symlink() and not checkpoints.exists():
    return f"a link to {checkpoints.readlink()}, which is not there"
  if not checkpoints.is_dir():
    return "does not exist"
  names = sorted(path.name for path in checkpoints.iterdir())
  if not names:
    return "empty"
  bare = [name for name in names if name.isdecimal() and not (checkpoints / name / manifest.FILE_NAME).exists()]
  shown = ", ".join((bare or names)[:4]) + (", ..." if len(bare or names) > 4 else "")
  return f"{shown} without {manifest.FILE_NAME}" if bare else f"no step, only {shown}"


def _finished_steps(run: Path) -> dict[str, int]:
  """File to the last step that it knows of, where it knows of one."""
  found = {_METRICS: _last_row(run / _METRICS), _FINITENESS: _checked_steps(run / _FINITENESS)}
  return {name: step for name, step in found.items() if step}


def _last_row(path: Path) -> int:
  try:
    with path.open("rb") as file:
      file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
      lines = file.read().splitlines()
  except FileNotFoundError:
    return 0
  for line in reversed(lines):
    try:
      return int(strict_json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
      continue  # a line that was cut short by a kill, or by the beginning of the tail
  return 0


def _checked_steps(path: Path) -> int:
  """finiteness.json has the loss of the first step, and of the second."""
  try:
    checks = strict_json.loads(path.read_bytes())
    return sum(checks[name]["result"] != "not run" for name in ("loss0", "loss1"))
  except (FileNotFoundError, ValueError, KeyError, TypeError):
    return 0


def _first_due(run: Path) -> int | None:
  """The step that was the first to be saved, by the stored configuration; None: none was."""
  try:
    sections = read_yaml(run / _CONFIG, str(run / _CONFIG)).items
  except UserError:
    return 1  # who trained here cannot be told, so every step counts
  values = {key: node.text for section in sections.values() if isinstance(section, Mapping)
            for key, node in section.items.items() if isinstance(node, Scalar)}  # fmt: skip
  if values.get("enable_checkpointing") == "false":
    return None
  due = [int(values[key]) for key in ("checkpoint_interval", "steps") if values.get(key, "").isdecimal()]
  return min(due, default=1)
