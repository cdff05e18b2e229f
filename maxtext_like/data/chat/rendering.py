"""What a renderer makes of a conversation: pieces of text whose nature is known, so that no text of a user becomes a token.

A renderer writes three kinds of things: its own literals, in which the spelling of a special token is that token; texts of the
record, which are text whatever they spell; and images.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.strict_json import printable

Purpose = Literal["history", "prompt", "training"]
"""history: the conversation as the published template has it; prompt: with what asks the model for its next answer;
training: as history, but the last answer stands after all that a prompt has before it, an empty thought too."""


class RenderError(Exception):
  """A conversation that a model's template does not have; the message is the reason.

  Attributes:
    fix: words to type if all conversations are like this one; "" if only the record can be repaired.
  """

  def __init__(self, reason: str, fix: str = ""):
    super().__init__(reason)
    self.fix = fix


class Piece(NamedTuple):
  """A part of a rendered conversation.

  Attributes:
    text: as the published template spells it.
    kind: a special token, text, or the place of an image.
    trained: the assistant says it.
    answer: the number of the assistant's message that it belongs to; -1: to none.
    image: the path of the image.
  """

  text: str
  kind: Literal["special", "text", "image"]
  trained: bool = False
  answer: int = -1
  image: str | None = None


@dataclass(frozen=True)
class Rendered:
  """A rendered conversation.

  Attributes:
    pieces: in order.
    lost: numbers of the answers to learn whose thought, or a part of it, the template does not write.
  """

  pieces: tuple[Piece, ...]
  lost: tuple[int, ...] = ()

  @property
  def lost_thoughts(self) -> int:
    """How many answers are learned without the thought that the record has."""
    return len(self.lost)

  @property
  def text(self) -> str:
    """All of it, as the published template gives it."""
    return "".join(piece.text for piece in self.pieces)

  def only_ends(self, answer: int) -> bool:
    """Whether all that is trained of the assistant's message `answer` is special tokens, as the end of its turn."""
    trained = [piece for piece in self.pieces if piece.trained and piece.answer == answer]
    return bool(trained) and all(piece.kind == "special" or not piece.text.strip() for piece in trained)


class Renderer(Protocol):
  """How a family's models know conversations."""

  @property
  def name(self) -> str: ...

  @property
  def needed(self) -> tuple[str, ...]:
    """Special tokens without which a tokenizer is of another model."""
    ...

  @property
  def ends(self) -> tuple[str, ...]:
    """Tokens with which the assistant ends what it says."""
    ...

  @property
  def special(self) -> frozenset[str]:
    """All special tokens that it may write; text of a record never becomes one of them."""
    ...

  def render(self, conversation: Conversation, purpose: Purpose = "history") -> Rendered:
    """Raises RenderError."""
    ...

  def samples(self, conversation: Conversation, learned: frozenset[int] | None) -> tuple[Rendered, ...]:
    """The texts that a run learns from a conversation.

    Args:
      conversation: the conversation in the record.
      learned: numbers of the answers to learn; None: all text, except answers that the record excludes.

    Returns:
      One text, the complete conversation; or several if the template writes an answer differently once more messages follow.
      Each answer to learn is marked as trained in one of them.

    Raises:
      RenderError: the template does not have this conversation.
    """
    ...


class OneSample:
  """Of a renderer that writes every answer of a conversation in one text."""

  def samples(self: "Renderer", conversation: Conversation, learned: frozenset[int] | None) -> tuple[Rendered, ...]:
    del learned
    return (self.render(conversation, "training"),)


class Writer:
  """Collects pieces. `answer`: the number of the message that the assistant is saying; -1: it is not."""

  def __init__(self, special: Iterable[str]):
    self._special = re.compile("|".join(re.escape(spelling) for spelling in sorted(special, key=len, reverse=True)))
    self.pieces: list[Piece] = []
    self.answer, self.trained = -1, False

  def speak(self, answer: int, trained: bool = True) -> None:
    """From here on the assistant says its message `answer`."""
    self.answer, self.trained = answer, trained

  def stop(self) -> None:
    """From here on it says nothing."""
    self.answer, self.trained = -1, False

  def _add(self, text: str, kind: Literal["special", "text", "image"], image: str | None = None) -> None:
    if text:
      self.pieces.append(Piece(text, kind, self.trained, self.answer, image))

  def literal(self, text: str) -> None:
    """A text of the template, in which spellings are special tokens."""
    at = 0
    for found in self._special.finditer(text):
      self._add(text[at : found.start()], "text")
      self._add(found.group(), "special")
      at = found.end()
    self._add(text[at:], "text")

  def say(self, text: str) -> None:
    """A text of the record."""
    self._add(text, "text")

  def image(self, placeholder: str, path: str) -> None:
    """An image of the record; `placeholder`: what stands for it in the template's text. Never trained on."""
    self.pieces.append(Piece(placeholder, "image", image=path))


def refuse_flags(conversation: Conversation, who: str, known: Iterable[str] = ()) -> None:
  """Raises RenderError if the record's ``chat_template_kwargs`` have a variable that the template does not know."""
  if unknown := sorted(set(conversation.template_kwargs) - set(known)):
    names, has = ", ".join(map(printable, unknown)), ", ".join(known) or "none"
    raise RenderError(
      f"chat_template_kwargs has {names}, which the template of {who} does not read (it reads: {has})",
      fix="chat_template=FILE with a template that reads it",
    )


def text_of(content: object, who: str) -> str:
  """Content that has to be one text. Raises RenderError."""
  if content is None:
    return ""
  if not isinstance(content, str):
    if isinstance(content, tuple) and all(isinstance(part, str) for part in content):
      return "".join(content)
    raise RenderError(f"{who} takes no images")
  return content
