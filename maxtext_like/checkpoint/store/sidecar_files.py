"""The files that travel with a model's weights: its tokenizer's, and what Hugging Face keeps beside them.

Every step of a run carries them in a folder of its own, hashed like the arrays, so that a copied step is whole.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from maxtext_like.errors import UserError
from maxtext_like.storage import Place

FOLDER = "tokenizer"  # in a step's directory

# Data that travel with a model. Code (*.py) never does.
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
MORE_TEMPLATES = "additional_chat_templates"  # a folder of files NAME.jinja
_MAPPINGS = ("tokenizer.json", "tokenizer.model")


def beside(directory: Path) -> tuple[Path, ...]:
  """The files of ``NAMES`` in a directory, and the chat templates by name below it."""
  templates = sorted((directory / MORE_TEMPLATES).glob("*.jinja"))
  return (*(directory / name for name in NAMES if (directory / name).is_file()), *templates)


def name_of(file: Path) -> str:
  """What one of ``beside`` is called from its directory."""
  return f"{MORE_TEMPLATES}/{file.name}" if file.parent.name == MORE_TEMPLATES else file.name


def contents(directory: Path) -> dict[str, bytes]:
  """The files ``beside`` by these names."""
  return {name_of(file): file.read_bytes() for file in beside(directory)}


def copy(files: Sequence[Path], directory: Path) -> None:
  """Copies those of one directory into another; OSError as the disk gives it."""
  for file in files:
    target = directory / name_of(file)
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, target)


def of_tokenizer(files: Sequence[Path]) -> dict[str, bytes]:
  """What a step carries of a tokenizer: name in the step to content, read once.

  Args:
    files: ``Tokenizer.files``, the one with the mapping first; it becomes tokenizer.json or tokenizer.model.

  Raises:
    UserError: a file cannot be read any more.
  """
  if not files:
    return {}
  mapping = files[0]
  name = f"tokenizer{mapping.suffix}"
  found = {name: mapping} | {file.name: file for file in files[1:]}
  if mapping.name == name:
    # A folder as Hugging Face makes it. A tokenizer.json that was passed over for the .model would be taken for it.
    taken = _MAPPINGS if name == _MAPPINGS[0] else (name,)
    found = {name_of(file): file for file in beside(mapping.parent) if file.name not in _MAPPINGS or file.name in taken} | found
  try:
    return {name: file.read_bytes() for name, file in found.items()}
  except OSError as error:
    raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None


def write(step_directory: Path | Place, contents: dict[str, bytes]) -> None:
  """Puts the files into a step that is being written; OSError as the disk gives it."""
  if contents:
    folder = step_directory / FOLDER
    for name, content in contents.items():
      file = folder / name
      if isinstance(file, Path):
        file.parent.mkdir(parents=True, exist_ok=True)
      file.write_bytes(content)
