"""Reads conversations from records: OpenAI's messages, ShareGPT, Alpaca, prompt and completion.

The fields of a record decide its form. Paths of images are relative to the folder of the record's file. The code for images is
at the end.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from maxtext_like import strict_json
from maxtext_like.data.chat import exclusions
from maxtext_like.data.chat.conversation import Conversation, Message, Picture, Role, ToolCall, ToolResponse
from maxtext_like.data.documents import BadRecordError, check_text
from maxtext_like.data.image_text.image_names import ImageFields, check_all, resolve_image

_ROLES: dict[str, Role] = {
  "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "model": "assistant", "tool": "tool",
  "function": "tool",
}  # fmt: skip
_SPEAKERS: dict[str, Role] = {
  "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant",
  "system": "system", "observation": "tool", "tool": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
"""Names of the speakers in ShareGPT."""
_CALLERS = ("function_call", "tool_call")  # the assistant; the value is the JSON of calls
_LISTS = ("messages", "conversations", "conversation", "prompt", "completion")
_OF_ANY_FORM = frozenset({"tools", "chat_template_kwargs", "enable_thinking"})
_OF_MESSAGE = frozenset({
  "role", "content", "reasoning", "reasoning_content", "thinking", "tool_calls", "function_call", "tool_responses", "name",
  "tool_call_id", *exclusions.MARKS, *exclusions.UNCLEAR,
})  # fmt: skip
_OF_TURN = frozenset({"from", "value", *exclusions.MARKS, *exclusions.UNCLEAR})
_NOTHING = (None, "", [], {}, ())
_THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", re.DOTALL)


def read_conversation(record: object, place: str, folder: str, fields: ImageFields | None = None) -> Conversation:
  """Returns the conversation in a record.

  Args:
    record: a JSON object, or a row of a table.
    place: names the record in errors.
    folder: folder that paths of images are relative to.
    fields: the field that lists images, and the placeholder of an image in a text. If a record lists no images, a placeholder
      is text.

  Raises:
    BadRecordError: the record has no known form, has a value that no conversation has, or has images that would be lost.
  """
  return _Reader(place, folder, fields or ImageFields()).read(record)


class _Reader:
  def __init__(self, place: str, folder: str, fields: ImageFields):
    self._place, self._folder, self._fields = place, folder, fields

  def _bad(self, reason: str, fix: str = "") -> BadRecordError:
    return BadRecordError(self._place, reason, fix)

  def read(self, record: object) -> Conversation:
    if not isinstance(record, Mapping):
      one = ": in a file that is one list, each entry must be a separate line" if isinstance(record, list) else ""
      raise self._bad(f"the record is {type(record).__name__}, expected an object{one}")
    # Tables have a column for every field of any row, so null means that the field does not exist.
    record = {key: value for key, value in record.items() if value is not None}
    # The fields decide the form of the record.
    if "messages" in record:
      messages, read = self._messages(record["messages"], "messages"), {"messages"}
    elif "conversations" in record or "conversation" in record:
      field = "conversations" if "conversations" in record else "conversation"
      messages, read = self._turns(record[field], field), {field, "system"}
      if isinstance(record.get("system"), str) and record["system"].strip():
        messages.insert(0, Message("system", self._text(record["system"], "system")))
    elif "prompt" in record and "completion" in record:
      prompt = [replace(message, in_prompt=True) for message in self._side(record["prompt"], "prompt", "user")]
      messages, read = prompt + self._side(record["completion"], "completion", "assistant"), {"prompt", "completion"}
    elif "instruction" in record and ("output" in record or "response" in record):
      messages, read = self._alpaca(record)
    else:
      fields = ", ".join(f"'{strict_json.printable(key)}'" for key in list(record)[:8]) or "none"
      raise self._bad(
        "no conversation: expected 'messages', 'conversations', 'prompt' with 'completion' or 'instruction' with 'output'; "
        f"fields: {fields}",
        fix="data_format=text, or train instead of sft"
        if isinstance(record.get("text"), str)
        else "dataset_path=FILES with records that have the chosen answers as messages, or as prompt and completion"
        if "chosen" in record
        else "dataset_path=FILES with conversations",
      )
    if not messages:
      raise self._bad("the conversation has no messages")
    # Marks, images and the remaining fields are the same for all forms.
    try:
      learned, marks = exclusions.of_record(record)
    except ValueError as error:
      raise self._bad(str(error)) from None
    read |= _OF_ANY_FORM | marks
    messages = self._with_images(messages, record, read)
    self._check(messages)
    given = self._json(record.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(given, Mapping):
      raise self._bad(f"chat_template_kwargs is {type(given).__name__}, expected an object")
    thinking = record.get("enable_thinking", given.get("enable_thinking"))
    if thinking is not None and not isinstance(thinking, bool):
      raise self._bad(f"enable_thinking is {exclusions.shown(thinking)}, expected true or false")
    return Conversation(
      tuple(messages),
      self._tools(record.get("tools")),
      thinking,
      {key: value for key, value in self._checked(given, "chat_template_kwargs").items() if key != "enable_thinking"},
      excluded=learned is False,
      unread=tuple(dict.fromkeys(self._unread_fields(record, read))),
    )

  def _unread_fields(self, record: Mapping[str, Any], read: set[str]) -> Iterator[str]:
    """Yields the names of the fields that have a value but are not read, of the record and of its messages."""
    images = self._fields.listed(record)[0]
    yield from (key for key, value in record.items() if key not in read and key != images and value not in _NOTHING)
    for field in _LISTS:
      for item in record[field] if field in read and isinstance(record.get(field), list | tuple) else ():
        known = _OF_TURN if "from" in item and field.startswith("conversation") else _OF_MESSAGE
        yield from (f"{field}[].{key}" for key, value in item.items() if key not in known and value not in _NOTHING)
        role = item.get("role", item.get("from"))
        if _ROLES.get(role, _SPEAKERS.get(role, "assistant")) != "assistant":  # a message of another role is never learned
          marked = (key for key in exclusions.MARKS if item.get(key) in (1,))
          yield from (f"{field}[].{key} of role {role}" for key in marked)

  def _text(self, text: object, field: str) -> str:
    return check_text(text, self._place, field)

  def _list(self, values: object, field: str) -> list[Any]:
    if not isinstance(values, list | tuple):
      raise self._bad(f"field '{field}' is {type(values).__name__}, expected a list")
    return list(values)

  def _json(self, text: object, field: str) -> Any:
    """Returns a value, or the value of its JSON text."""
    if not isinstance(text, str):
      return text
    try:
      return strict_json.loads(text.encode("utf-8", "surrogatepass"))
    except strict_json.NotJsonError as error:
      raise self._bad(f"{field}: {error}") from None

  # OpenAI

  def _messages(self, values: object, field: str) -> list[Message]:
    return [self._message(value, f"{field}[{i}]") for i, value in enumerate(self._list(values, field))]

  def _message(self, value: object, where: str, *, accepts_weight: bool = True) -> Message:
    if not isinstance(value, Mapping):
      raise self._bad(f"{where} is {type(value).__name__}, expected an object with role and content")
    value = {key: item for key, item in value.items() if item is not None}
    spelled = value.get("role")
    role = _ROLES.get(spelled) if isinstance(spelled, str) else None
    if role is None:
      raise self._bad(f"{where} has the role {strict_json.printable(spelled)!r}, expected one of {', '.join(_ROLES)}")
    content, of_content = value.get("content"), f"{where}.content" if accepts_weight else where  # else the record has it there
    if isinstance(content, list | tuple):
      content = tuple(self._part(part, f"{of_content}[{i}]") for i, part in enumerate(content))
    elif content is not None:
      content = self._text(content, of_content)
    thinking = next((value[key] for key in ("reasoning", "reasoning_content", "thinking") if value.get(key)), None)
    written = None
    if thinking is not None:
      thinking = self._text(thinking, f"{where}.reasoning_content")
    elif role == "assistant" and isinstance(content, str) and (found := _THOUGHT.fullmatch(content)):
      thinking, content, written = found[1] or None, found[2], content
    calls, responses = value.get("tool_calls") or (), value.get("tool_responses") or ()
    if older := value.get("function_call"):
      if calls:
        raise self._bad(f"{where} has both tool_calls and function_call (OpenAI's older form)")
      calls = [older]
    if role != "assistant" and (calls or responses or thinking):
      raise self._bad(f"{where}: only the assistant can call tools and think")
    return Message(
      role,
      content,
      thinking,
      tuple(self._call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(self._list(calls, f"{where}.tool_calls"))),
      tuple(self._response(item, where) for item in self._list(responses, f"{where}.tool_responses")),
      self._text(value["name"], f"{where}.name") if "name" in value else None,
      self._id(value.get("tool_call_id"), f"{where}.tool_call_id"),
      self._trained(value, where),
      written=written,
      where=where,
      accepts_weight=accepts_weight,
    )

  def _trained(self, value: Mapping[str, Any], where: str) -> bool:
    """Returns True if an answer is learned: no mark of the message excludes it."""
    try:
      return exclusions.of_message(value, where) is not False
    except ValueError as error:
      raise self._bad(str(error)) from None

  def _part(self, part: object, where: str) -> str | Picture:
    if isinstance(part, Mapping):
      kind = part.get("type")
      if kind == "text":
        return self._text(part.get("text"), f"{where}.text")
      if kind in ("image", "image_url", "input_image"):
        given = next((part[key] for key in ("image", "image_url", "path", "url", "bytes") if part.get(key)), None)
        if isinstance(given, Mapping) and all(value is None for value in given.values()):
          given = None
        return Picture("" if given is None else self._path(given, where))
      raise self._bad(f"{where} has the type {strict_json.printable(kind)!r}, expected text or image")
    raise self._bad(f"{where} is {type(part).__name__}, expected an object with a type")

  def _call(self, call: object, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
      raise self._bad(f"{where}: expected a function with a name")
    written = function.get("arguments")
    arguments = self._json(written, f"{where}: arguments") if written not in (None, "") else {}
    if not isinstance(arguments, Mapping):
      raise self._bad(f"{where}: the arguments are {type(arguments).__name__}, expected an object or the JSON text of one")
    name = self._text(function["name"], f"{where}.name")
    given = self._id(call.get("id") if isinstance(call, Mapping) else None, f"{where}.id")
    return ToolCall(name, self._checked(arguments, where), written if isinstance(written, str) and written else None, given)

  def _id(self, given: object, where: str) -> str | None:
    """Returns the id that connects a call with its answer: a text, or a number as text."""
    return None if given is None else str(given) if type(given) is int else self._text(given, where)

  def _response(self, response: object, where: str) -> ToolResponse:
    if not isinstance(response, Mapping) or "response" not in response:
      raise self._bad(f"{where}.tool_responses: expected objects with name and response")
    return ToolResponse(self._text(response.get("name") or "unknown", where), self._checked(response["response"], where))

  def _checked(self, value: Any, where: str) -> Any:
    """Returns a JSON value after checking that UTF-8 can encode its texts."""
    try:
      json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, TypeError, ValueError) as error:
      raise self._bad(f"{where}: {strict_json.printable(error)}") from None
    return value

  def _tools(self, tools: object) -> tuple[Mapping[str, Any], ...]:
    if tools is None or tools == "":
      return ()
    found = []
    for i, tool in enumerate(self._list(self._json(tools, "tools"), "tools")):
      function = tool.get("function", tool) if isinstance(tool, Mapping) else None
      if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise self._bad(f"tools[{i}]: expected a function with a name")
      found.append({"type": "function", "function": self._checked(function, f"tools[{i}]")})
    return tuple(found)

  # The other forms

  def _turns(self, values: object, field: str) -> list[Message]:
    """Reads ShareGPT's turns (from, value and marks such as ``weight``), or OpenAI's messages under the same name."""
    messages = []
    for i, turn in enumerate(self._list(values, field)):
      where = f"{field}[{i}]"
      if not isinstance(turn, Mapping) or "from" not in turn:
        messages.append(self._message(turn, where))
        continue
      turn = {key: item for key, item in turn.items() if item is not None}
      trained = self._trained(turn, where)
      text = self._text(turn.get("value"), f"{where}.value")
      speaker = turn["from"] if isinstance(turn["from"], str) else ""
      if speaker in _CALLERS:
        calls = self._json(text, where)
        calls = calls if isinstance(calls, list) else [calls]
        made = tuple(self._call(call, where) for call in calls)
        messages.append(Message("assistant", None, tool_calls=made, trained=trained, where=where))
      elif speaker in _SPEAKERS:
        said = {"role": _SPEAKERS[speaker], "content": text}
        marks = {key: item for key, item in turn.items() if key in _OF_TURN}
        messages.append(self._message(said | marks, where))
      else:
        known = ", ".join((*_SPEAKERS, *_CALLERS))
        raise self._bad(f"{where} is from {strict_json.printable(turn['from'])!r}, expected one of {known}")
    return messages

  def _side(self, value: object, field: str, role: Role) -> list[Message]:
    """Reads a prompt or a completion, which is a text or messages."""
    if isinstance(value, str):
      return [self._message({"role": role, "content": value}, field, accepts_weight=False)]
    return self._messages(value, field)

  def _alpaca(self, record: Mapping[str, Any]) -> tuple[list[Message], set[str]]:
    """Returns the messages, and the names of the fields that they come from."""
    messages = []
    if isinstance(record.get("system"), str) and record["system"].strip():
      messages.append(Message("system", self._text(record["system"], "system")))
    for i, pair in enumerate(self._list(record.get("history", []), "history")):
      if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise self._bad(f"history[{i}] is not a pair of question and answer")
      for side, (role, text) in enumerate(zip(("user", "assistant"), pair, strict=True)):
        messages.append(self._message({"role": role, "content": text}, f"history[{i}][{side}]", accepts_weight=False))
    answer = "output" if "output" in record else "response"
    fields = ("instruction", "input") if answer == "output" else ("instruction", "input", "context")  # as Dolly has it
    asked = [self._text(record.get(field) or "", field) for field in fields]
    messages.append(Message("user", "\n".join(text for text in asked if text)))
    messages.append(self._message({"role": "assistant", "content": record[answer]}, answer, accepts_weight=False))
    return messages, {"system", "history", *fields, answer}

  # Images, and checks of all forms

  def _path(self, given: object, where: str) -> str:
    try:
      return resolve_image(given, self._folder)
    except ValueError as error:
      raise self._bad(f"{where}: {error}") from None

  def _with_images(self, messages: list[Message], record: Mapping[str, Any], read: set[str]) -> list[Message]:
    """Puts the images that the record lists at their places in the messages."""
    pictures = [part for message in messages for part in message.parts if isinstance(part, Picture)]
    marks = Picture("") in pictures
    field, given = self._fields.listed(record, singular=not pictures or marks)
    paths = [self._path(image, field) for image in given]
    if not pictures and not paths and self._spells_places(messages) and (other := self._unread(record, read)):
      raise self._bad(self._fields.unread_reason(*other))
    left = iter(paths)
    placed, used = [], 0
    for message in messages:
      parts: list[str | Picture] = []
      for part in message.parts:
        if part == Picture("") or (isinstance(part, str) and paths and not marks and message.role in ("user", "tool")):
          pieces = ["", ""] if isinstance(part, Picture) else part.split(self._fields.placeholder)
          for i, piece in enumerate(pieces):
            if i:
              used += 1
              parts.append(Picture(next(left, "")))
            if piece:
              parts.append(piece)
        else:
          parts.append(part)
      changed = any(isinstance(part, Picture) for part in parts)
      placed.append(Message(**{**vars(message), "content": tuple(parts)}) if changed else message)
    if used != len(paths):
      other = None if paths else self._unread(record, read)
      hint = f", but '{strict_json.printable(other[0])}' looks like images ({self._fields.remedy(other[1])})" if other else ""
      raise self._bad(f"the messages have {used} places for images, and '{field}' lists {len(paths)}{hint}")
    try:
      check_all(part.path for message in placed for part in message.parts if isinstance(part, Picture))
    except ValueError as error:
      raise self._bad(str(error)) from None
    return placed

  def _spells_places(self, messages: list[Message]) -> bool:
    """Returns True if a text has the placeholder of an image."""
    return any(isinstance(part, str) and self._fields.placeholder in part for m in messages for part in m.parts)

  def _unread(self, record: Mapping[str, Any], read: set[str]) -> tuple[str, str] | None:
    """Returns an unread field that appears to have images: its name in errors, and in the record ("" in a message)."""
    if name := self._fields.unread(record, read | {self._fields.field}):
      return name, name
    for field in _LISTS:
      for i, message in enumerate(record[field] if isinstance(record.get(field), list | tuple) else ()):
        if isinstance(message, Mapping) and (name := self._fields.unread(message, _OF_MESSAGE | _OF_TURN)):
          return f"{field}[{i}].{name}", ""
    return None

  def _check(self, messages: list[Message]) -> None:
    calls = False
    for message in messages:
      if message.role == "tool" and not calls:
        raise self._bad(
          f"{message.where} is a tool's message, but no assistant message before it calls a tool (write the calls in "
          "tool_calls; if they are part of the assistant's text, as in Hermes' data, give the tool's message the role user)"
        )
      if message.role == "assistant" and not (
        message.parts or message.tool_calls or message.tool_responses or message.thinking
      ):
        raise self._bad(f"{message.where}: the assistant says nothing")
      calls = bool(message.tool_calls) or (message.role == "tool" and calls)
