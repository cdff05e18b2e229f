"""Names that a key may take where each name is a file: model families, optimizers, objectives, kinds of data sets.

To add one, write its file and add its line here. The registries load the files by these names, and the configuration imports
none of them. ``tests/training/test_registries.py`` compares files and names. Names of kernels are in
``layers/kernels/names.py``, because the layers do not import the configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FAMILIES = ("gemma3", "gemma4", "deepseek", "qwen3")
"""Model families, the values of ``decoder_block``. Folder: ``models/<name>/``."""

OBJECTIVES = ("language_modeling",)
"""Values of ``objective``. File: ``training/objectives/<name>.py``."""

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
  "adamw": ("adam_b1", "adam_b2", "adam_eps"),
  "adafactor": ("adafactor_momentum_rank", "adam_b1"),  # adam_b1 only with adafactor_momentum_rank above 0
  "lion": ("adam_b1", "adam_b2"),
  "sgd": ("sgd_momentum",),
}
"""Values of ``opt_type``, with the keys of ``training:`` that each one reads; setting another optimizer's key is reported.
File: ``training/optimizers/<name>.py``."""


@dataclass(frozen=True)
class Dataset:
  """A kind of data set.

  Attributes:
    module: module in ``data/`` that reads it.
    opens: function of the module: (files, data, *, vision, undivided, key) -> ``documents.Documents``, see
      ``sources.open_documents``. For a kind without text: (length, vocab_size, seed, *, split, avoid) -> ``packing.Rows``.
    files: reads ``dataset_path``. The module has ``SUFFIXES``, the file names to read in a folder; empty: all.
    fields: records have several fields, and ``text_field`` names the one with the text.
    text: has text, which a tokenizer reads; otherwise its rows are tokens.
    sound: its records cannot be unreadable.
  """

  module: str
  opens: str = "open_documents"
  files: bool = False
  fields: bool = False
  text: bool = True
  sound: bool = False


DATASETS: Mapping[str, Dataset] = {
  "python-stdlib": Dataset("readers.text", "open_stdlib", sound=True),
  "text": Dataset("readers.text", files=True),
  "jsonl": Dataset("readers.jsonl", files=True, fields=True),
  "parquet": Dataset("readers.parquet", files=True, fields=True),
  "arrow": Dataset("readers.arrow", files=True, fields=True),
  "arrayrecord": Dataset("readers.array_record", files=True, fields=True),
  "synthetic": Dataset("synthetic", "SyntheticRows", text=False),
}
"""Values of ``dataset``."""

OF_FILES = tuple(name for name, kind in DATASETS.items() if kind.files)
"""Kinds of data sets that read ``dataset_path``."""

TYPES = {
  "decoder_block": Literal[FAMILIES],
  "opt_type": Literal[tuple(OPTIMIZERS)],
  "objective": Literal[OBJECTIVES],
  "dataset": Literal[tuple(DATASETS)],
}
"""Types of the keys that take these names. Their fields are declared as ``str``."""
