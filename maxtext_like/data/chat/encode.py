"""Encodes a rendered conversation as token ids, each marked as trained on or not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.data.chat.rendering import Rendered, Renderer
from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.image_text.images import MeasuredImage, TowerImage
from maxtext_like.data.pack import ImageSpan
from maxtext_like.data.tokenization.special_tokens import Spellings
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer, Tokenizer
from maxtext_like.errors import UserError

TrainOn = Literal["assistant", "all", "last"]


@dataclass(frozen=True)
class Encoded:
  """Token ids of a conversation.

  Attributes:
    ids: ids of all its samples, one after the other.
    trained: bool for each id, True if it is learned.
    images: spans of the images in ``ids``.
    ends: end of each sample in ``ids``; empty if there is one sample.
  """

  ids: list[int]
  trained: np.ndarray
  images: tuple[ImageSpan, ...] = ()
  ends: tuple[int, ...] = ()

  @classmethod
  def joined(cls, samples: Sequence["Encoded"]) -> "Encoded":
    """Concatenates several samples to one document."""
    if len(samples) == 1:
      return samples[0]
    ends = tuple(accumulate(len(sample.ids) for sample in samples))
    images = (
      ImageSpan(span.start + begin, span.end + begin, span.image)
      for begin, sample in zip((0, *ends), samples, strict=False)
      for span in sample.images
    )
    ids = [token for sample in samples for token in sample.ids]
    return cls(ids, np.concatenate([sample.trained for sample in samples]), tuple(images), ends)


def answers_to_learn(conversation: Conversation, train_on: TrainOn) -> frozenset[int] | None:
  """Returns the indices of the messages to learn, before the marks of the record are applied.

  Returns:
    Every answer (``assistant``), the answers to the last user message (``last``), or None for all text (``all``). Answers in
    the prompt
    of a record of prompt and completion are part of the question.
  """
  if train_on == "all":
    return None
  answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant" and not message.in_prompt]
  if train_on == "assistant" or not answers:
    return frozenset(answers)
  asked = max((i for i, m in enumerate(conversation.messages[: answers[-1]]) if m.role in ("user", "developer")), default=-1)
  return frozenset(i for i in answers if i > asked)


class ChatEncoder:
  """Encodes the texts of one renderer with one tokenizer.

  Text between special tokens is encoded in one piece, as a server does with the complete prompt. It is divided only where the
  assistant begins to speak, because a server's prompt ends there. If the tokenizer would find one of the renderer's tokens in a
  text of the record, the spelling is encoded as characters, unless ``parse`` is set.
  """

  def __init__(self, renderer: Renderer, tokenizer: Tokenizer, vision: VisionConfig | None = None, *, parse: bool = False):
    """Looks up the tokens of a renderer.

    Args:
      renderer: renders the conversations.
      tokenizer: tokenizer of the model.
      vision: the ``vision:`` section.
      parse: the spelling of a special token in a text of the record is that token, as in Hugging Face.

    Raises:
      UserError: the tokenizer lacks tokens that the renderer needs. The bytes tokenizer spells them instead.
    """
    found = {spelling: tokenizer.find(spelling) for spelling in renderer.special}
    self._ids: Mapping[str, int] = {spelling: i for spelling, i in found.items() if i is not None}
    missing = [spelling for spelling in renderer.needed if spelling not in self._ids]
    if missing and not isinstance(tokenizer, BytesTokenizer):
      raise UserError(
        f"the chat template {renderer.name} needs the tokens {', '.join(missing)}, which the tokenizer lacks "
        f"({tokenizer.fingerprint})\n  fix: use the model's own tokenizer, or set another chat_template"
      )
    self._tokenizer = tokenizer
    self._parse = parse
    self._vision = vision if vision is not None and vision.use_multimodal else None
    self._forbidden = frozenset(self._ids.values()) | frozenset(tokenizer.special.values())
    self._spellings = Spellings({**tokenizer.special, **self._ids})

  def spelled(self, rendered: Rendered) -> list[str]:
    """Returns the special tokens that texts of the record spell in a rendered conversation."""
    return [spelling for piece in rendered.pieces if piece.kind == "text" for spelling in self._spellings.find(piece.text)]

  @property
  def special(self) -> Mapping[str, int]:
    """Ids of the special tokens of the tokenizer and the renderer, by spelling."""
    return self._spellings.special

  @property
  def spellings(self) -> dict[int, str]:
    """The renderer's special tokens by their ids."""
    return {i: spelling for spelling, i in self._ids.items()}

  def encode(
    self,
    rendered: Rendered,
    learned: frozenset[int] | None,
    place: str,
    load: Callable[[str], TowerImage | MeasuredImage] | None = None,
  ) -> Encoded:
    """Returns the token ids of a conversation.

    Args:
      rendered: the rendered conversation.
      learned: indices of the answers to learn (``answers_to_learn``); None: all text except excluded answers.
      place: names the record in errors.
      load: reads the image with a path.

    Raises:
      BadRecordError: there are images but the model takes none, or ``load`` raised it.
    """
    ids: list[int] = []
    trained: list[bool] = []
    spans: list[ImageSpan] = []
    # Text is collected in `run` and encoded when a special token, an image or a change of `learn` ends it.
    run: list[str] = []
    of_run = False

    def flush() -> None:
      if run:
        text = "".join(run)
        new = self._tokenizer.encode_special(text) if self._parse else self._plain(text, place)
        ids.extend(new)
        trained.extend([of_run] * len(new))
        run.clear()

    for piece in rendered.pieces:
      learn = (piece.trained or piece.answer < 0) if learned is None else piece.trained and piece.answer in learned
      token = self._ids.get(piece.text) if piece.kind == "special" else None
      if piece.kind == "image":
        if self._vision is None or load is None:
          raise BadRecordError(place, "the conversation has images, but the model takes none (use_multimodal is false)")
        assert self._vision.boi_token_id is not None  # VisionConfig checks this
        assert self._vision.image_token_id is not None
        assert self._vision.eoi_token_id is not None
        run.append(self._vision.frame)
        flush()
        image = load(piece.image or "")
        span = [self._vision.boi_token_id, *[self._vision.image_token_id] * image.tokens, self._vision.eoi_token_id]
        spans.append(ImageSpan(len(ids), len(ids) + len(span), image))
        ids += span
        trained += [False] * len(span)
        run.append(self._vision.frame)
        of_run = learned is None
      elif token is not None:
        flush()
        ids.append(token)
        trained.append(learn)
      else:
        if learn != of_run:
          flush()
        run.append(piece.text)
        of_run = learn
    flush()
    return Encoded(ids, np.asarray(trained, bool), tuple(spans))

  def _plain(self, text: str, place: str) -> list[int]:
    """Encodes a text without special tokens."""
    if not text:
      return []
    ids = self._tokenizer.encode(text)
    if self._forbidden.isdisjoint(ids):
      return ids
    # The tokenizer found special tokens: encode again, and divide each spelling after its first character.
    ids, at = [], 0
    for spelling in self._spellings.find(text):
      cut = text.index(spelling, at) + 1
      ids += self._tokenizer.encode(text[at:cut])
      at = cut
    ids += self._tokenizer.encode(text[at:])
    if not self._forbidden.isdisjoint(ids):
      raise BadRecordError(place, "the tokenizer makes special tokens from text that does not spell them")
    return ids
