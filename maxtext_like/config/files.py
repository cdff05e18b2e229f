"""Where configuration files are: the configs folder of a checkout or of an installed wheel, models by name or path."""

import functools
from pathlib import Path

from maxtext_like import local_copies
from maxtext_like.config.paths import require_local
from maxtext_like.config.problems import nearest
from maxtext_like.errors import UserError
from maxtext_like.storage import is_remote

SUFFIXES = (".yml", ".yaml")


@functools.cache
def configs_folder() -> Path:
  """``configs`` beside the package in a checkout, ``maxtext_like/configs`` in a wheel.

  Raises:
    UserError: neither is there, so the installation is damaged.
  """
  package = Path(__file__).resolve().parent.parent
  for folder in (package.parent / "configs", package / "configs"):
    if (folder / "base.yml").is_file():
      return folder
  raise UserError(f"{package}: configs/base.yml is missing; install maxtext-like again")


def label_of(path: Path) -> str:
  """How messages call a file: ``configs/...`` for the project's own, else relative to the working directory below it."""
  resolved = path.resolve()
  for folder, prefix in ((configs_folder(), "configs"), (Path.cwd(), "")):
    if resolved.is_relative_to(folder):
      return str(Path(prefix, resolved.relative_to(folder)))
  return str(path)


def model_names() -> list[str]:
  """The names of the model files, sorted by family and size as a person would: by name."""
  return sorted(path.stem for path in (configs_folder() / "models").glob("*.yml"))


def find_config(name: str) -> Path:
  """The file of a model name (``gemma4-tiny``) or of a path.

  Raises:
    UserError: no such file, a directory, an empty name; with the nearest names of ``configs/models``.
  """
  if not name:
    raise UserError("no configuration named\n  fix: name a model or a file, as gemma4-tiny")
  path = named_file(name)
  known = configs_folder() / "models" / f"{name}.yml"
  looks_like_path = path.suffix in SUFFIXES or "/" in name
  if not looks_like_path and known.is_file():
    return known
  if path.is_file():
    return path
  # `configs/models/gemma4-31b.yml` as in the README, from anywhere, also where only a wheel is installed.
  if looks_like_path and not path.is_absolute() and path.parts[0] == "configs":
    inside = configs_folder().joinpath(*path.parts[1:])
    if inside.is_file():
      return inside
  if (path / "config.json").is_file():
    raise UserError(
      f"{name}: is a Hugging Face checkpoint, not a configuration file\n"
      f"  fix: name the model, as gemma4-31b, and init_from={name}; or import it, which writes a model.yml"
    )
  if (path / "config.yml").is_file():
    raise UserError(f"{name}: is a run, not a configuration file\n  fix: name its own, {path / 'config.yml'}")
  if path.is_dir():
    raise UserError(f"{name}: is a directory, not a configuration file{_hint(path.name)}")
  if path.exists():
    raise UserError(f"{name}: is not a regular file")
  stem = path.stem if path.suffix in SUFFIXES else path.name
  raise UserError(f"{name}: no such model or configuration file{_hint(stem)}")


def named_file(name: str) -> Path:
  """The path that a configuration file is named by; of a URL, its copy on this machine."""
  return local_copies.copy_file(name) if is_remote(name) else Path(require_local(name)).expanduser()


def _hint(stem: str) -> str:
  near = nearest(stem, model_names(), count=3)
  if near:
    return f"\n  fix: did you mean {' or '.join(near)}?"
  return f"\n  fix: models are {', '.join(model_names())}; or give the path of a .yml file"
