"""Section ``data:``: the data set, and how its records become rows of tokens."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from maxtext_like.config.choices import DATASETS, OF_FILES
from maxtext_like.config.paths import by_source
from maxtext_like.config.problems import Checked, Problem, alternatives, at_least

Paths = str | tuple[str, ...] | dict[str, str | tuple[str, ...]] | None
_SOURCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # names of metrics contain it


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
  """Section ``data:``: the data set, and how its records become rows of tokens."""

  dataset: str
  dataset_path: Paths = field(hash=False)
  dataset_weights: dict[str, float] | None = field(hash=False)
  tokenizer: str
  text_field: str
  data_format: Literal["text", "chat"]
  chat_template: str
  train_on: Literal["assistant", "all", "last"]
  special_tokens_in_text: Literal["parse", "literal", "error"] | None
  on_bad_record: Literal["error", "skip"]
  packing: bool
  eval_fraction: float
  eval_path: Paths = field(hash=False)
  eval_interval: int
  eval_steps: int
  shuffle: bool
  data_shuffle_seed: int
  dataset_documents_max: int | None

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values."""
    yield from at_least(self, 0, "eval_interval", "data_shuffle_seed")
    yield from at_least(self, 1, "eval_steps", "dataset_documents_max")
    if not 0 <= self.eval_fraction < 1:
      yield Problem(
        f"eval_fraction = {self.eval_fraction} is outside [0, 1)",
        ("eval_fraction",),
        fix="set eval_fraction to 0 or more and below 1",
      )
    if self.eval_path and self.eval_fraction > 0:
      yield Problem(
        f"eval_path with eval_fraction = {self.eval_fraction}", ("eval_path", "eval_fraction"),
        "leave one of them out: evaluation uses either these files or a share of the documents",
      )  # fmt: skip
    if self.eval_path and self.eval_interval == 0:
      yield Problem(
        "eval_path is set, but eval_interval = 0 switches evaluation off", ("eval_path", "eval_interval"),
        "set the steps between evaluations, as in eval_interval=100",
      )  # fmt: skip
    files = " name files in eval_path," if DATASETS[self.dataset].files else ""
    if self.eval_interval > 0 and self.eval_fraction == 0 and not self.eval_path:
      yield Problem(
        f"eval_interval = {self.eval_interval} with eval_fraction = 0", ("eval_interval", "eval_fraction"),
        f"hold out a share of the documents, as in eval_fraction=0.05,{files} or set eval_interval=0",
      )  # fmt: skip
    kind = DATASETS[self.dataset]
    if kind.files and not self.dataset_path:
      yield Problem(
        f"dataset: {self.dataset} without dataset_path", ("dataset", "dataset_path"),
        f"name the files, as in dataset_path=/data/*.{ {'text': 'txt'}.get(self.dataset, self.dataset) }",
      )  # fmt: skip
    if not kind.files and self.dataset_path:
      yield Problem(
        f"dataset: {self.dataset} reads no files, but dataset_path is set", ("dataset", "dataset_path"),
        f"set dataset to {alternatives(OF_FILES)}, or leave dataset_path out",
      )  # fmt: skip
    if not kind.files and self.eval_path:
      yield Problem(
        f"dataset: {self.dataset} reads no files, but eval_path is set", ("dataset", "eval_path"),
        f"leave eval_path out, or set dataset to {alternatives(OF_FILES)}",
      )  # fmt: skip
    if not kind.text and self.special_tokens_in_text is not None:
      yield Problem(
        f"special_tokens_in_text: {self.special_tokens_in_text} with dataset: {self.dataset}, which has no text",
        ("special_tokens_in_text", "dataset"), "leave it out",
      )  # fmt: skip
    yield from self._mixture_problems()
    if self.data_format == "chat" and not kind.fields:
      yield Problem(
        f"data_format: chat with dataset: {self.dataset}, whose documents are not conversations", ("data_format", "dataset"),
        f"set dataset to {alternatives(tuple(name for name, other in DATASETS.items() if other.fields))}",
      )  # fmt: skip
    if self.data_format == "text" and self.train_on != "assistant":
      yield Problem(
        f"train_on: {self.train_on} has no effect with data_format: text, where every token has a loss",
        ("train_on", "data_format"),
        "set data_format=chat, or leave train_on out",
      )  # fmt: skip
    for name in ("tokenizer", "text_field", "chat_template"):
      if not getattr(self, name):
        yield Problem(f"{name} is empty", (name,), fix=f"set {name} to one or more values, or leave it out")

  def _mixture_problems(self) -> Iterator[Problem]:
    for key in ("dataset_path", "eval_path"):
      for name, paths in by_source(getattr(self, key)).items():
        if name and not _SOURCE_NAME.fullmatch(name):
          yield Problem(
            f"{key}: {name!r} is not a valid name of a source", (key,), "use only letters, digits, '.', '_' and '-'"
          )
        if name and not paths:
          yield Problem(f"{key}: the source {name} has no files", (key,), "add files, or leave the source out")
    keys, weights = ("dataset_path", "dataset_weights"), self.dataset_weights
    if not isinstance(self.dataset_path, dict):
      if weights is not None:
        what = "dataset_weights is set, but dataset_path has no named sources"
        yield Problem(what, keys, "name the sources, as in dataset_path={web: web/*.jsonl, code: code/*.jsonl}")
      return
    if weights is None:
      fix = f"set the shares of tokens, as in dataset_weights={{{', '.join(f'{name}: 1' for name in self.dataset_path)}}}"
      yield Problem("dataset_path names sources, but dataset_weights is not set", keys, fix)
      return
    for name in sorted(self.dataset_path.keys() ^ weights.keys()):
      lacking = "dataset_weights" if name in self.dataset_path else "dataset_path"
      yield Problem(f"{lacking} has no {name!r}", keys, "use the same names in both keys, and remove unused sources from both")
    for name, weight in weights.items():
      if weight <= 0:
        fix = f"set a number above 0, or remove {name} from both keys to train without it"
        yield Problem(f"dataset_weights: {name}: {weight:g} is not above 0", ("dataset_weights",), fix)

  @property
  def one_document(self) -> bool:
    """True if every row holds one document and padding after it."""
    return not self.packing or not DATASETS[self.dataset].text
