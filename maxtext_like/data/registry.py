"""The kinds of data sets by the value of ``dataset``. To add one, add a file in readers/ and a line here.

This module imports nothing heavy, so that the configuration can import it.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dataset:
  """A kind of data set, and the facts that the rest of the program needs.

  Attributes:
    module: module below ``maxtext_like.data``.
    opens: name of its function (files, data, *, vision, undivided, key) -> ``documents.Documents``; see
      ``sources.open_documents``. If there is no text: (length, vocab_size, seed, *, split, avoid) -> ``pack.Rows``.
    files: it reads ``dataset_path``. The module has ``SUFFIXES``, the endings of the files that it takes from a folder; empty
      for all files.
    fields: a record has several fields, and ``text_field`` names the one with the text.
    text: it has text, which needs a tokenizer; otherwise its rows are tokens.
    sound: none of its records can be bad.
  """

  module: str
  opens: str = "open_documents"
  files: bool = False
  fields: bool = False
  text: bool = True
  sound: bool = False

  def load(self, name: str) -> Any:
    """Returns the attribute ``name`` of the module."""
    return getattr(importlib.import_module(f"{__package__}.{self.module}"), name)


DATASETS: dict[str, Dataset] = {
  "python-stdlib": Dataset("readers.text", "open_stdlib", sound=True),
  "text": Dataset("readers.text", files=True),
  "jsonl": Dataset("readers.jsonl", files=True, fields=True),
  "parquet": Dataset("readers.parquet", files=True, fields=True),
  "arrow": Dataset("readers.arrow", files=True, fields=True),
  "arrayrecord": Dataset("readers.array_record", files=True, fields=True),
  "synthetic": Dataset("synthetic", "SyntheticRows", text=False),
}

OF_FILES = tuple(name for name, kind in DATASETS.items() if kind.files)
"""The kinds that read ``dataset_path``."""
