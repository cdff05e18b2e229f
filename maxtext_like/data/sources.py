"""Finds and opens the documents that a configuration names, for training and for evaluation."""

import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from maxtext_like.config.choices import DATASETS, OF_FILES, Dataset
from maxtext_like.config.paths import by_source
from maxtext_like.config.problems import alternatives
from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.chat.encode import TrainOn
from maxtext_like.data.documents import Documents
from maxtext_like.data.order import Split
from maxtext_like.data.readers import input_files
from maxtext_like.data.registry import load
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

_TABLES = tuple(f"{kind}{packed}" for kind in (".json", ".csv", ".tsv") for packed in ("", ".gz", ".zst"))
"""Files of records that are not read directly. dataset=jsonl says how to convert them."""


class DataConfig(Protocol):
  """The part of the `data:` section that the pipeline reads (maxtext_like/config/data_keys.py has the complete section)."""

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
  """Returns the kind of data set that data.dataset names. Raises UserError."""
  if data.dataset not in DATASETS:
    raise UserError(f"data.dataset is '{data.dataset}', expected one of {', '.join(DATASETS)}", fix="write one of these names")
  return DATASETS[data.dataset]


def held_out_fraction(data: DataConfig) -> float:
  """Returns the share of the documents of data.dataset_path that is kept for evaluation; 0 if they are not evaluated."""
  return 0.0 if data.eval_path or not data.eval_interval else data.eval_fraction


def path_key(data: DataConfig, split: Split) -> str:
  """Returns the key that names the files of a split."""
  return "eval_path" if split == "eval" and data.eval_path else "dataset_path"


def source_names(data: DataConfig, split: Split) -> tuple[str, ...]:
  """Returns the names of the sources of a split, sorted; ("",) for a single source. "train" mixes them."""
  return tuple(sorted(by_source(getattr(data, path_key(data, split))))) or ("",)


def find_files(data: DataConfig, split: Split) -> dict[str, list[str]]:
  """Returns the files of each source of a split. Raises UserError as `input_files.find`, and for a file in two sources."""
  key, owners, found = path_key(data, split), {}, {}
  for name, paths in sorted(by_source(getattr(data, key)).items() or {"": None}.items()):
    dataset = _dataset_of(data, key, name)
    suffixes = load(DATASETS[dataset], "SUFFIXES")
    found[name] = input_files.find(paths, suffixes, dataset, dotted(key, name))
    _warn_of_other_files(paths, dataset, dotted(key, name))
    for file in found[name]:
      if (kind := _other_dataset(file, dataset, suffixes)) is not None:
        raise UserError(
          f"data.{key}: {file} is a file for dataset={kind}, but it is read with dataset={dataset}\n  fix: set dataset={kind}, "
          "name only files of one kind, or use named sources, each of which may have its own kind"
        )
      if (other := owners.setdefault(os.path.realpath(file), name)) != name:
        raise UserError(
          f"data.{key}: {file} is in two sources, {other} and {name}\n  fix: name it in one of them; dataset_weights says how "
          "often it is read"
        )
  return found


def kind_of_files(dataset_path: Any, data_format: str) -> str:
  """Returns the kind of data set for the files that ``dataset_path`` names.

  The first source with names or files that have the suffix of a kind with several fields decides. If there is none, the files
  are jsonl for conversations and for names of other tables, and text otherwise.

  Raises:
    UserError: a source has files of several kinds.
  """
  for name, paths in by_source(dataset_path).items():
    if len(named := _kinds_named(paths)) > 1:
      raise UserError(
        f"data.{dotted('dataset_path', name)} {paths!r} has files of several kinds: {', '.join(named)}\n  fix: name "
        "the files of one kind, as in FOLDER/*.parquet, set dataset=, or name each kind as a separate source, as in "
        "dataset_path={a: FOLDER/*.jsonl, b: FOLDER/*.parquet}"
      )
    if named:
      return named[0]
  entries = [
    entry for paths in by_source(dataset_path).values() for entry in ([paths] if isinstance(paths, str) else paths or ())
  ]
  return "jsonl" if data_format == "chat" or any(entry.endswith(_TABLES) for entry in entries) else "text"


def _dataset_of(data: DataConfig, key: str, source: str) -> str:
  """Returns the kind of data set of a source.

  It is data.dataset, unless the source is one of several or for evaluation, and its files are all of one other kind with
  fields.
  """
  if kind_of(data).fields and (source or key == "eval_path"):
    named = _kinds_named(by_source(getattr(data, key))[source])
    if data.dataset not in named and len(named) == 1:
      return named[0]
  return data.dataset


def _warn_of_other_files(paths: str | Sequence[str] | None, dataset: str, named: str) -> None:
  """Logs which files of a folder are records of another kind and are therefore not read."""
  suffixes = _record_suffixes()
  if dataset not in suffixes.values():
    return
  others = [suffix for suffix, kind in suffixes.items() if kind != dataset] + [".json"] * (dataset == "jsonl")
  for folder in [paths] if isinstance(paths, str) else paths or ():
    ends: Counter[str] = Counter()
    with input_files.log_if_slow(f"data.{named} {folder!r}: searching for files of other kinds"):
      for _, folders, names in os.walk(os.path.expanduser(folder)):  # yields nothing if it is not a folder
        folders[:] = [name for name in folders if not name.startswith(".")]
        ends.update(suffix for name in names for suffix in others if name.endswith(suffix) and not name.startswith("."))
    for suffix, count in sorted(ends.items()):
      _warn_once(f"data.{named}: {count} files *{suffix} in {folder} are not read, because dataset is {dataset}")


@functools.cache
def _warn_once(what: str) -> None:
  """Logs a warning once, even if files are searched several times."""
  logger.warning("%s", what)


def _record_suffixes() -> dict[str, str]:
  """Returns the file endings of the kinds whose records have several fields, with the kind of each."""
  return {suffix: name for name, kind in DATASETS.items() if kind.fields for suffix in load(kind, "SUFFIXES")}


def _kinds_named(paths: str | Sequence[str] | None) -> list[str]:
  """Returns the kinds with several fields that entries of data.dataset_path name, by the names or else by the files in the
  folders."""
  entries = [paths] if isinstance(paths, str) else [*(paths or ())]
  kinds = _record_suffixes()
  if not all(entry.endswith(tuple(kinds)) for entry in entries):
    with contextlib.suppress(UserError):  # missing files are reported when they are opened
      entries += input_files.find(paths, tuple(kinds), "sft", "dataset_path")
  return list(dict.fromkeys(kind for entry in entries for suffix, kind in kinds.items() if entry.endswith(suffix)))


def _other_dataset(file: str, dataset: str, suffixes: tuple[str, ...]) -> str | None:
  """Returns another kind of data set that has the ending of this file; None if the file is of this kind or of no kind."""
  if not suffixes or file.endswith(suffixes):
    return None
  others = (name for name, kind in DATASETS.items() if name != dataset and kind.files)
  return next((name for name in others if file.endswith(load(DATASETS[name], "SUFFIXES") or "\0")), None)


def open_documents(
  data: DataConfig,
  vision: VisionConfig | None = None,
  split: Split = "train",
  only: str | None = None,
  undivided: Iterable[str] = (),
) -> dict[str, Documents]:
  """Opens the documents of each source of a split. Raises UserError.

  Args:
    data: the ``data:`` section.
    vision: the ``vision:`` section, if records may have images.
    split: "train" or "eval".
    only: name of a single source to open.
    undivided: spellings that must not be divided between two pieces of a text.
  """
  key, kind = path_key(data, split), kind_of(data)
  if not kind.files:
    refuse_path(data)
    return {"": load(kind, kind.opens)([], data, vision=vision, undivided=undivided, key=key)}
  found = find_files(data, split)
  if key == "eval_path":
    files = [file for files in found.values() for file in files]
    trained = {file for files in find_files(data, "train").values() for file in files}
    if common := sorted(set(files) & trained):
      logger.warning("%d of the %d files of data.eval_path are also trained on, such as %s", len(common), len(files), common[0])
  opened = {}
  for name, files in found.items():
    if only in (None, name):
      own = DATASETS[_dataset_of(data, key, name)]
      opened[name] = load(own, own.opens)(files, data, vision=vision, undivided=undivided, key=dotted(key, name))
  return opened


def dotted(key: str, source: str) -> str:
  """Returns the name of the setting that lists the files of a source: the key, and the name of the source if it has one."""
  return f"{key}.{source}" if source else key


def refuse_path(data: DataConfig) -> None:
  """Raises UserError if files are named for a data set that reads none."""
  if data.dataset_path:
    raise UserError(
      f"data.dataset_path is '{data.dataset_path}', but dataset={data.dataset} reads no files\n"
      f"  fix: set dataset to {alternatives(OF_FILES)}, or leave dataset_path empty"
    )
