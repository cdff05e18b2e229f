"""Which documents a configuration names, for training and for evaluation."""

import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from maxtext_like.config.paths import by_source
from maxtext_like.config.problems import alternatives
from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.chat.encode import TrainOn
from maxtext_like.data.documents import Documents
from maxtext_like.data.order import Split
from maxtext_like.data.readers import input_files
from maxtext_like.data.registry import DATASETS, OF_FILES, Dataset
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

_TABLES = tuple(f"{kind}{packed}" for kind in (".json", ".csv", ".tsv") for packed in ("", ".gz", ".zst"))
"""Files of records that are not read as they are; dataset=jsonl says how to convert them."""


class DataConfig(Protocol):
  """The `data:` section, as far as the pipeline reads it (maxtext_like/config/data_keys.py has the real one)."""

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
    _tell_of_others(paths, dataset, dotted(key, name))
    for file in found[name]:
      if (kind := _other_dataset(file, dataset, suffixes)) is not None:
        raise UserError(
          f"data.{key}: {file} is a file of dataset={kind}, among those of dataset={dataset}\n  fix: dataset={kind}, "
          "files of one kind, or sources by name, of which each may have its own"
        )
      if (other := owners.setdefault(os.path.realpath(file), name)) != name:
        raise UserError(
          f"data.{key}: {file} is in two sources, {other} and {name}\n  fix: name it in one of them; its weight says how often "
          "it is read"
        )
  return found


def kind_of_files(dataset_path: Any, data_format: str) -> str:
  """The kind of data set of the files that ``dataset_path`` names.

  The first source decides whose names or files have the suffix of a kind whose records have several fields. If none has, the
  files are jsonl for conversations and for names of other tables, and text otherwise. Raises UserError: a source has files of
  several kinds.
  """
  for name, paths in by_source(dataset_path).items():
    if len(named := _kinds_named(paths)) > 1:
      raise UserError(
        f"data.{dotted('dataset_path', name)} {paths!r} has files of several kinds: {', '.join(named)}\n  fix: name those of "
        "one kind, as in FOLDER/*.parquet, say which with dataset=, or give each a source of its own, as in "
        "dataset_path={a: FOLDER/*.jsonl, b: FOLDER/*.parquet}"
      )
    if named:
      return named[0]
  entries = [
    entry for paths in by_source(dataset_path).values() for entry in ([paths] if isinstance(paths, str) else paths or ())
  ]
  return "jsonl" if data_format == "chat" or any(entry.endswith(_TABLES) for entry in entries) else "text"


def _dataset_of(data: DataConfig, key: str, source: str) -> str:
  """The kind of data set of a source: data.dataset, but for one that stands beside others, or is for evaluation, and has files
  of one other kind alone, whose records have fields as those of data.dataset do."""
  if kind_of(data).fields and (source or key == "eval_path"):
    named = _kinds_named(by_source(getattr(data, key))[source])
    if data.dataset not in named and len(named) == 1:
      return named[0]
  return data.dataset


def _tell_of_others(paths: str | Sequence[str] | None, dataset: str, named: str) -> None:
  """Says which files of a folder are records of another kind, and so are not read."""
  suffixes = _of_records()
  if dataset not in suffixes.values():
    return
  others = [suffix for suffix, kind in suffixes.items() if kind != dataset] + [".json"] * (dataset == "jsonl")
  for folder in [paths] if isinstance(paths, str) else paths or ():
    ends: Counter[str] = Counter()
    with input_files.saying_if_slow(f"data.{named} {folder!r}: looking for files of other kinds"):
      for _, folders, names in os.walk(os.path.expanduser(folder)):  # yields nothing if it is not a folder
        folders[:] = [name for name in folders if not name.startswith(".")]
        ends.update(suffix for name in names for suffix in others if name.endswith(suffix) and not name.startswith("."))
    for suffix, count in sorted(ends.items()):
      _tell_once(f"data.{named}: {count} files *{suffix} in {folder} are not read, dataset is {dataset}")


@functools.cache
def _tell_once(what: str) -> None:
  """Once, however often files are looked for."""
  logger.warning("%s", what)


def _of_records() -> dict[str, str]:
  """How files end whose records have several fields, and of which kind of data set they then are."""
  return {suffix: name for name, kind in DATASETS.items() if kind.fields for suffix in kind.load("SUFFIXES")}


def _kinds_named(paths: str | Sequence[str] | None) -> list[str]:
  """The kinds of data sets that entries of data.dataset_path name, each once: those whose records have several fields. By the
  names, else by the files in the folders."""
  entries = [paths] if isinstance(paths, str) else [*(paths or ())]
  kinds = _of_records()
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
