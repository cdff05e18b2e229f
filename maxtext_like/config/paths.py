"""Paths that a user gives: which keys hold one, and that a URL is none."""

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
"""Keys whose value names something in the file system of this machine."""

PLACE_KEYS = ("dataset_path", "eval_path", "tokenizer", "init_from", "lora_from", "checkpoint_mirror", "output_dir")
"""Keys whose value is a path or a URL of a store."""

# Any scheme with two slashes; of the ones for storage also what pathlib makes of them.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(gs|s3|hf|https?|hdfs|abfss?|az|file):/")
_FIX = "name a path on this machine: remote storage has to be mounted (gcsfuse, s3fs, NFS), or copied"


def is_url(text: str) -> bool:
  """Whether a text begins with a scheme, as ``gs://``, ``s3://``, ``hf://`` or ``file://`` do."""
  return _URL.match(text) is not None


def require_local(text: str) -> str:
  """The path as it was typed.

  Raises:
    UserError: it is a URL, which pathlib would turn into a folder named ``gs:``.
  """
  if is_url(text):
    raise UserError(f"{text} is a URL, not a path\n  fix: {_FIX}")
  return text


def local_path(text: str) -> str:
  """The same as the ``type`` of an option or word that argparse reads."""
  if is_url(text):
    raise argparse.ArgumentTypeError(f"{text} is a URL, not a path: {_FIX}")
  return text


def new_place(text: str) -> str:
  """The same of what is to be written where a store will do: a URL is left as it is.

  Raises:
    UserError: a URL that nothing here can write to.
  """
  if not is_remote(text) or text.startswith("file:"):
    return local_path(text)
  require_usable("--out", text)
  return str(Place(text))


def existing_path(text: str) -> str:
  """``local_path`` of what is to be read: it has to be there, which is seen before anything heavy is imported."""
  if not Path(local_path(text)).expanduser().exists():
    raise argparse.ArgumentTypeError(f"{text}: no such file or directory")
  return text


def new_file(text: str) -> str:
  """``local_path`` of a file that is to be written: whether it can be shows before anything is worked out."""
  path = Path(local_path(text)).expanduser().absolute()
  if path.is_dir():
    raise argparse.ArgumentTypeError(f"{text}: is a directory, expected the name of a file")
  if not path.parent.is_dir():
    raise argparse.ArgumentTypeError(f"{text}: its folder is missing")
  if not os.access(path if path.exists() else path.parent, os.W_OK):
    raise argparse.ArgumentTypeError(f"{text}: cannot be written, no permission")
  return str(path)


def by_source(value: Any) -> dict[str, str | Sequence[str] | None]:
  """The files that ``dataset_path`` or ``eval_path`` names, by source; where it names none, all are those of ""."""
  return dict(value) if isinstance(value, Mapping) else {"": value} if value else {}


def _texts(value: Any) -> Iterator[str]:
  for paths in by_source(value).values():
    yield from (paths,) if isinstance(paths, str) else paths or ()


def url_problems(config: object) -> Iterator[Problem]:
  """Every path key of a ``Config`` that holds a URL where none can be, or one that is none, as it was typed."""
  for key in (*LOCAL_KEYS, *PLACE_KEYS):
    (value,) = (getattr(section, key) for section in vars(config).values() if hasattr(section, key))
    for text in _texts(value):
      if not is_url(text):
        continue
      scheme, rest = re.split(r":/+", text, maxsplit=1)
      if key in LOCAL_KEYS:
        yield Problem(f"{key} = {text} is a URL, not a path", (key,), _FIX)
      elif not is_remote(text):
        what = f"{key} = {text} would be a folder named {scheme}: on this machine"
        yield Problem(what, (key,), f"write {scheme}://{rest}" if scheme != "file" else f"write /{rest}")
      elif scheme == "file" and key != "checkpoint_mirror":
        yield Problem(f"{key} = {text} is this machine's", (key,), f"write /{rest}")
      elif key == "output_dir" and scheme not in CONDITIONAL:
        yield Problem(
          f"output_dir = {text}: a run can be in gs:// or s3://, where a write may have a condition",
          (key,),
          f"a directory of this machine, and checkpoint_mirror={text} for a copy of its checkpoints",
        )
  sections = list(vars(config).values())
  mirror = next(section.checkpoint_mirror for section in sections if hasattr(section, "checkpoint_mirror"))
  output = next(section.output_dir for section in sections if hasattr(section, "output_dir"))
  if mirror and is_remote(output):
    yield Problem(
      f"checkpoint_mirror = {mirror} with output_dir = {output}", ("checkpoint_mirror", "output_dir"),
      "leave it out: a mirror is for checkpoints on a disk that may be lost",
    )  # fmt: skip
