"""Turns documents into token ids, one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.data.documents import BadRecordError, Documents
from maxtext_like.data.order import Order
from maxtext_like.data.pack import Document, ImageSpan
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.data.validate import RecordChecks
from maxtext_like.errors import UserError
from maxtext_like.layers.embedding import Lookup


@dataclass(frozen=True)
class Tokenize:
  """Reads a document and tokenizes it, with bos and eos if the tokenizer has them.

  If spellings of special tokens are parsed and the text itself begins with bos or ends with eos, that token is not added again.
  """

  documents: Documents
  tokenizer: Tokenizer
  lookup: Lookup
  checks: RecordChecks

  def __call__(self, number: int) -> Document:
    """Returns document ``number``. Raises UserError for a token outside the vocabulary, and as `Documents.read`."""
    tokenizer, multimodal = self.tokenizer, self.checks.multimodal
    parse = self.checks.special == "parse"
    try:
      record = self.documents.read(number)
      if record.conversation is not None:
        return self._conversation(number, record.conversation)
      if not record.text.strip():
        return Document(number)
      if self.checks.special == "error":
        self.checks.check(record, self.documents.place(number))
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
    """Encodes a conversation, whose template writes its own beginning and ends. Raises BadRecordError."""
    chat = self.checks.chat
    assert chat is not None
    if chat.excludes(conversation):
      return Document(number, excluded=True)
    found = chat.encode(conversation, self.documents.place(number))
    ids = self._looked_up(number, found.ids)
    return Document(number, ids, images=found.images, learned=found.trained, ends=found.ends)

  def _looked_up(self, number: int, ids: list[int]) -> np.ndarray:
    """Returns the ids as int32. Raises UserError if an embedding table has no row for an id."""
    array = np.asarray(ids, np.int64)
    wrong = self.lookup.missing(array)
    if multimodal := self.checks.multimodal:
      wrong &= array != multimodal.vision.image_token_id  # never looked up; some tables are too short for it
    if wrong.any():
      at = int(wrong.argmax())
      raise UserError(
        f"{self.documents.place(number)}: token {at} has id {array[at]}: {self.lookup.why_missing(int(array[at]))} "
        f"(tokenizer: {self.tokenizer.fingerprint})\n  fix: tokenizer=PATH of the tokenizer that was published with the model"
      )
    return array.astype(np.int32)


class DocumentStream:
  """Documents in an order, each read and tokenized on request. ``Prefetch`` works ahead, this does not."""

  def __init__(self, order: Order, tokenize: Callable[[int], Document]):
    self._order, self._tokenize, self._next = order, tokenize, 0

  def __iter__(self) -> "DocumentStream":
    return self

  def __next__(self) -> Document:
    if self._next >= len(self._order):
      raise StopIteration
    document = self._tokenize(self._order[self._next])
    self._next += 1  # only now: a document that failed is requested again
    return document

  def counts(self) -> dict[str, int]:
    """Returns no counts: the packer counts documents, and ``Mixture`` counts those of several sources."""
    return {}

  def get_state(self) -> dict[str, Any]:
    """Returns the position of the next document in the order."""
    return {"next_index": self._next}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues at a position. Raises IndexError if the order has no such position."""
    if not 0 <= state["next_index"] <= len(self._order):
      raise IndexError(f"position {state['next_index']} of {len(self._order)} documents")
    self._next = state["next_index"]
