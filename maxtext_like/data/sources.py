"""Which documents a configuration names, for training and for evaluation."""

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from maxtext_like.config.paths import by_source
from maxtext_like.config.problems import alternatives
from maxtext_like.config.vision import VisionConfig
from maxtext_like.data import input_files
from maxtext_like.data.chat.encode import TrainOn
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
  def dataset_path(self) -> str | Sequence[str] | Mapping[str, str | Sequence[str]] | None: ...
  @property
  def dataset_weights(self) -> Mapping[str, float] | None: ...
  @property
  def tokenizer(self) -> str: ...
  @property
  def text_field(self) -> str: ...
  @property
  def data_format(self) -> str: ...
  @property
  def chat_template(self) -> str: ...
  @property
  def train_on(self) -> TrainOn: ...
  @property
  def special_tokens_in_text(self) -> str | None: ...
  @property
  def on_bad_record(self) -> str: ...
  @property
  def packing(self) -> bool: ...
  @property
  def eval_fraction(self) -> float: ...
  @property
  def eval_path(self) -> str | Sequence[str] | Mapping[str, str | Sequence[str]] | None: ...
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


def source_names(data: DataConfig, split: Split) -> tuple[str, ...]:
  """The sources of a split, sorted; ("",) where there are no several. Those of "train" are mixed."""
  return tuple(sorted(by_source(getattr(data, path_key(data, split))))) or ("",)


def find_files(data: DataConfig, split: Split) -> dict[str, list[str]]:
  """The files of each source of a split. UserError: as `input_files.find`; a file that two sources have."""
  key, owners, found = path_key(data, split), {}, {}
  for name, paths in sorted(by_source(getattr(data, key)).items() or {"": None}.items()):
    dataset = _dataset_of(data, key, name)
    suffixes = DATASETS[dataset].load("SUFFIXES")
    found[name] = input_files.find(paths, suffixes, dataset, dotted(key, name))
    for file in found[name]:
      if (kind := _other_dataset(file, dataset, suffixes)) is not None:
        raise UserError(
          f"data.{key}: {file} is a file of dataset={kind}, among those of dataset={dataset}\n  fix: files of one kind, or "
          "sources by name, of which each may have its own"
        )
      if (other := owners.setdefault(os.path.realpath(file), name)) != name:
        raise UserError(
          f"data.{key}: {file} is in two sources, {other} and {name}\n  fix: name it in one of them; its weight says how often "
          "it is read"
        )
  return found


def kind_of_files(data: DataConfig) -> str:
  """The kind of data set of the files of data.dataset_path, by the first name or first file there that says it; jsonl where
  none does. Of those kinds whose records have several fields."""
  for paths in by_source(data.dataset_path).values():
    if named := _kinds_named(paths):
      return named[0]
  return "jsonl"


def _dataset_of(data: DataConfig, key: str, source: str) -> str:
  """The kind of data set of a source: data.dataset, but for one that stands beside others, or is for evaluation, and has files
  of one other kind alone, whose records have fields as those of data.dataset do."""
  if kind_of(data).fields and (source or key == "eval_path"):
    named = _kinds_named(by_source(getattr(data, key))[source])
    if data.dataset not in named and len(named) == 1:
      return named[0]
  return data.dataset


def _kinds_named(paths: str | Sequence[str] | None) -> list[str]:
  """The kinds of data sets that entries of data.dataset_path name, each once: those whose records have several fields. By the
  names, else by the files in the folders."""
  entries = [paths] if isinstance(paths, str) else [*(paths or ())]
  kinds = {suffix: name for name, kind in DATASETS.items() if kind.fields for suffix in kind.load("SUFFIXES")}
  if not all(entry.endswith(tuple(kinds)) for entry in entries):
    with contextlib.suppress(UserError):  # of what is not there: told when it is opened
      entries += input_files.find(paths, tuple(kinds), "sft", "dataset_path")
  return list(dict.fromkeys(kind for entry in entries for suffix, kind in kinds.items() if entry.endswith(suffix)))


def _other_dataset(file: str, dataset: str, suffixes: tuple[str, ...]) -> str | None:
  """The one whose files end as this one does, where it is not the dataset's; None: no other's do, or any is read."""
  if not suffixes or file.endswith(suffixes):
    return None
  others = (name for name, kind in DATASETS.items() if name != dataset and kind.files)
  return next((name for name in others if file.endswith(DATASETS[name].load("SUFFIXES") or "\0")), None)


def open_documents(
  data: DataConfig,
  vision: VisionConfig | None = None,
  split: Split = "train",
  only: str | None = None,
  whole: Iterable[str] = (),
) -> dict[str, Documents]:
  """The documents of each source that data.dataset has for a split, or of `only` one. Raises UserError.

  `vision`: where records may have images; `whole`: spellings that no piece of a text ends inside of.
  """
  key, kind = path_key(data, split), kind_of(data)
  if not kind.files:
    refuse_path(data)
    return {"": kind.load(kind.opens)([], data, vision=vision, whole=whole, key=key)}
  found = find_files(data, split)
  if key == "eval_path":
    files = [file for files in found.values() for file in files]
    trained = {file for files in find_files(data, "train").values() for file in files}
    if common := sorted(set(files) & trained):
      logger.warning("%d of the %d files of data.eval_path are trained on too, as %s", len(common), len(files), common[0])
  opened = {}
  for name, files in found.items():
    if only in (None, name):
      own = DATASETS[_dataset_of(data, key, name)]
      opened[name] = own.load(own.opens)(files, data, vision=vision, whole=whole, key=dotted(key, name))
  return opened


def dotted(key: str, source: str) -> str:
  """What names the files of a source: the key, and the name that the source has in it."""
  return f"{key}.{source}" if source else key


def refuse_path(data: DataConfig) -> None:
  """UserError when files are named for a data set that reads none."""
  if data.dataset_path:
    raise UserError(
      f"data.dataset_path is '{data.dataset_path}', but dataset={data.dataset} reads no path; "
      f"set dataset to {alternatives(OF_FILES)}, or leave dataset_path empty"
    )
