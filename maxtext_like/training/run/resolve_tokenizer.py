"""Resolves tokenizer=auto: the tokenizer stored in a checkpoint is used unless the configuration names another."""

import dataclasses
from pathlib import Path

from maxtext_like.checkpoint.store import manifest, sidecar_files
from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face, located, open_steps
from maxtext_like.config.choices import DATASETS
from maxtext_like.config.data_keys import DataConfig
from maxtext_like.config.schema import CheckpointConfig
from maxtext_like.data.loader import DataSource
from maxtext_like.data.tokenization.tokenizer import AUTO
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, failed, is_remote

NO_TOKENIZER = "has neither tokenizer.json nor tokenizer.model, so text cannot be tokenized"
NO_TOKENIZER_FIX = "tokenizer=PATH, the path of its tokenizer, or tokenizer=bytes if it was trained on bytes"
"""The end of the error about weights without a tokenizer, and its fix."""


def resolve(data: DataConfig, checkpoint: CheckpointConfig, steps: Path | Place) -> DataConfig:
  """Replace "auto" by the tokenizer of the run's newest step, otherwise that of ``init_from``, otherwise bytes.

  Args:
    data: the ``data:`` section.
    checkpoint: the ``checkpoint:`` section.
    steps: directory of the run's steps, which need not exist. Nothing is written.

  Returns:
    The ``data:`` section with the tokenizer set.

  Raises:
    UserError: the checkpoint was made with a tokenizer that it does not contain, or the weights of ``init_from`` have none.
  """
  if data.tokenizer != AUTO or not DATASETS[data.dataset].text:
    return data
  # Steps with a damaged tokenizer are skipped; the restore sets them aside later.
  try:
    directories = open_steps(steps)
    whole = [n for n in directories.complete() if _is_whole(directories.path(n))] if directories.is_there() else []
  except OSError as error:
    if isinstance(steps, Path):
      raise
    raise failed(error) from error
  # The run's own step, then init_from, then bytes.
  if checkpoint.resume and whole:
    return dataclasses.replace(data, tokenizer=of_step(steps / str(max(whole))) or "bytes")
  if checkpoint.init_from is None:
    return dataclasses.replace(data, tokenizer="bytes")
  return dataclasses.replace(data, tokenizer=_of_directory(located(checkpoint.init_from)))


def of_step(step: Path | Place) -> str | None:
  """Return the tokenizer of one of our steps, as an argument for ``load_tokenizer``; None if it was imported without one.

  Raises:
    UserError: the step is damaged, or was made with a tokenizer that it does not contain.
  """
  try:
    stored = manifest.read(step)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from None
  except OSError as error:
    raise failed(error) from error
  # The step contains its tokenizer.
  if any(name.startswith(f"{sidecar_files.FOLDER}/tokenizer.") for name in stored.files):
    return str(manifest.home(step, stored) / sidecar_files.FOLDER)
  # Otherwise the stored configuration names it.
  named = stored.config.get("data", {}).get("tokenizer", "bytes")
  if named in ("bytes", AUTO):
    return None if named == AUTO and "hugging_face" in stored.extra else "bytes"
  if not is_remote(named) and not Path(named).expanduser().exists():
    raise UserError(
      f"{step}: made with the tokenizer '{named}', which no longer exists\n  fix: set tokenizer=PATH to a copy of it"
    )
  return named


def _has_tokenizer(directory: Path | Place) -> bool:
  names = ("tokenizer.json", "tokenizer.model")
  if isinstance(directory, Path):
    return any((directory / name).is_file() for name in names)
  try:
    return any((directory / name).entry() is not None for name in names)
  except OSError as error:
    raise failed(error) from error


def _is_whole(step: Path | Place) -> bool:
  """Return True if the tokenizer files of a complete step are undamaged."""
  try:
    manifest.check_hashes(step, manifest.read(step), below=f"{sidecar_files.FOLDER}/")
  except manifest.DamageError:
    return False
  return True


def fingerprint_of(step: Path | Place) -> str | None:
  """Return the fingerprint of the tokenizer that a step was trained with; None if it had none or it is unknown."""
  return manifest.read(step).extra.get("data", {}).get("identity", {}).get("tokenizer")


def require_same(step: Path | Place, data: DataSource) -> None:
  """Raise if a run would resume with another tokenizer, because the same token ids would mean other text.

  Raises:
    UserError: names both tokenizers.
  """
  # Steps of earlier versions have no fingerprint; they are accepted.
  was = fingerprint_of(step)
  now = None if data.tokenizer is None else data.tokenizer.fingerprint
  if was is not None and now is not None and was != now:
    raise UserError(
      f"cannot resume: {step} was trained with the tokenizer '{was}', but this run has '{now}'\n"
      f"  fix: tokenizer={AUTO} (uses the checkpoint's own); to use another tokenizer, start a new run with another "
      "run_name and init_from"
    )


def _of_directory(directory: Path | Place) -> str:
  if is_hugging_face(directory):
    if _has_tokenizer(directory):
      return str(directory)
  elif (step := find_step(directory)) is not None and (found := of_step(step)) is not None:
    return found
  # Weights of unknown origin were hardly trained on bytes, so the tokens would mean something else.
  raise UserError(f"init_from: {directory} {NO_TOKENIZER}", fix=NO_TOKENIZER_FIX)
