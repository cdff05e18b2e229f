"""Which documents a configuration names, for training and for evaluation."""

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Protocol

from maxtext_like.config.vision import VisionConfig
from maxtext_like.data import array_record, input_files, jsonl
from maxtext_like.data.array_record import ArrayRecord
from maxtext_like.data.arrow import Arrow
from maxtext_like.data.documents import Documents
from maxtext_like.data.order import Split
from maxtext_like.data.packed import SUFFIXES as PACKED
from maxtext_like.data.parquet import Parquet
from maxtext_like.data.text import TextFiles, stdlib
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

SUFFIXES: dict[str, tuple[str, ...]] = {
  "text": (), "jsonl": jsonl.SUFFIXES, "parquet": (".parquet",), "arrow": (".arrow",), "arrayrecord": array_record.SUFFIXES,
}  # fmt: skip
"""The files of a folder that each data set reads; empty: all."""


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


def held_out_fraction(data: DataConfig) -> float:
  """The share of the documents of data.dataset_path that is kept for evaluation: none where nothing evaluates them."""
  return 0.0 if data.eval_path or not data.eval_interval else data.eval_fraction


def path_key(data: DataConfig, split: Split) -> str:
  """The key that names the files of a split."""
  return "eval_path" if split == "eval" and data.eval_path else "dataset_path"


def open_documents(
  data: DataConfig, vision: VisionConfig | None = None, split: Split = "train", whole: Iterable[str] = ()
) -> Documents:
  """The documents that data.dataset names for a split; images are jsonl's alone. `whole`: see TextFiles. Raises UserError."""
  key = path_key(data, split)
  path = data.eval_path if key == "eval_path" else data.dataset_path
  if data.dataset == "python-stdlib":
    refuse_path(data)
    return stdlib()
  if data.dataset not in SUFFIXES:
    raise UserError(f"data.dataset is '{data.dataset}', expected one of python-stdlib, synthetic, {', '.join(SUFFIXES)}")
  files = input_files.find(path, SUFFIXES[data.dataset], data.dataset, key)
  if data.dataset == "jsonl" and (twice := sorted(set(files) & {f"{file}{suffix}" for file in files for suffix in PACKED})):
    logger.warning(
      "data.%s: %s lies beside %s, and both are read: name one of them, unless they hold different records (%d such pairs)",
      key, twice[0], os.path.splitext(twice[0])[0], len(twice),
    )  # fmt: skip
  if key == "eval_path":
    trained = input_files.find(data.dataset_path, SUFFIXES[data.dataset], data.dataset)
    if common := sorted(set(files) & set(trained)):
      logger.warning("%d of the %d files of data.eval_path are trained on too, as %s", len(common), len(files), common[0])
  if data.dataset == "text":
    return TextFiles(files, whole=whole, key=key)
  if data.dataset == "jsonl":
    if vision is None:
      return jsonl.JsonLines(files, data.text_field, key=key)
    return jsonl.JsonLines(files, data.text_field, vision.images_field, take_images=vision.use_multimodal, key=key)
  columns = {"parquet": Parquet, "arrow": Arrow, "arrayrecord": ArrayRecord}
  return columns[data.dataset](files, data.text_field, key=key)


def refuse_path(data: DataConfig) -> None:
  """UserError when files are named for a data set that reads none."""
  if data.dataset_path:
    raise UserError(
      f"data.dataset_path is '{data.dataset_path}', but dataset={data.dataset} reads no path; "
      "set dataset to jsonl or another that reads files, or leave dataset_path empty"
    )
