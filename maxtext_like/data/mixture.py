"""Several sources of documents as one stream, in which each has its share of the tokens."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from maxtext_like.data.pack import Document
from maxtext_like.data.tokenization.tokenise import DocumentStream
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
  """One of them.

  Attributes:
    documents: without an end, pass after pass in an order of their own.
    count: documents of a pass.
    weight: of its tokens, relative to those of the others.
    most: tokens of a document that are used.
  """

  documents: DocumentStream
  count: int
  weight: float
  most: int | None = None


class Mixture:
  """The next document is one of the source that is furthest behind its share of the tokens so far.

  So at any point each source is within one document of its share, a small one begins anew as often as it has to, and nothing
  is drawn at random: state is the place in every source and its tokens. With other weights than those of the state the
  shares count from there on.
  """

  def __init__(self, sources: Mapping[str, Source]):
    """`sources`: by name."""
    self._sources = dict(sorted(sources.items()))
    counts = [source.count for source in self._sources.values()]
    self._first = {name: sum(counts[:i]) for i, name in enumerate(self._sources)}  # number of its first document among all
    self._tokens = dict.fromkeys(self._sources, 0)  # read of each,
    self._since = dict.fromkeys(self._sources, 0)  # and since the weights are what they are
    self._fruitless = dict.fromkeys(self._sources, 0)  # documents since the last one with tokens

  def __iter__(self) -> "Mixture":
    return self

  def __next__(self) -> Document:
    name = min(self._sources, key=lambda name: self._since[name] / self._sources[name].weight)
    source = self._sources[name]
    passes, place = divmod(source.documents.get_state()["next_index"], source.count)
    document = next(source.documents)
    if passes and not place and not passes & (passes + 1):  # the 2nd, 4th, 8th, ...
      logger.warning("data: pass %d over the %s documents of %s begins", passes + 1, f"{source.count:,}", name)
    if document.ids is None:
      self._fruitless[name] += 1
      if self._fruitless[name] >= source.count:
        raise UserError(
          f"data.dataset_path.{name}: no tokens in any of the {source.count} documents: all are bad, empty or shorter than two "
          f"tokens\n  fix: leave {name} out of dataset_path and dataset_weights, or give it other files"
        )
    else:
      self._fruitless[name] = 0
      self._tokens[name] += len(document.ids)
      self._since[name] += min(len(document.ids), source.most or len(document.ids))
    return replace(document, number=self._first[name] + document.number)

  def counts(self) -> dict[str, int]:
    """Documents and tokens read of each source, as "documents/web"."""
    documents = {f"documents/{name}": s.documents.get_state()["next_index"] for name, s in self._sources.items()}
    return documents | {f"tokens/{name}": tokens for name, tokens in self._tokens.items()}

  def get_state(self) -> dict[str, Any]:
    """The place of the next document of each source, and what has been read of it."""
    return {
      "sources": {
        name: {
          "documents": source.documents.get_state(), "weight": source.weight, "tokens": self._tokens[name],
          "since": self._since[name], "fruitless": self._fruitless[name],
        }
        for name, source in self._sources.items()
      }
    }  # fmt: skip

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on at a place. A source that was not there begins; one that is there no more is left."""
    saved = state["sources"]
    same = {name: entry["weight"] for name, entry in saved.items()} == {n: s.weight for n, s in self._sources.items()}
    for name, source in self._sources.items():
      entry = saved.get(name, {"documents": {"next_index": 0}, "tokens": 0, "since": 0, "fruitless": 0})
      source.documents.set_state(entry["documents"])
      self._tokens[name], self._fruitless[name] = entry["tokens"], entry["fruitless"]
      self._since[name] = entry["since"] if same else 0
