"""The kinds of data sets by ``dataset``, a line each. To add one: a file beside this one, and its line here.

This module imports nothing heavy, so that the configuration may ask.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dataset:
  """A kind of data set, and what the rest of the program has to know of it.

  Attributes:
    module: of this folder.
    opens: its function (files, data, *, vision, whole, key) -> ``documents.Documents``, see ``sources.open_documents``; where
      there is no text (length, vocab_size, seed, *, split, avoid) -> ``pack.Rows``.
    files: it reads ``dataset_path``; the module has ``SUFFIXES``, the files of a folder that it takes, empty: all.
    fields: a record has several, and ``text_field`` names the text's.
    text: it has text, which a tokenizer reads; else its rows are tokens.
    sound: no record of it can be bad.
  """

  module: str
  opens: str = "open_documents"
  files: bool = False
  fields: bool = False
  text: bool = True
  sound: bool = False

  def load(self, name: str) -> Any:
    """What is called so in the module."""
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
"""Those that read ``dataset_path``."""
