"""Makes data sources from keyword arguments and closes them after the test."""

from dataclasses import make_dataclass
from typing import Any

import pytest

from maxtext_like.data.loader import make_data

DEFAULTS = {
  "dataset": "jsonl",
  "dataset_path": None,
  "dataset_weights": None,
  "tokenizer": "bytes",
  "text_field": "text",
  "data_format": "text",
  "chat_template": "auto",
  "train_on": "assistant",
  "special_tokens_in_text": None,
  "on_bad_record": "error",
  "packing": True,
  "eval_fraction": 0.0,
  "eval_path": None,
  "eval_interval": 1,
  "shuffle": True,
  "data_shuffle_seed": 0,
  "dataset_documents_max": None,
}
ARGUMENTS = {
  "vocab_size": 259,
  "length": 16,
  "global_batch": 2,
  "split": "train",
  "source": None,
  "vision": None,
  "lookup": None,
  "chat_template": None,
  "own_rows": None,
  "epochs": None,
  "stall_limit_seconds": 600.0,
  "alive": lambda: None,
  "waiting": lambda: None,
}


Settings: Any = make_dataclass("Settings", DEFAULTS)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  """Gives each test its own folder for stored findings."""
  folder = tmp_path_factory.mktemp("cache")
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
  return folder


@pytest.fixture
def make():
  opened = []

  def build(**given):
    arguments = {key: given.pop(key, value) for key, value in ARGUMENTS.items()}
    assert given.keys() <= DEFAULTS.keys()
    source = make_data(Settings(**{**DEFAULTS, **given}), **arguments)
    opened.append(source)
    return source

  yield build
  for source in opened:
    source.close()
