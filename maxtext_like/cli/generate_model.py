"""What ``maxtext-like generate`` generates with: a run, a checkpoint of ours, or a Hugging Face checkpoint directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.config.load import Loaded
  from maxtext_like.data.tokenizer import Tokenizer
  from maxtext_like.models.placed import Model


@dataclass(frozen=True)
class Generator:
  """What generates.

  Attributes:
    model: its decoder, configuration and mesh.
    directory: where its weights are.
    tokenizer: of its text.
    files: where generation_config.json may be; None: nowhere.
    notes: for whoever runs it.
  """

  model: "Model"
  directory: Path
  tokenizer: "Tokenizer"
  files: Path | None
  notes: tuple[str, ...] = ()

  def params(self) -> Any:
    """The weights, read now. Raises UserError where they are damaged or another model's."""
    from maxtext_like.checkpoint.read_weights import read_weights

    return read_weights(self.directory, self.model)


def open_model(directory: Path, overrides: list[str], *, images: bool = False) -> Generator:
  """The model in ``directory``; its weights are not read yet, so that what is wrong with a prompt shows first.

  Args:
    directory: a run directory, one of its checkpoints, what ``import`` made, or a Hugging Face checkpoint.
    overrides: ``key=value`` words; ``tokenizer`` takes the place of the checkpoint's own.
    images: the tower is needed. A Hugging Face checkpoint's is read only then.

  Raises:
    UserError: it is none of these, or damaged, or the overrides do not fit it, or it has no tower or no tokenizer.
  """
  from maxtext_like.checkpoint import companions
  from maxtext_like.checkpoint.sources import find_step
  from maxtext_like.data.tokenizer import AUTO, load_tokenizer
  from maxtext_like.models.placed import make_model
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.training.chosen_tokenizer import fingerprint_of, of_step

  if not directory.is_dir():
    raise UserError(f"{directory}: no such directory")
  step = None
  if (directory / "config.json").is_file():
    loaded, named = _hugging_face(directory, overrides, images)
    files = directory
  else:
    step = find_step(directory)
    if step is None:
      raise UserError(f"{directory}: neither a run with a checkpoint nor a Hugging Face checkpoint (config.json)")
    loaded, named = _ours(step, overrides), ""
    if images and not loaded.config.vision.use_multimodal:
      raise UserError(f"{directory}: --image: the model has no vision tower (it was trained with use_multimodal=false)")
    files = step / companions.FOLDER
  given = loaded.config.data.tokenizer
  if given == AUTO:
    given = named if step is None else of_step(step)
  tokenizer = load_tokenizer(given, loaded.config.model.vocab_size)
  trained = None if step is None else fingerprint_of(step)
  notes = loaded.notes
  if trained is not None and trained != tokenizer.fingerprint:
    notes = (*notes, f"the model was trained with another tokenizer: {trained}, not {tokenizer.fingerprint}")
  use_compilation_cache(loaded.config.logging.compilation_cache_dir)
  model = make_model(loaded.config, runs_attention=False)  # with a cache, attention is written out
  return Generator(model, directory, tokenizer, files, notes)


def _hugging_face(directory: Path, overrides: list[str], images: bool) -> tuple["Loaded", str]:
  """The configuration, and the folder of the tokenizer."""
  from maxtext_like.checkpoint.huggingface.config import read_config
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
  from maxtext_like.data.tokenizer import AUTO

  if images and not read_config(directory).has_tower:
    raise UserError(f"{directory}: --image: the model has no vision tower (its config.json has no vision_config)")
  words = [*(["use_multimodal=true"] if images else []), *overrides]
  _, loaded = load_checkpoint_config(directory, words, length=2048)
  there = any((directory / f"tokenizer.{kind}").is_file() for kind in ("json", "model"))
  if loaded.config.data.tokenizer == AUTO and not there:
    raise UserError(
      f"{directory}: has neither tokenizer.json nor tokenizer.model, so text cannot become tokens\n"
      "  fix: tokenizer=, with the path of one, or tokenizer=bytes"
    )
  return loaded, str(directory)


def _ours(step: Path, overrides: list[str]) -> "Loaded":
  from maxtext_like.checkpoint import manifest
  from maxtext_like.checkpoint.stored_config import load_stored

  try:
    return load_stored(manifest.read(step).config, str(step), overrides)
  except manifest.DamageError as error:
    raise UserError(f"{step}: not a complete checkpoint: {error}") from None
