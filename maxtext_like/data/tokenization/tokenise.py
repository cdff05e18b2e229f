"""One document to the ids of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.data.documents import BadRecordError, Documents
from maxtext_like.data.order import Order
from maxtext_like.data.pack import Document, ImageSpan
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.data.validate import Rules
from maxtext_like.errors import UserError
from maxtext_like.layers.embedding import Lookup


@dataclass(frozen=True)
class Tokenise:
  """Reads a document and tokenises it, with bos and eos where the tokenizer has them.

  A bos or eos that the text itself begins or ends with, where spellings of special tokens are parsed, is not given twice.
  """

  documents: Documents
  tokenizer: Tokenizer
  lookup: Lookup
  rules: Rules

  def __call__(self, number: int) -> Document:
    """Document `number`. UserError: a token outside the vocabulary, or as `Documents.read`."""
    tokenizer, multimodal = self.tokenizer, self.rules.multimodal
    parse = self.rules.special == "parse"
    try:
      record = self.documents.read(number)
      if record.conversation is not None:
        return self._conversation(number, record.conversation)
      if not record.text.strip():
        return Document(number)
      if self.rules.special == "error":
        self.rules.check(record, self.documents.place(number))
      if multimodal:
        ids, spans = multimodal.encode(record, self.documents.place(number))
      else:
        ids, spans = (tokenizer.encode_special if parse else tokenizer.encode)(record.text), ()
    except BadRecordError as bad:
      return Document(number, bad=bad)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if record.begins and bos is not None and not (parse and ids[:1] == [bos]):
      ids = [bos, *ids]
      spans = tuple(ImageSpan(span.start + 1, span.end + 1, span.image) for span in spans)
    if record.ends and eos is not None and not (parse and ids[-1:] == [eos]):
      ids = [*ids, eos]
    if len(ids) < 2:
      return Document(number)
    return Document(number, self._looked_up(number, ids), images=spans)

  def _conversation(self, number: int, conversation: Conversation) -> Document:
    """A conversation, whose template has its own beginning and ends. Raises BadRecordError."""
    chat = self.rules.chat
    assert chat is not None
    if chat.excludes(conversation):
      return Document(number, excluded=True)
    found = chat.encode(conversation, self.documents.place(number))
    ids = self._looked_up(number, found.ids)
    return Document(number, ids, images=found.images, learned=found.trained, ends=found.ends)

  def _looked_up(self, number: int, ids: list[int]) -> np.ndarray:
    """int32, of ids that all have a row in the tables. UserError otherwise."""
    array = np.asarray(ids, np.int64)
    wrong = self.lookup.missing(array)
    if multimodal := self.rules.multimodal:
      wrong &= array != multimodal.vision.image_token_id  # never looked up, and beyond some tables
    if wrong.any():
      at = int(wrong.argmax())
      raise UserError(
        f"{self.documents.place(number)}: token {at} has id {array[at]}: {self.lookup.why_missing(int(array[at]))} "
        f"(tokenizer: {self.tokenizer.fingerprint})"
      )
    return array.astype(np.int32)


class DocumentStream:
  """Documents in an order, each read and tokenised when it is asked for; nothing is done ahead (Prefetch does that)."""

  def __init__(self, order: Order, tokenise: Callable[[int], Document]):
    self._order, self._tokenise, self._next = order, tokenise, 0

  def __iter__(self) -> "DocumentStream":
    return self

  def __next__(self) -> Document:
    if self._next >= len(self._order):
      raise StopIteration
    document = self._tokenise(self._order[self._next])
    self._next += 1  # a document that failed is asked for again
    return document

  def counts(self) -> dict[str, int]:
    """None but what whoever reads it counts; of several sources see Mixture."""
    return {}

  def get_state(self) -> dict[str, Any]:
    """The position of the next document in the order."""
    return {"next_index": self._next}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on at a position. Raises IndexError where the order has none."""
    if not 0 <= state["next_index"] <= len(self._order):
      raise IndexError(f"position {state['next_index']} of {len(self._order)} documents")
    self._next = state["next_index"]
