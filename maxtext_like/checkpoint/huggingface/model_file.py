"""Converts a checkpoint's config.json to a model file, so that it is merged, overridden and checked like any other."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from maxtext_like.checkpoint.huggingface.config import HuggingFaceConfig, read_config
from maxtext_like.checkpoint.huggingface.family import in_config_json
from maxtext_like.config import hub
from maxtext_like.config.load import Loaded, load_config
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES
from maxtext_like.strict_json import printable

_HERE = "\0"  # placeholder for the path, so that its words are not translated


def model_file(config: HuggingFaceConfig, directory: str | Path) -> str:
  """Returns the text of a model file for the config.json of ``directory``. The model gets the name of the directory."""
  name = hub.name_of(Path(directory))  # model_type would only name the family
  values = config.model | ({"model_name": name} if name and name.isprintable() else {})
  lines = [f"# Made from {printable(directory)}.", "", "model:"]
  lines += [f"  {key}: {to_text(value)}" for key, value in values.items()]
  if config.vision:
    lines += ["", "vision:", *(f"  {key}: {to_text(value)}" for key, value in config.vision.items())]
  return "\n".join(lines) + "\n"


def load_checkpoint_config(
  directory: Path, overrides: Sequence[str] = (), *, length: int | None = None, inference: bool = False
) -> tuple[HuggingFaceConfig, Loaded]:
  """Returns the configuration of a checkpoint directory: configs/base.yml, overridden by config.json, then by ``overrides``.

  Args:
    directory: directory of the checkpoint.
    overrides: ``key=value`` words.
    length: number of positions that will be run, for ``max_target_length``.
    inference: as for ``load_config``.

  Raises:
    UserError: as ``read_config`` and ``load_config``; values of config.json appear under the file's own names.
  """
  config = read_config(directory)
  # More positions than the model was trained for are allowed: transformers runs them too, and the results are compared.
  longest = config.model["max_position_embeddings"]
  rows = [] if length is None else [f"max_target_length={min(length, longest)}"]
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / f"{config.model_type}.yml"
    path.write_text(model_file(config, directory), encoding="utf-8")
    try:
      return config, load_config(path, [*rows, *overrides], inference=inference)
    except UserError as error:
      source = printable(directory / "config.json")
      text, count = re.subn(rf"\S*{re.escape(path.name)}(:\d+)?", lambda _: _HERE, str(error))
      if count:  # the error is about the file; in errors about overrides the typed names stay
        typed = {word.partition("=")[0].rpartition(".")[2] for word in overrides}
        text = in_config_json(text, FAMILIES[config.model["decoder_block"]].huggingface.names, typed)
      raise UserError(text.replace(_HERE, source)) from None
