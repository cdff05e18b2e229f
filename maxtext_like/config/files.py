"""Finds configuration files: the configs folder of a checkout or wheel, and model files by name or path."""

import functools
from pathlib import Path

from maxtext_like import local_copies
from maxtext_like.config import hub
from maxtext_like.config.paths import require_local
from maxtext_like.config.problems import misspelled, nearest
from maxtext_like.errors import UserError
from maxtext_like.storage import is_remote

SUFFIXES = (".yml", ".yaml")


@functools.cache
def configs_folder() -> Path:
  """Return the configs folder: next to the package in a checkout, ``maxtext_like/configs`` in a wheel.

  Raises:
    UserError: neither folder exists.
  """
  package = Path(__file__).resolve().parent.parent
  for folder in (package.parent / "configs", package / "configs"):
    if (folder / "base.yml").is_file():
      return folder
  raise UserError(f"{package}: configs/base.yml is missing\n  fix: install maxtext-like again")


def label_of(path: Path) -> str:
  """Return a file's name for messages: ``configs/...`` for the project's own, otherwise relative to the working directory."""
  resolved = path.resolve()
  for folder, prefix in ((configs_folder(), "configs"), (Path.cwd(), "")):
    if resolved.is_relative_to(folder):
      return str(Path(prefix, resolved.relative_to(folder)))
  return str(path)


def model_names() -> list[str]:
  """Return the names of the model files in ``configs/models``, sorted."""
  return sorted(path.stem for path in (configs_folder() / "models").glob("*.yml"))


def find_config(name: str) -> Path:
  """Return the configuration file for a model's name (``gemma4-tiny``) or a path.

  Raises:
    UserError: the name is empty, no such file exists, or it is a directory. The message suggests similar names.
  """
  if not name:
    raise UserError("the name of the configuration is empty\n  fix: write the name of a model or a file, such as gemma4-tiny")
  path = named_file(name)
  known = configs_folder() / "models" / f"{name}.yml"
  looks_like_path = path.suffix in SUFFIXES or "/" in name
  if not looks_like_path and known.is_file():
    return known
  if path.is_file():
    return path
  # A path such as `configs/models/gemma4-31b.yml` works in any directory and in an installed wheel.
  if looks_like_path and not path.is_absolute() and path.parts[0] == "configs":
    inside = configs_folder().joinpath(*path.parts[1:])
    if inside.is_file():
      return inside
  if (path / "config.json").is_file():
    raise UserError(
      f"{name}: is a Hugging Face checkpoint, not a configuration file\n"
      f"  fix: name the model, such as gemma4-31b, and set init_from={name}; or import it, which writes a model.yml"
    )
  if (path / "config.yml").is_file():
    raise UserError(f"{name}: is the directory of a run, not a configuration file\n  fix: write {path / 'config.yml'}")
  if path.is_dir():
    raise UserError(f"{name}: is a directory, not a configuration file{_hint(path.name)}")
  if path.exists():
    raise UserError(f"{name}: is not a regular file", fix="name a regular .yml file")
  if path.suffix not in SUFFIXES and ("/" in name or name.startswith("~")):
    # A directory of a checkpoint was meant. The name of a model would start with random weights instead.
    raise UserError(
      f"{name}: no such directory{hub.advice(name)}",
      fix=hub.fix(name, "write the path of a checkpoint (a directory with config.json), of a run or of a .yml file"),
    )
  stem = path.stem if path.suffix in SUFFIXES else path.name
  raise UserError(f"{name}: no such model or configuration file{_hint(stem)}")


def recipe_name(word: str) -> str | None:
  """Return the overlay that was meant by a word without a suffix: recipes/lora.yml for recipes/lora. None if there is none."""
  folder = configs_folder()
  for name in (f"{word}{suffix}" for suffix in SUFFIXES):
    if Path(name).is_file() or (name.startswith("recipes/") and (folder / name).is_file()):
      return name
  near = misspelled(Path(word).name, [path.stem for path in (folder / "recipes").glob("*.yml")])
  return f"recipes/{near}.yml" if near and word.startswith("recipe") else None


def named_file(name: str) -> Path:
  """Return the path of a configuration file. A remote file is copied to this machine first."""
  return local_copies.copy_file(name) if is_remote(name) else Path(require_local(name)).expanduser()


def _hint(stem: str) -> str:
  near = nearest(stem, model_names(), count=3)
  if near:
    return f"\n  fix: did you mean {' or '.join(near)}?"
  paths = "the path of a .yml file or of a checkpoint (a directory with config.json)"
  return f"\n  fix: choose one of {', '.join(model_names())}, or write {paths}"
