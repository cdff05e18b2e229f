"""The template of Gemma 4 (as published on 2026-07-09): a system turn, thoughts in a channel, tools.

Thoughts before the last user message are dropped. Consecutive assistant messages, and the answers of tools between them, are
one turn. A call without an answer ends with ``<|tool_response>``, where the model stops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxtext_like.data.chat.conversation import Conversation, Message, Picture
from maxtext_like.data.chat.rendering import OneSample, Purpose, Rendered, RenderError, Writer, refuse_flags

_EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
_STANDARD = ("description", "type", "properties", "required", "nullable")


@dataclass(frozen=True)
class Gemma4(OneSample):
  """Renders Gemma 4's template.

  Attributes:
    empty_thought: without thinking, a prompt ends with an empty thought. True for 26B and 31B, False for E2B and E4B.
  """

  empty_thought: bool

  needed = ("<|turn>", "<turn|>")
  ends = ("<turn|>", "<|tool_response>")
  special = frozenset(
    {"<bos>", "<eos>", "<pad>", *needed, "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>"}
    | {"<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|image>", "<|image|>", "<image|>", "<|video|>"}
    | {"<|audio>", "<|audio|>", "<audio|>"}
  )

  @property
  def name(self) -> str:
    return "gemma4" if self.empty_thought else "gemma4-small"

  def render(self, conversation: Conversation, purpose: Purpose = "history") -> Rendered:
    refuse_flags(conversation, "Gemma 4", ("preserve_thinking",))
    preserve = conversation.template_kwargs.get("preserve_thinking")
    out = Writer(self.special)
    messages, thinks, shift = list(conversation.messages), conversation.thinks, 0
    # The system turn has the request to think, the system text and the tools.
    out.literal("<bos>")
    if thinks or conversation.tools or messages[0].role in ("system", "developer"):
      out.literal("<|turn>system\n")
      if thinks:
        out.literal("<|think|>\n")
      if messages[0].role in ("system", "developer"):
        _system(out, messages.pop(0))
        shift = 1
      for tool in conversation.tools:
        out.literal("<|tool>")
        try:
          _declare(out, tool["function"])
        except (TypeError, AttributeError) as error:  # a list in place of an object, or a number in place of a list
          raise RenderError(f"the declaration of the tool '{tool['function']['name']}' is not a JSON schema: {error}") from None
        out.literal("<tool|>")
      out.literal("<turn|>\n")
    # Every other message. Messages of tools are written together with the assistant's message that called them.
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    speakers = [i for i, message in enumerate(messages) if message.role != "tool"]
    lost: list[int] = []
    ended = ""  # how the last message ended: "call", "response" or "turn"
    for at, i in enumerate(speakers):
      message = messages[i]
      before = messages[speakers[at - 1]].role if at else None
      after = messages[speakers[at + 1]].role if at + 1 < len(speakers) else None
      writer = _MessageWriter(out, i + shift, message, thinks=thinks)
      if message.role != "assistant":
        out.literal("<|turn>")
        out.say(message.role)
        out.literal("\n")
      elif before != "assistant":
        out.literal("<|turn>model\n")
        if purpose == "training" and self.empty_thought and not thinks and i > last_user:
          out.literal(_EMPTY_THOUGHT)
      if message.thinking and (i > last_user or (preserve and message.tool_calls)):
        writer.thought(after_tool=before == "assistant" and ended == "response")
      elif message.trained and (message.thinking or _spells_thought(message)):
        lost.append(i + shift)
      writer.calls()
      responded = writer.responses(messages[i + 1 : speakers[at + 1] if at + 1 < len(speakers) else None])
      content = writer.content()
      if message.tool_calls and not responded:
        writer.end("<|tool_response>")
      elif message.role == "assistant" and after == "assistant" and (not message.tool_calls or responded):
        pass  # the turn continues
      elif not (responded and not content and after is None):
        writer.end("<turn|>")
        out.literal("\n")
      # An image after the call does not change what follows.
      ended = "response" if responded else "call" if message.tool_calls else "turn"
    # A prompt ends with the text that asks the model for its answer.
    if purpose == "prompt":
      if ended not in ("response", "call"):
        out.literal("<|turn>model\n")
        if not thinks and self.empty_thought:
          out.literal(_EMPTY_THOUGHT)
      elif ended == "response" and thinks:
        out.literal("<|channel>thought\n")
    return Rendered(tuple(out.pieces), tuple(lost))


class _MessageWriter:
  """Writes the parts of one message. The assistant's words are marked as spoken by it."""

  def __init__(self, out: Writer, number: int, message: Message, *, thinks: bool):
    self._out, self._number, self._message, self._thinks = out, number, message, thinks

  def _speak(self) -> None:
    if self._message.role == "assistant":
      self._out.speak(self._number, self._message.trained)

  def thought(self, *, after_tool: bool) -> None:
    """Writes a thought. After the answer of a tool, a prompt that asks for thoughts has already begun it."""
    out = self._out
    if not (after_tool and self._thinks):
      self._speak()
    out.literal("<|channel>thought\n")
    self._speak()
    out.say(self._message.thinking or "")
    out.literal("\n<channel|>")
    out.stop()

  def calls(self) -> None:
    out = self._out
    self._speak()
    for call in self._message.tool_calls:
      out.literal("<|tool_call>call:")
      out.say(call.name)
      out.literal("{")
      _mapping(out, call.arguments)
      out.literal("}<tool_call|>")
    out.stop()

  def responses(self, follow: Sequence[Message]) -> bool:
    """Writes the answers of tools: those inside the message, else the messages of role tool in ``follow``. Returns True if
    there are any."""
    found: list[tuple[str, Any, tuple[str, ...]]] = []
    if self._message.tool_responses:
      found = [(response.name or "unknown", response.response, ()) for response in self._message.tool_responses]
    elif self._message.tool_calls:
      names = {call.id: call.name for call in self._message.tool_calls}
      for message in follow:
        name = names.get(message.tool_call_id, message.name or "unknown")
        texts = "".join(part for part in message.parts if isinstance(part, str))
        images = tuple(part.path for part in message.parts if isinstance(part, Picture))
        found.append((name, None if message.content is None else texts, images))
    for i, (name, response, images) in enumerate(found):
      _response(self._out, name, response, opened_by=self._speak if i == 0 and self._message.tool_calls else None)
      for path in images:
        self._out.image("<|image|>", path)
    return bool(found)

  def content(self) -> bool:
    """Writes texts and images. Returns True if there are any."""
    out, any_text = self._out, False
    self._speak()
    for part in self._message.parts:
      if isinstance(part, Picture):
        out.image("<|image|>", part.path)
        any_text = True
      else:
        text = _without_thoughts(part) if self._message.role == "assistant" else part.strip()
        out.say(text)
        any_text = any_text or bool(text)
    out.stop()
    return any_text

  def end(self, token: str) -> None:
    self._speak()
    self._out.literal(token)
    self._out.stop()


def _system(out: Writer, message: Message) -> None:
  if isinstance(message.content, str):
    out.say(message.content.strip())
    return
  for part in message.parts:
    if isinstance(part, Picture):
      raise RenderError("Gemma 4 takes no images in the system message")
    out.say(part.strip() + " ")


def _spells_thought(message: Message) -> bool:
  """Returns True if an answer spells out a channel, which the template does not write."""
  return message.role == "assistant" and any(isinstance(part, str) and "<|channel>" in part for part in message.parts)


def _without_thoughts(text: str) -> str:
  """Returns an answer without the channels that it spells out."""
  return "".join(part.split("<|channel>")[0] for part in text.split("<channel|>")).strip()


def _response(out: Writer, name: str, response: Any, opened_by: Any) -> None:
  """Writes the answer of a tool. If the model stopped to wait for it, the first token belongs to the model's text."""
  if opened_by is not None:
    opened_by()
  out.literal("<|tool_response>")
  out.stop()
  out.literal("response:")
  out.say(name)
  out.literal("{")
  if isinstance(response, Mapping):
    _mapping(out, response)
  else:
    out.literal("value:")
    _value(out, response, quoted=False)
  out.literal("}<tool_response|>")


def _sorted(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
  return sorted(values.items(), key=lambda item: item[0].lower())


def _mapping(out: Writer, values: Mapping[str, Any]) -> None:
  """Writes key:value pairs separated by commas. Keys have no quotes."""
  for i, (key, value) in enumerate(_sorted(values)):
    out.literal("," if i else "")
    out.say(key)
    out.literal(":")
    _value(out, value, quoted=False)


def _quote(out: Writer, text: str) -> None:
  out.literal('<|"|>')
  out.say(text)
  out.literal('<|"|>')


def _value(out: Writer, value: Any, *, quoted: bool) -> None:
  """Writes a JSON value in Gemma 4's form. ``quoted``: keys of objects have quotes."""
  if value is None:
    out.literal("null")
  elif isinstance(value, str):
    _quote(out, value)
  elif isinstance(value, bool):
    out.literal("true" if value else "false")
  elif isinstance(value, Mapping):
    out.literal("{")
    for i, (key, item) in enumerate(_sorted(value)):
      out.literal("," if i else "")
      _quote(out, key) if quoted else out.say(key)
      out.literal(":")
      _value(out, item, quoted=quoted)
    out.literal("}")
  elif isinstance(value, list | tuple):
    out.literal("[")
    for i, item in enumerate(value):
      out.literal("," if i else "")
      _value(out, item, quoted=quoted)
    out.literal("]")
  else:
    out.literal(str(value))


def _field(value: Any, key: str) -> Any:
  """Returns a field of a schema; "" if it does not exist."""
  return value.get(key, "") if isinstance(value, Mapping) else ""


def _strings(out: Writer, name: str, values: Any) -> None:
  """Writes name:[strings]."""
  out.literal(f"{name}:[")
  for i, value in enumerate(values):
    out.literal("," if i else "")
    _quote(out, str(value))
  out.literal("]")


def _declare(out: Writer, function: Mapping[str, Any]) -> None:
  """Writes the declaration of a tool from its JSON schema."""
  out.literal("declaration:")
  out.say(str(_field(function, "name")))
  out.literal("{description:")
  _quote(out, str(_field(function, "description")))
  if parameters := _field(function, "parameters"):
    out.literal(",parameters:{")
    if properties := _field(parameters, "properties"):
      out.literal("properties:{")
      _properties(out, properties)
      out.literal("},")
    if required := _field(parameters, "required"):
      _strings(out, "required", required)
      out.literal(",")
    if kind := _field(parameters, "type"):
      out.literal("type:")
      _quote(out, str(kind).upper())
      out.literal("}")
  if "response" in function:
    response = function["response"]
    out.literal(",response:{")
    if description := _field(response, "description"):
      out.literal("description:")
      _quote(out, str(description))
      out.literal(",")
    if str(_field(response, "type")).upper() == "OBJECT":
      out.literal("type:")
      _quote(out, "OBJECT")
      out.literal("}")
  out.literal("}")


def _properties(out: Writer, properties: Any, *, own_keys: bool = False) -> None:
  """Writes name:{schema} pairs separated by commas. ``own_keys``: skip the keys of a schema itself, for an object without
  properties."""
  if not isinstance(properties, Mapping):
    raise RenderError(f"the properties of a tool's parameters are {type(properties).__name__}, expected an object")
  shown = [(key, value) for key, value in _sorted(properties) if not own_keys or key not in _STANDARD]
  for i, (key, schema) in enumerate(shown):
    out.literal("," if i else "")
    out.say(key)
    out.literal(":{")
    _schema(out, schema)
    out.literal("}")


def _schema(out: Writer, schema: Any) -> None:
  kind = str(_field(schema, "type")).upper()
  some = False

  def part(name: str) -> None:
    nonlocal some
    out.literal(("," if some else "") + name)
    some = True

  if description := _field(schema, "description"):
    part("description:")
    _quote(out, str(description))
  if kind == "STRING" and (enum := _field(schema, "enum")):
    part("enum:")
    _value(out, enum, quoted=True)
  items = _field(schema, "items")
  if kind == "ARRAY" and isinstance(items, Mapping) and items:
    part("items:{")
    _items(out, items)
    out.literal("}")
  if _field(schema, "nullable"):
    part("nullable:true")
  if kind == "OBJECT":
    properties = _field(schema, "properties")
    own = not isinstance(properties, Mapping)
    part("properties:{")
    _properties(out, schema if own else properties, own_keys=own)
    out.literal("}")
    if required := _field(schema, "required"):
      part("")
      _strings(out, "required", required)
  part("type:")
  _quote(out, kind)


def _items(out: Writer, items: Mapping[str, Any]) -> None:
  """Writes the schema of the entries of an array."""
  shown = [(key, value) for key, value in _sorted(items) if value is not None]
  for i, (key, value) in enumerate(shown):
    out.literal("," if i else "")
    if key == "properties":
      out.literal("properties:{")
      if isinstance(value, Mapping):
        _properties(out, value)
      out.literal("}")
    elif key == "required":
      _strings(out, "required", value)
    elif key == "type":
      out.literal("type:")
      _value(out, value.upper() if isinstance(value, str) else [str(kind).upper() for kind in value], quoted=True)
    else:
      out.say(key)
      out.literal(":")
      _value(out, value, quoted=True)
