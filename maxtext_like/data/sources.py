"""Which documents a configuration names, for training and for evaluation."""

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from maxtext_like.config.problems import alternatives
from maxtext_like.config.vision import VisionConfig
from maxtext_like.data import input_files
from maxtext_like.data.documents import Documents
from maxtext_like.data.order import Split
from maxtext_like.data.registry import DATASETS, OF_FILES, Dataset
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)


class DataConfig(Protocol):
  """The `data:` section, as far as the pipeline reads it (maxtext_like/config/schema.py has the real one)."""

  @property
  def dataset(self) -> str: ...
  @property
  def dataset_path(self) -> str | Sequence[str] | None: ...
  @property
  def tokenizer(self) -> str: ...
  @property
  def text_field(self) -> str: ...
  @property
  def special_tokens_in_text(self) -> str | None: ...
  @property
  def on_bad_record(self) -> str: ...
  @property
  def packing(self) -> bool: ...
  @property
  def eval_fraction(self) -> float: ...
  @property
  def eval_path(self) -> str | Sequence[str] | None: ...
  @property
  def eval_interval(self) -> int: ...
  @property
  def shuffle(self) -> bool: ...
  @property
  def data_shuffle_seed(self) -> int: ...
  @property
  def dataset_documents_max(self) -> int | None: ...


def kind_of(data: DataConfig) -> Dataset:
  """The kind of data set that data.dataset names. Raises UserError."""
  if data.dataset not in DATASETS:
    raise UserError(f"data.dataset is '{data.dataset}', expected one of {', '.join(DATASETS)}")
  return DATASETS[data.dataset]


def held_out_fraction(data: DataConfig) -> float:
  """The share of the documents of data.dataset_path that is kept for evaluation: none where nothing evaluates them."""
  return 0.0 if data.eval_path or not data.eval_interval else data.eval_fraction


def path_key(data: DataConfig, split: Split) -> str:
  """The key that names the files of a split."""
  return "eval_path" if split == "eval" and data.eval_path else "dataset_path"


def open_documents(
  data: DataConfig, vision: VisionConfig | None = None, split: Split = "train", whole: Iterable[str] = ()
) -> Documents:
  """The documents that data.dataset names for a split. Raises UserError.

  `vision`: where records may have images; `whole`: spellings that no piece of a text ends inside of.
  """
  key = path_key(data, split)
  kind = kind_of(data)
  files: list[str] = []
  if not kind.files:
    refuse_path(data)
  else:
    suffixes = kind.load("SUFFIXES")
    files = input_files.find(data.eval_path if key == "eval_path" else data.dataset_path, suffixes, data.dataset, key)
    if key == "eval_path":
      trained = input_files.find(data.dataset_path, suffixes, data.dataset)
      if common := sorted(set(files) & set(trained)):
        logger.warning("%d of the %d files of data.eval_path are trained on too, as %s", len(common), len(files), common[0])
  return kind.load(kind.opens)(files, data, vision=vision, whole=whole, key=key)


def refuse_path(data: DataConfig) -> None:
  """UserError when files are named for a data set that reads none."""
  if data.dataset_path:
    raise UserError(
      f"data.dataset_path is '{data.dataset_path}', but dataset={data.dataset} reads no path; "
      f"set dataset to {alternatives(OF_FILES)}, or leave dataset_path empty"
    )
