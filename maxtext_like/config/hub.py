"""Names of models on the Hugging Face Hub, as ``google/gemma-3-4b-it``: the copies in this machine's cache. No network.

The cache is huggingface_hub's: ``models--ORG--NAME/refs/main`` holds the revision, ``models--ORG--NAME/snapshots/REVISION``
its files, mostly as symbolic links.
"""

import argparse
import os
import re
from pathlib import Path

from maxtext_like.config.paths import existing_path, local_path
from maxtext_like.errors import UserError
from maxtext_like.storage import is_remote, require_usable

KEYS = ("init_from", "lora_from", "tokenizer")
"""Keys of a configuration whose value may be such a name."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache() -> Path:
  """Where huggingface_hub keeps what it downloads, by the variables that it reads."""
  for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
    if value := os.environ.get(variable):
      return Path(value).expanduser()
  caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(os.environ.get("HF_HOME") or f"{caches}/huggingface").expanduser() / "hub"


def find(text: str) -> Path | None:
  """The directory of a model in the cache; None: a path that is there, no name of a model, or not in the cache."""
  if _NAME.fullmatch(text) is None or Path(text).exists():
    return None
  folder = cache() / f"models--{text.replace('/', '--')}"
  try:
    revision = (folder / "refs" / "main").read_text("utf-8").strip()
  except (OSError, UnicodeDecodeError):
    return None
  snapshot = folder / "snapshots" / revision
  return snapshot if re.fullmatch(r"\w+", revision) and snapshot.is_dir() else None


def name_of(directory: Path) -> str:
  """What a checkpoint's directory is called: by the Hub where it is of the cache, else by whoever named it."""
  place = directory.expanduser().resolve()
  cached = place.parent.parent.name if place.parent.name == "snapshots" else ""
  return cached.removeprefix("models--").partition("--")[2] if cached.startswith("models--") else place.name


def advice(text: str) -> str:
  """How to get a model that ``find`` did not find, as the end of a sentence; empty where the text is rather a path."""
  if _NAME.fullmatch(text) is None or Path(text).exists() or Path(text).parent.is_dir():
    return ""
  return f", nor in the Hugging Face cache {cache()}: hf download {text} (of the package huggingface_hub) puts it there"


def checkpoint_path(text: str) -> str:
  """A checkpoint that is there as the ``type`` of an option or word that argparse reads: a path, or a model of the cache."""
  if is_remote(text):
    try:
      require_usable("checkpoint", text)
    except UserError as error:
      raise argparse.ArgumentTypeError(str(error)) from None
    return text
  found = find(local_path(text))
  if found is None and (how := advice(text)):
    raise argparse.ArgumentTypeError(f"{text} is no directory here{how}")
  return existing_path(str(found or text))
