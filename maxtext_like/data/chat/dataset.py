"""Conversations as the documents of a run: rendered with one template, encoded with one tokenizer, and learned in part."""

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.chat.conversation import Conversation, Picture
from maxtext_like.data.chat.encode import ChatEncoder, Encoded, TrainOn, answers_to_learn
from maxtext_like.data.chat.records import read_conversation
from maxtext_like.data.chat.registry import choose
from maxtext_like.data.chat.rendering import Rendered, Renderer, RenderError
from maxtext_like.data.documents import BadRecordError, ReadRecord, Record
from maxtext_like.data.image_text.image_names import ImageFields
from maxtext_like.data.image_text.multimodal import Multimodal
from maxtext_like.data.sources import DataConfig
from maxtext_like.data.tokenization.special_tokens import listed
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer, Tokenizer

logger = logging.getLogger(__name__)


def record_reader(data: DataConfig, vision: VisionConfig | None) -> ReadRecord | None:
  """Returns the function that makes conversations from the records of a data set; None if the records are text."""
  if data.data_format != "chat":
    return None
  fields = ImageFields() if vision is None else ImageFields(vision.images_field, vision.image_placeholder)

  def read(record: object, place: str, folder: str) -> Record:
    conversation = read_conversation(record, place, folder, fields)
    return Record("", images=conversation.images, conversation=conversation)

  return read


@functools.cache
def _warn_of_bytes() -> None:
  """Logs a warning once, for any number of splits and sources."""
  logger.warning(
    "the bytes tokenizer has no special tokens: the markers of the chat template are encoded as ordinary text, so the model "
    "cannot distinguish them from the same text in a message"
  )


@dataclass
class Chat:
  """Turns the conversations of a run into tokens.

  Attributes:
    renderer: renders with the template of the model.
    encoder: encodes with the tokenizer.
    train_on: the part of a conversation to learn.
    multimodal: how images enter the rows; None if the model takes no images.
    special_tokens: ``special_tokens_in_text``.
  """

  renderer: Renderer
  encoder: ChatEncoder
  train_on: TrainOn
  multimodal: Multimodal | None = None
  special_tokens: str | None = None
  _last_rendered: tuple[Conversation, tuple[Rendered, ...]] | None = field(default=None, repr=False, compare=False)

  @classmethod
  def of(cls, data: DataConfig, tokenizer: Tokenizer, published: str | None, multimodal: Multimodal | None) -> "Chat":
    """Returns the chat of a configuration. ``published`` is the template of the model's family. Raises UserError."""
    renderer = choose(data.chat_template, published, tokenizer)
    if isinstance(tokenizer, BytesTokenizer):
      _warn_of_bytes()
    parse = data.special_tokens_in_text == "parse"
    encoder = ChatEncoder(renderer, tokenizer, multimodal.vision if multimodal else None, parse=parse)
    return cls(renderer, encoder, data.train_on, multimodal, data.special_tokens_in_text)

  def excludes(self, conversation: Conversation) -> bool:
    """Returns True if the record excludes the conversation, or every answer to learn, from training."""
    learned = answers_to_learn(conversation, self.train_on)
    return conversation.excluded or bool(learned and not any(conversation.messages[i].trained for i in learned))

  def samples(self, conversation: Conversation, place: str) -> tuple[Rendered, ...]:
    """Returns the texts to train on. Raises BadRecordError if the template cannot render it or there is nothing to learn."""
    last = self._last_rendered
    if last is None or last[0] is not conversation:  # a record is checked and then encoded, so this renders it once
      last = self._last_rendered = conversation, self._rendered(conversation, place)
    return last[1]

  def _rendered(self, conversation: Conversation, place: str) -> tuple[Rendered, ...]:
    learned = answers_to_learn(conversation, self.train_on)
    try:
      samples = self.renderer.samples(conversation, learned)
    except RenderError as error:
      raise BadRecordError(place, str(error), fix=error.fix) from None
    if learned is not None and not any(piece.trained and piece.answer in learned for s in samples for piece in s.pieces):
      raise BadRecordError(place, f"the assistant says nothing that could be learned (train_on={self.train_on})")
    for i, message in enumerate(conversation.messages):
      if not message.trained or learned is None or i not in learned:
        continue
      # The end of the turn alone would be learned, right after the question or after an image or a tool's answer.
      unlearned = message.tool_responses or any(isinstance(part, Picture) for part in message.parts)
      if message.blank or (not unlearned and any(sample.only_ends(i) for sample in samples)):
        why = "" if message.blank else ": the chat template drops all of it, a thought"
        remedy = ' ("weight": 0 there leaves it out)' if message.accepts_weight else ""
        raise BadRecordError(place, f"{message.where or f'message {i + 1}'}: the assistant's answer is empty{why}{remedy}")
    if conversation.images and self.multimodal is None:
      raise BadRecordError(place, "the conversation has images, but the model takes none (use_multimodal is false)")
    if self.special_tokens == "error" and (spelled := self.spelled(samples)):
      raise BadRecordError(
        place,
        f"the text spells special tokens: {listed(spelled)} (special_tokens_in_text=error)",
        fix="special_tokens_in_text=parse reads them as the tokens, special_tokens_in_text=literal as text",
      )
    return samples

  def spelled(self, samples: Sequence[Rendered]) -> Counter[str]:
    """Returns how often the record spells each special token. Samples repeat each other's beginnings, so the maximum counts."""
    return functools.reduce(lambda most, sample: most | Counter(self.encoder.spelled(sample)), samples, Counter())

  def lost_thoughts(self, conversation: Conversation, samples: Sequence[Rendered]) -> tuple[int, int]:
    """Returns the number of answers learned without their thought: before the last user message, and after it."""
    learned = answers_to_learn(conversation, self.train_on)
    lost = {i for sample in samples for i in sample.lost if learned is None or i in learned}
    late = sum(i > conversation.last_user for i in lost)
    return len(lost) - late, late

  def encode(self, conversation: Conversation, place: str) -> Encoded:
    """Returns the tokens of a conversation. Raises BadRecordError as ``samples``, and for images that cannot be used."""
    multimodal = self.multimodal
    load = (lambda path: multimodal.read_image(path, place)) if multimodal else None
    learned = answers_to_learn(conversation, self.train_on)
    return Encoded.joined([self.encoder.encode(s, learned, place, load) for s in self.samples(conversation, place)])

  def identity(self) -> dict[str, Any]:
    """Returns everything about conversations that the rows depend on, for the state of the data."""
    return {"template": self.renderer.name, "train_on": self.train_on}
