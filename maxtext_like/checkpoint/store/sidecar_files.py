"""Files stored next to a model's weights: the tokenizer, and other data files of a Hugging Face directory.

Every step of a run contains them in a separate folder, hashed like the arrays, so that a copied step is complete.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from maxtext_like.errors import UserError
from maxtext_like.storage import Place

FOLDER = "tokenizer"  # subfolder of a step

# Data files that are copied with a model. Code (*.py) is never copied.
OF_THE_MODEL = ("generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE")
NAMES = (
  *OF_THE_MODEL,
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
)
MORE_TEMPLATES = "additional_chat_templates"  # a folder with files NAME.jinja
_MAPPINGS = ("tokenizer.json", "tokenizer.model")


def find(directory: Path) -> tuple[Path, ...]:
  """Returns the files of ``NAMES`` in a directory, and the chat templates in its subfolder."""
  templates = sorted((directory / MORE_TEMPLATES).glob("*.jinja"))
  return (*(directory / name for name in NAMES if (directory / name).is_file()), *templates)


def name_of(file: Path) -> str:
  """Returns the path of such a file relative to its directory."""
  return f"{MORE_TEMPLATES}/{file.name}" if file.parent.name == MORE_TEMPLATES else file.name


def contents(directory: Path) -> dict[str, bytes]:
  """Returns the content of each of these files by its relative path."""
  return {name_of(file): file.read_bytes() for file in find(directory)}


def copy(files: Sequence[Path], directory: Path) -> None:
  """Copies such files into another directory. Raises OSError."""
  for file in files:
    target = directory / name_of(file)
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, target)


def of_tokenizer(files: Sequence[Path]) -> dict[str, bytes]:
  """Returns the files of a tokenizer that a step stores: name in the step -> content.

  Args:
    files: ``Tokenizer.files``. The first one has the mapping and becomes tokenizer.json or tokenizer.model.

  Raises:
    UserError: a file cannot be read.
  """
  if not files:
    return {}
  mapping = files[0]
  name = f"tokenizer{mapping.suffix}"
  found = {name: mapping} | {file.name: file for file in files[1:]}
  if mapping.name == name:
    # A Hugging Face folder. If tokenizer.model was chosen, tokenizer.json is left out: readers would prefer it.
    taken = _MAPPINGS if name == _MAPPINGS[0] else (name,)
    found = {name_of(file): file for file in find(mapping.parent) if file.name not in _MAPPINGS or file.name in taken} | found
  try:
    return {name: file.read_bytes() for name, file in found.items()}
  except OSError as error:
    raise UserError(
      f"{error.filename}: cannot be read: {error.strerror}", fix="make the file readable, or set tokenizer to another directory"
    ) from None


def write(step_directory: Path | Place, contents: dict[str, bytes]) -> None:
  """Writes the files into a step that is being saved. Raises OSError."""
  if contents:
    folder = step_directory / FOLDER
    for name, content in contents.items():
      file = folder / name
      if isinstance(file, Path):
        file.parent.mkdir(parents=True, exist_ok=True)
      file.write_bytes(content)
