"""Loads the module of a kind of data set. The kinds are in ``config/choices.py``, a line each."""

import importlib
from typing import Any

from maxtext_like.config.choices import Dataset


def load(kind: Dataset, name: str) -> Any:
  """Return an attribute of the module of a kind of data set, such as its ``SUFFIXES``; imports the module."""
  return getattr(importlib.import_module(f"{__package__}.{kind.module}"), name)
