"""Builds a configuration from a checkpoint directory, so that naming the directory selects both model and weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from maxtext_like.checkpoint.huggingface.config import read_config
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.stored_config import load_stored
from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face, is_there, local_hugging_face
from maxtext_like.config import hub
from maxtext_like.config.load import KindOfFiles, Loaded, base_values
from maxtext_like.config.values import load_values
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, failed


def load_directory(
  place: Path | Place, overrides: Sequence[str], kind_of_files: KindOfFiles | None = None, *, family: str | None = None
) -> Loaded | None:
  """Returns the configuration of a new run that starts with the weights of a directory. None if it contains no checkpoint.

  Args:
    place: a Hugging Face checkpoint, a run, or a step of a run.
    overrides: ``key=value`` words that override it.
    kind_of_files: as for ``load_config``.
    family: the ``decoder_block`` that the checkpoint must have; None for any.

  Raises:
    UserError: as ``read_config`` and ``load_config``; the step is damaged; the checkpoint has another family.
  """
  if is_hugging_face(place):
    config = read_config(local_hugging_face(place, weights=False))
    _require_family(place, config.model["decoder_block"], family)
    name = hub.name_of(place) if isinstance(place, Path) else place.name
    model = config.model | ({"model_name": name} if name and name.isprintable() else {})
    values: dict[str, Any] = {"model": model, "vision": config.vision, "checkpoint": {"init_from": str(place)}}
    longest, usual = config.model["max_position_embeddings"], base_values()["max_target_length"]
    assert isinstance(usual, int)
    if longest < usual:
      values["training"] = {"max_target_length": longest}
    return load_values(values, f"{place}/config.json", overrides, kind_of_files)
  if (step := find_step(place)) is None:
    return None
  try:
    stored = manifest.read(step).config
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}", fix=manifest.ANOTHER) from None
  except OSError as error:
    raise failed(error) from error
  _require_family(place, stored["model"]["decoder_block"], family)
  # The new run needs its own name. The default is the model's name, which may be the name of the run that has these weights.
  source = step.parent.parent if step.parent.name == "checkpoints" else step
  name = f"run_name={source.name}-tuned"
  loaded = load_stored(stored, str(step), [f"init_from={place}", name, *overrides], kind_of_files)
  own = loaded.config.logging.run_name
  if own == source.name or not is_there(source / "config.yml"):
    return loaded
  # The directory of a run is often named to resume it.
  told = (
    f"{place}: the run {own} begins with the weights of step {step.name} of {source.name} and has its model and precision "
    f"but not the data and training settings. To resume {source.name}: maxtext-like train {source}/config.yml"
  )
  return replace(loaded, notes=(*loaded.notes, told))


def _require_family(place: Path | Place, block: str, family: str | None) -> None:
  if family not in (None, block):
    raise UserError(
      f"init_from: {place} is a checkpoint of {block}, not of {family}\n  fix: name the directory without a model: {place}"
    )
