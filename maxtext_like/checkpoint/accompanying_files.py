"""The files that travel with a model's weights: its tokenizer's, and what Hugging Face keeps beside them.

Every step of a run carries them in a folder of its own, hashed like the arrays, so that a copied step is whole.
"""

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
_MAPPINGS = ("tokenizer.json", "tokenizer.model")


def beside(directory: Path) -> tuple[Path, ...]:
  """The files of ``NAMES`` in a directory."""
  return tuple(directory / name for name in NAMES if (directory / name).is_file())


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
    found = {file.name: file for file in beside(mapping.parent) if file.name not in _MAPPINGS or file.name in taken} | found
  try:
    return {name: file.read_bytes() for name, file in found.items()}
  except OSError as error:
    raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None


def write(step_directory: Path | Place, contents: dict[str, bytes]) -> None:
  """Puts the files into a step that is being written; OSError as the disk gives it."""
  if contents:
    folder = step_directory / FOLDER
    if isinstance(folder, Path):
      folder.mkdir(exist_ok=True)
    for name, content in contents.items():
      (folder / name).write_bytes(content)
