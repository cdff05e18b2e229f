"""Paths that a user gives: which keys hold one, and that a URL is none."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from maxtext_like.config.problems import Problem
from maxtext_like.errors import UserError

PATH_KEYS = ("dataset_path", "eval_path", "tokenizer", "init_from", "output_dir", "compilation_cache_dir")
"""Keys whose value names something in the file system of this machine."""

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


def existing_path(text: str) -> str:
  """``local_path`` of what is to be read: it has to be there, which is seen before anything heavy is imported."""
  if not Path(local_path(text)).expanduser().exists():
    raise argparse.ArgumentTypeError(f"{text}: no such file or directory")
  return text


def url_problems(config: object) -> Iterator[Problem]:
  """Every path key of a ``Config`` that holds a URL, as it was typed."""
  sections = vars(config).values()
  for key in PATH_KEYS:
    (value,) = (getattr(section, key) for section in sections if hasattr(section, key))
    for text in value if isinstance(value, tuple) else (value,):
      if isinstance(text, str) and is_url(text):
        yield Problem(f"{key} = {text} is a URL, not a path", (key,), _FIX)
  for section in sections:
    mirror = getattr(section, "checkpoint_mirror", None)  # a URL it may be, but with both of its slashes
    if mirror and is_url(mirror) and "://" not in mirror:
      scheme, rest = mirror.split(":/", 1)
      what = f"checkpoint_mirror = {mirror} would be a folder named {scheme}: on this machine"
      yield Problem(what, ("checkpoint_mirror",), f"write {scheme}://{rest}" if scheme != "file" else f"write /{rest}")
