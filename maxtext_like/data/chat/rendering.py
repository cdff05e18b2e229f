"""The output of a renderer: pieces of text with their kind, so that no text of a user can become a special token.

A renderer writes three kinds of pieces: its own literals, in which the spelling of a special token is that token; texts of the
record, which are always text; and images.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.strict_json import printable

Purpose = Literal["history", "prompt", "training"]
"""history: the conversation in the published template. prompt: followed by the text that asks the model for its next answer.
training: like history, but the text before the last answer equals that of a prompt, including an empty thought.
"""


class RenderError(Exception):
  """A conversation that a model's template does not support. The message is the reason.

  Attributes:
    fix: what to type if all conversations are like this one; "" if only the record can be repaired.
  """

  def __init__(self, reason: str, fix: str = ""):
    super().__init__(reason)
    self.fix = fix


class Piece(NamedTuple):
  """A part of a rendered conversation.

  Attributes:
    text: text in the published template.
    kind: a special token, text, or the place of an image.
    trained: True if the assistant says it and the record does not exclude it.
    answer: index of the assistant's message that it belongs to; -1 if it belongs to none.
    image: path of the image.
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
    pieces: pieces in order.
    lost: indices of the answers to learn whose thought, or a part of it, the template does not write.
  """

  pieces: tuple[Piece, ...]
  lost: tuple[int, ...] = ()

  @property
  def lost_thoughts(self) -> int:
    """Number of answers that are learned without the thought in the record."""
    return len(self.lost)

  @property
  def text(self) -> str:
    """The complete text in the published template."""
    return "".join(piece.text for piece in self.pieces)

  def only_ends(self, answer: int) -> bool:
    """Returns True if only special tokens of the assistant's message `answer` are trained, such as the end of its turn."""
    trained = [piece for piece in self.pieces if piece.trained and piece.answer == answer]
    return bool(trained) and all(piece.kind == "special" or not piece.text.strip() for piece in trained)


class Renderer(Protocol):
  """Renders conversations for the models of one family."""

  @property
  def name(self) -> str: ...

  @property
  def needed(self) -> tuple[str, ...]:
    """Special tokens that a tokenizer of this family must have."""
    ...

  @property
  def ends(self) -> tuple[str, ...]:
    """Tokens that end an answer of the assistant."""
    ...

  @property
  def special(self) -> frozenset[str]:
    """All special tokens that it may write. Text of a record never becomes one of them."""
    ...

  def render(self, conversation: Conversation, purpose: Purpose = "history") -> Rendered:
    """Renders a conversation. Raises RenderError."""
    ...

  def samples(self, conversation: Conversation, learned: frozenset[int] | None) -> tuple[Rendered, ...]:
    """Returns the texts that a run learns from a conversation.

    Args:
      conversation: the conversation in the record.
      learned: indices of the answers to learn; None: all text, except answers that the record excludes.

    Returns:
      One text, the complete conversation; or several if the template writes an answer differently once more messages follow.
      Each answer
      to learn is marked as trained in one of them.

    Raises:
      RenderError: the template does not support this conversation.
    """
    ...


class OneSample:
  """Base of renderers that write every answer of a conversation in one text."""

  def samples(self: "Renderer", conversation: Conversation, learned: frozenset[int] | None) -> tuple[Rendered, ...]:
    del learned
    return (self.render(conversation, "training"),)


class Writer:
  """Collects pieces. ``answer`` is the index of the message that the assistant is saying; -1 if it is not speaking."""

  def __init__(self, special: Iterable[str]):
    self._special = re.compile("|".join(re.escape(spelling) for spelling in sorted(special, key=len, reverse=True)))
    self.pieces: list[Piece] = []
    self.answer, self.trained = -1, False

  def speak(self, answer: int, trained: bool = True) -> None:
    """Marks the following pieces as the assistant's message ``answer``."""
    self.answer, self.trained = answer, trained

  def stop(self) -> None:
    """Marks the following pieces as not said by the assistant."""
    self.answer, self.trained = -1, False

  def _add(self, text: str, kind: Literal["special", "text", "image"], image: str | None = None) -> None:
    if text:
      self.pieces.append(Piece(text, kind, self.trained, self.answer, image))

  def literal(self, text: str) -> None:
    """Writes a text of the template, in which spellings are special tokens."""
    at = 0
    for found in self._special.finditer(text):
      self._add(text[at : found.start()], "text")
      self._add(found.group(), "special")
      at = found.end()
    self._add(text[at:], "text")

  def say(self, text: str) -> None:
    """Writes a text of the record."""
    self._add(text, "text")

  def image(self, placeholder: str, path: str) -> None:
    """Writes an image of the record, which is never trained on. ``placeholder`` is its text in the template."""
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
  """Returns content that must be a single text. Raises RenderError."""
  if content is None:
    return ""
  if not isinstance(content, str):
    if isinstance(content, tuple) and all(isinstance(part, str) for part in content):
      return "".join(content)
    raise RenderError(f"{who} takes no images")
  return content
