"""The data structure of a conversation, independent of the record that it came from and the template that renders it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Picture:
  """An image inside a message, with the path of its file."""

  path: str


@dataclass(frozen=True)
class ToolCall:
  """A call of a tool by the assistant.

  Attributes:
    name: name of the tool.
    arguments: arguments by name.
    written: the JSON text of the arguments if the record has it; some templates repeat that text.
    id: id that the answer of the tool refers to.
  """

  name: str
  arguments: Mapping[str, Any]
  written: str | None = None
  id: str | None = None


@dataclass(frozen=True)
class ToolResponse:
  """The answer of a tool inside the assistant's message, as Gemma writes it."""

  name: str
  response: Any


@dataclass(frozen=True)
class Message:
  """One message.

  Attributes:
    role: author of the message.
    content: a text, or texts and images in order; None if the message is empty.
    thinking: the assistant's thought before the content.
    tool_calls: the assistant's calls of tools, after the content (before it in Gemma 4).
    tool_responses: answers to the calls of this message.
    name: name of the tool that wrote a message of role tool.
    tool_call_id: id of the call that the message answers.
    trained: False if the record marks the message as not to be learned (``weight``, ``train``, ...).
    in_prompt: the message is part of the prompt in a record of prompt and completion. It is learned only with train_on=all.
    written: the content as the record spells it, if a thought at its beginning was moved to ``thinking``.
    where: name of the message in the record, such as ``conversations[1]`` or ``output``; "" if it is not from a record.
    accepts_weight: True if this form of record allows ``weight`` at the message.
  """

  role: Role
  content: str | tuple[str | Picture, ...] | None
  thinking: str | None = None
  tool_calls: tuple[ToolCall, ...] = ()
  tool_responses: tuple[ToolResponse, ...] = ()
  name: str | None = None
  tool_call_id: str | None = None
  trained: bool = True
  in_prompt: bool = field(default=False, compare=False)
  written: str | None = field(default=None, compare=False)
  where: str = field(default="", compare=False)
  accepts_weight: bool = field(default=True, compare=False)

  @property
  def parts(self) -> tuple[str | Picture, ...]:
    """The content as texts and images."""
    if self.content is None:
      return ()
    return (self.content,) if isinstance(self.content, str) else self.content

  @property
  def spelled_parts(self) -> tuple[str | Picture, ...]:
    """The content as the record spells it, for templates without a separate field for thoughts."""
    return self.parts if self.written is None else (self.written,)

  @property
  def blank(self) -> bool:
    """True if the message has no visible text, image, thought, tool call or tool answer."""
    said = any(isinstance(part, Picture) or part.strip() for part in self.parts)
    return not (said or (self.thinking or "").strip() or self.tool_calls or self.tool_responses)


@dataclass(frozen=True)
class Conversation:
  """Messages in order.

  Attributes:
    messages: at least one message.
    tools: declarations of tools in OpenAI's form: {"type": "function", "function": {...}}.
    thinking: True if the model is asked to think; None if that follows from the answers to the last user message.
    template_kwargs: additional variables of the template (the record's ``chat_template_kwargs``).
    excluded: the complete record is marked as not to be learned, such as KTO's ``"label": false``.
    unread: names of the record's fields that are not read.
  """

  messages: tuple[Message, ...]
  tools: tuple[Mapping[str, Any], ...] = ()
  thinking: bool | None = None
  template_kwargs: Mapping[str, Any] = field(default_factory=dict)
  excluded: bool = False
  unread: tuple[str, ...] = field(default=(), compare=False)

  @property
  def last_user(self) -> int:
    """Index of the last user message; -1 if there is none."""
    return max((i for i, message in enumerate(self.messages) if message.role == "user"), default=-1)

  @property
  def thinks(self) -> bool:
    """True if the model is asked to think."""
    if self.thinking is not None:
      return self.thinking
    return any(message.thinking for message in self.messages[self.last_user + 1 :])

  @property
  def images(self) -> tuple[str, ...]:
    """Paths of the images, in order."""
    return tuple(part.path for message in self.messages for part in message.parts if isinstance(part, Picture))
