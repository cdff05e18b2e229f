"""Several sources of documents as one stream, in which each source has its share of the tokens (``dataset_weights``)."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from maxtext_like.data.pack import Document
from maxtext_like.data.tokenization.tokenize import DocumentStream
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
  """One source of a mixture.

  Attributes:
    documents: an endless stream of documents; each pass has its own order.
    count: number of documents in one pass.
    weight: share of the tokens, relative to the weights of the other sources.
    most: largest number of tokens of one document that rows use; None if rows use all of them.
  """

  documents: DocumentStream
  count: int
  weight: float
  most: int | None = None


class Mixture:
  """Takes each document from the source that is furthest behind its share of the tokens so far.

  At any point each source is within one document of its share. A small source starts another pass as often as needed. Nothing
  is random: the state is the position in every source and the tokens read from it. If a run resumes with other weights, the
  shares are counted from there on.
  """

  def __init__(self, sources: Mapping[str, Source]):
    """Sets up the mixture of ``sources``, keyed by name."""
    self._sources = dict(sorted(sources.items()))
    counts = [source.count for source in self._sources.values()]
    # Document numbers are unique in the mixture: each source has its own range.
    self._first = {name: sum(counts[:i]) for i, name in enumerate(self._sources)}
    self._tokens = dict.fromkeys(self._sources, 0)  # tokens read from each source
    self._since = dict.fromkeys(self._sources, 0)  # tokens read since the weights last changed
    self._without_tokens = dict.fromkeys(self._sources, 0)  # documents read since the last one with tokens

  def __iter__(self) -> "Mixture":
    return self

  def __next__(self) -> Document:
    name = min(self._sources, key=lambda name: self._since[name] / self._sources[name].weight)
    source = self._sources[name]
    passes, place = divmod(source.documents.get_state()["next_index"], source.count)
    document = next(source.documents)
    if passes and not place and not passes & (passes + 1):  # log the start of passes 2, 4, 8, ...
      logger.warning("data: starting pass %d over the %s documents of %s", passes + 1, f"{source.count:,}", name)
    if document.ids is None:
      self._without_tokens[name] += 1
      if self._without_tokens[name] >= source.count:
        raise UserError(
          f"data.dataset_path.{name}: no token to learn in any of the {source.count} documents: all are bad, empty or shorter "
          f"than two tokens\n  fix: leave {name} out of dataset_path and dataset_weights, or give it other files"
        )
    else:
      self._without_tokens[name] = 0
      self._tokens[name] += len(document.ids)
      self._since[name] += min(len(document.ids), source.most or len(document.ids))
    return replace(document, number=self._first[name] + document.number)

  def counts(self) -> dict[str, int]:
    """Returns the number of documents and tokens read from each source, keyed as "documents/web" and "tokens/web"."""
    documents = {f"documents/{name}": s.documents.get_state()["next_index"] for name, s in self._sources.items()}
    return documents | {f"tokens/{name}": tokens for name, tokens in self._tokens.items()}

  def get_state(self) -> dict[str, Any]:
    """Returns the position in each source, its weight and the tokens read from it. The result is JSON-serializable."""
    return {
      "sources": {
        name: {
          "documents": source.documents.get_state(), "weight": source.weight, "tokens": self._tokens[name],
          "since": self._since[name], "fruitless": self._without_tokens[name],
        }
        for name, source in self._sources.items()
      }
    }  # fmt: skip

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues at a saved position. New sources start at their beginning; sources that no longer exist are ignored."""
    saved = state["sources"]
    same = {name: entry["weight"] for name, entry in saved.items()} == {n: s.weight for n, s in self._sources.items()}
    for name, source in self._sources.items():
      entry = saved.get(name, {"documents": {"next_index": 0}, "tokens": 0, "since": 0, "fruitless": 0})
      source.documents.set_state(entry["documents"])
      self._tokens[name], self._without_tokens[name] = entry["tokens"], entry["fruitless"]
      self._since[name] = entry["since"] if same else 0
