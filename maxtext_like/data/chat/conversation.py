"""What a conversation is, whatever record it came from and whichever template renders it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Picture:
  """An image inside a message: the path of its file."""

  path: str


@dataclass(frozen=True)
class ToolCall:
  """A call of a tool by the assistant.

  Attributes:
    name: of the tool.
    arguments: by name.
    written: the arguments as the record spells them, where it has JSON text; some templates repeat that text.
    id: that the answer of the tool names.
  """

  name: str
  arguments: Mapping[str, Any]
  written: str | None = None
  id: str | None = None


@dataclass(frozen=True)
class ToolResponse:
  """What a tool gave back, inside the assistant's own message as Gemma has it."""

  name: str
  response: Any


@dataclass(frozen=True)
class Message:
  """One message.

  Attributes:
    role: who speaks.
    content: text; texts and images in order; None: nothing is said.
    thinking: what the assistant thought before.
    tool_calls: of the assistant, after what it says (Gemma 4 has them before).
    tool_responses: to the calls of this message.
    name: of the tool that a message of role tool is from.
    tool_call_id: the call that it answers.
    trained: an answer to learn from: no mark of the record (``weight``, ``train``, ...) excludes it.
    given: part of the prompt of a record of prompt and completion: no answer to learn, except with train_on=all.
    written: the content as the record spells it, where a thought that it begins with was moved to ``thinking``.
    where: what the record calls it, as ``conversations[1]`` or ``output``; "": no record has it.
    weighable: whether the record's form has a place for ``weight`` there.
  """

  role: Role
  content: str | tuple[str | Picture, ...] | None
  thinking: str | None = None
  tool_calls: tuple[ToolCall, ...] = ()
  tool_responses: tuple[ToolResponse, ...] = ()
  name: str | None = None
  tool_call_id: str | None = None
  trained: bool = True
  given: bool = field(default=False, compare=False)
  written: str | None = field(default=None, compare=False)
  where: str = field(default="", compare=False)
  weighable: bool = field(default=True, compare=False)

  @property
  def parts(self) -> tuple[str | Picture, ...]:
    """The content as texts and images."""
    if self.content is None:
      return ()
    return (self.content,) if isinstance(self.content, str) else self.content

  @property
  def spelt_parts(self) -> tuple[str | Picture, ...]:
    """The content as the record spells it, for templates without a field for thoughts."""
    return self.parts if self.written is None else (self.written,)

  @property
  def blank(self) -> bool:
    """Whether it has no letter, no image, no thought, no call and no answer of a tool."""
    said = any(isinstance(part, Picture) or part.strip() for part in self.parts)
    return not (said or (self.thinking or "").strip() or self.tool_calls or self.tool_responses)


@dataclass(frozen=True)
class Conversation:
  """Messages in order.

  Attributes:
    messages: at least one.
    tools: what may be called, as OpenAI declares it: {"type": "function", "function": {...}}.
    thinking: whether the model is to think; None: if the answers to the last user's message do.
    template_kwargs: further variables of the template (the record's ``chat_template_kwargs``).
    excluded: the record as a whole is marked as not to be learned, as KTO's ``"label": false``.
    unread: names of fields of the record that nothing reads.
  """

  messages: tuple[Message, ...]
  tools: tuple[Mapping[str, Any], ...] = ()
  thinking: bool | None = None
  template_kwargs: Mapping[str, Any] = field(default_factory=dict)
  excluded: bool = False
  unread: tuple[str, ...] = field(default=(), compare=False)

  @property
  def last_user(self) -> int:
    """The index of the last user's message; -1: there is none."""
    return max((i for i, message in enumerate(self.messages) if message.role == "user"), default=-1)

  @property
  def thinks(self) -> bool:
    """Whether the model is told to think."""
    if self.thinking is not None:
      return self.thinking
    return any(message.thinking for message in self.messages[self.last_user + 1 :])

  @property
  def images(self) -> tuple[str, ...]:
    """Paths of the images, in order."""
    return tuple(part.path for message in self.messages for part in message.parts if isinstance(part, Picture))
