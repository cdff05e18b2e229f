"""Finds models by their Hugging Face Hub name, such as ``google/gemma-3-4b-it``, in this machine's cache, without network.

The layout is that of huggingface_hub: ``models--ORG--NAME/refs/main`` has the revision, and
``models--ORG--NAME/snapshots/REVISION`` the files, mostly as symbolic links.
"""

import argparse
import os
import re
from pathlib import Path

from maxtext_like.config.paths import existing_path, local_path
from maxtext_like.errors import UserError
from maxtext_like.storage import is_remote, require_usable

KEYS = ("init_from", "lora_from", "tokenizer")
"""Keys whose value may be a Hub name."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache() -> Path:
  """Return the cache directory of huggingface_hub, from the same environment variables that it reads."""
  for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
    if value := os.environ.get(variable):
      return Path(value).expanduser()
  caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(os.environ.get("HF_HOME") or f"{caches}/huggingface").expanduser() / "hub"


def find(text: str) -> Path | None:
  """Return the directory of a model in the cache, or None if the text is an existing path or is not in the cache."""
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
  """Return the name of a checkpoint: the Hub name of a directory in the cache, otherwise the directory's name."""
  place = directory.expanduser().resolve()
  cached = place.parent.parent.name if place.parent.name == "snapshots" else ""
  return cached.removeprefix("models--").partition("--")[2] if cached.startswith("models--") else place.name


def advice(text: str) -> str:
  """Return where ``find`` looked for a model that it did not find, to end a sentence; "" if the text looks like a path."""
  return f", and it is not in the Hugging Face cache {cache()}" if _may_be_name(text) else ""


def fix(text: str, otherwise: str = "name a run, one of its checkpoints/N, or a directory with config.json") -> str:
  """Return what to type if ``find`` did not find a model: how to download it if it may be a Hub name, or ``otherwise``."""
  if not _may_be_name(text):
    return otherwise
  return f"hf download {text} --local-dir DIR (package huggingface_hub), then use DIR; or {otherwise}"


def _may_be_name(text: str) -> bool:
  return _NAME.fullmatch(text) is not None and not Path(text).exists() and not Path(text).parent.is_dir()


def checkpoint_path(text: str) -> str:
  """argparse type of an existing checkpoint: a path, a URL, or the Hub name of a model in the cache."""
  if is_remote(text):
    try:
      require_usable("checkpoint", text)
    except UserError as error:
      raise argparse.ArgumentTypeError(str(error)) from None
    return text
  found = find(local_path(text))
  if found is None and (how := advice(text)):
    raise argparse.ArgumentTypeError(f"{text} is not a directory{how}\n  fix: {fix(text)}")
  return existing_path(str(found or text))
