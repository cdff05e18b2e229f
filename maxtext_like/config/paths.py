"""Checks of paths and URLs in configurations and on the command line."""

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_like.config.problems import Problem
from maxtext_like.errors import UserError
from maxtext_like.storage import CONDITIONAL, Place, is_remote, require_usable

LOCAL_KEYS = ("compilation_cache_dir",)
"""Keys whose value must be a path on this machine."""

PLACE_KEYS = ("dataset_path", "eval_path", "tokenizer", "init_from", "lora_from", "checkpoint_mirror", "output_dir")
"""Keys whose value may be a path or the URL of a remote store."""

# Any scheme with two slashes, and storage schemes with one slash, which pathlib makes of two.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(gs|s3|hf|https?|hdfs|abfss?|az|file):/")
_FIX = "write a path on this machine; mount remote storage (gcsfuse, s3fs, NFS) or copy the files"


def is_url(text: str) -> bool:
  """Return True if a text starts with a URL scheme, such as ``gs://``, ``s3://``, ``hf://`` or ``file://``."""
  return _URL.match(text) is not None


def require_local(text: str) -> str:
  """Return the path unchanged.

  Raises:
    UserError: it is a URL, which pathlib would treat as a folder named ``gs:``.
  """
  if is_url(text):
    raise UserError(f"{text} is a URL, not a path\n  fix: {_FIX}")
  return text


def local_path(text: str) -> str:
  """argparse type of a path on this machine; a URL is an error."""
  if is_url(text):
    raise argparse.ArgumentTypeError(f"{text} is a URL, not a path: {_FIX}")
  return text


def new_place(text: str) -> str:
  """argparse type of an output place: a local path, or a URL of a store.

  Raises:
    UserError: this installation cannot write to the URL.
  """
  if not is_remote(text) or text.startswith("file:"):
    return local_path(text)
  require_usable("--out", text)
  return str(Place(text))


def existing_path(text: str) -> str:
  """argparse type of an existing local path, checked before slow imports start."""
  if not Path(local_path(text)).expanduser().exists():
    raise argparse.ArgumentTypeError(f"{text}: no such file or directory")
  return text


def new_file(text: str) -> str:
  """argparse type of a local output file. Checks that it can be written before the work starts."""
  path = Path(local_path(text)).expanduser().absolute()
  if path.is_dir():
    raise argparse.ArgumentTypeError(f"{text}: is a directory, not a file")
  if not path.parent.is_dir():
    raise argparse.ArgumentTypeError(f"{text}: the folder of this file does not exist")
  if not os.access(path if path.exists() else path.parent, os.W_OK):
    raise argparse.ArgumentTypeError(f"{text}: no permission to write this file")
  return str(path)


def by_source(value: Any) -> dict[str, str | Sequence[str] | None]:
  """Return the files of ``dataset_path`` or ``eval_path`` by source; without named sources, all files are under ""."""
  return dict(value) if isinstance(value, Mapping) else {"": value} if value else {}


def _texts(value: Any) -> Iterator[str]:
  for paths in by_source(value).values():
    yield from (paths,) if isinstance(paths, str) else paths or ()


def url_problems(config: object) -> Iterator[Problem]:
  """Yield a problem for each key of a ``Config`` with a URL that is not allowed there or not complete."""
  for key in (*LOCAL_KEYS, *PLACE_KEYS):
    (value,) = (getattr(section, key) for section in vars(config).values() if hasattr(section, key))
    for text in _texts(value):
      if not is_url(text):
        continue
      scheme, rest = re.split(r":/+", text, maxsplit=1)
      if key in LOCAL_KEYS:
        yield Problem(f"{key} = {text} is a URL, not a path", (key,), _FIX)
      elif not is_remote(text):
        what = f"{key} = {text} is not a complete URL, and as a path it would be a folder named {scheme}:"
        yield Problem(what, (key,), f"write {scheme}://{rest}" if scheme != "file" else f"write /{rest}")
      elif scheme == "file" and key != "checkpoint_mirror":
        yield Problem(f"{key} = {text} is a URL of this machine", (key,), f"write /{rest}")
      elif key == "output_dir" and scheme not in CONDITIONAL:
        yield Problem(
          f"output_dir = {text}: a run needs conditional writes, which only gs:// and s3:// support",
          (key,),
          f"set output_dir to a local directory, and checkpoint_mirror={text} for a copy of the checkpoints",
        )
  sections = list(vars(config).values())
  mirror = next(section.checkpoint_mirror for section in sections if hasattr(section, "checkpoint_mirror"))
  output = next(section.output_dir for section in sections if hasattr(section, "output_dir"))
  if mirror and is_remote(output):
    yield Problem(
      f"checkpoint_mirror = {mirror} with output_dir = {output}", ("checkpoint_mirror", "output_dir"),
      "leave checkpoint_mirror out: it protects checkpoints on a local disk, and these are in a store",
    )  # fmt: skip
