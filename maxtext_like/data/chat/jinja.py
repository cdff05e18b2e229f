"""Conversations as a model's own template has them: the jinja that lies in its checkpoint.

What the assistant says is found by rendering beginnings of the conversation: where a prompt for message i ends in the whole,
and the token that ends message i. Where that gives no single answer, the conversation is refused.

Special tokens that the record's texts spell are broken up before, so that those in the rendered text are the template's own.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from maxtext_like import strict_json
from maxtext_like.data.chat.conversation import Conversation, Message, Picture
from maxtext_like.data.chat.rendering import Purpose, Rendered, RenderError, Writer
from maxtext_like.data.chat.sandbox import compile_template
from maxtext_like.data.input_files import open_regular
from maxtext_like.data.tokenizer import MORE_TEMPLATES, Tokenizer
from maxtext_like.errors import UserError

MAX_BYTES = 2**20  # of a template; the longest known has 30 KiB
DEFAULT, TOOL_USE = "default", "tool_use"  # as transformers names templates; the second is for conversations with tools
BREAK = "\ufdd0"  # no character, and in no record: set into a spelling that is to stay text


def find_template(folder: Path) -> tuple[str, str] | None:
  """The template that lies beside a tokenizer, and the file that it is from; None: there is none.

  Raises:
    UserError: a file that cannot be read or used; several templates by name, none of which is the default.
  """
  found = _named_templates(folder)
  if found and DEFAULT not in found:
    path = next(iter(found.values()))[1]
    raise UserError(
      f"{path}: the chat templates there are {', '.join(map(strict_json.printable, found))}, none is named {DEFAULT}\n"
      f"  fix: chat_template=FILE with one of them in a file of its own, or the name {DEFAULT} for the one that is meant"
    )
  return found.get(DEFAULT)


def template_beside(tokenizer: Tokenizer) -> "Jinja | None":
  """The template that lies beside a tokenizer, with the one that is there for tools; None: there is none. Raises UserError."""
  folder = tokenizer.files[0].parent if tokenizer.files else None
  if folder is None or (found := find_template(folder)) is None:
    return None
  tools = _named_templates(folder).get(TOOL_USE)
  return Jinja(*found, tokenizer, Jinja(*tools, tokenizer) if tools else None)


def _named_templates(folder: Path) -> dict[str, tuple[str, str]]:
  """The templates beside a tokenizer by the names that transformers gives them, each with its file."""
  if (path := folder / "chat_template.jinja").is_file():
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return {name: (read_template(path), str(path)) for name, path in ((DEFAULT, path), *((path.stem, path) for path in more))}
  for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
    if path.is_file() and (named := _named_in(path)):
      return named
  return {}


def _named_in(path: Path) -> dict[str, tuple[str, str]]:
  """Those of a JSON file, which has one or a list of them by name."""
  found = strict_json.parse_file(path, limit=16 * MAX_BYTES).get("chat_template")
  entries = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}]
  pairs = ((entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict))
  return {key: (text, str(path)) for key, text in pairs if isinstance(key, str) and isinstance(text, str)}


def read_template(path: Path) -> str:
  """The text of a template's file, or the default template of a tokenizer_config.json. Raises UserError."""
  if path.suffix == ".json" and (named := _named_in(path)):
    if DEFAULT not in named:
      raise UserError(f"{path}: the chat templates there are {', '.join(named)}, none is named {DEFAULT}")
    return named[DEFAULT][0]
  try:
    with open_regular(path) as file:
      data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
      raise UserError(f"{path}: more than {MAX_BYTES} bytes, no chat template")
    return data.decode("utf-8")
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}") from None
  except UnicodeDecodeError as error:
    raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None


class Jinja:
  """A template with one tokenizer's special tokens."""

  needed: tuple[str, ...] = ()
  ends: tuple[str, ...] = ()  # generation_config.json says them

  def __init__(self, source: str, name: str, tokenizer: Tokenizer, for_tools: "Jinja | None" = None):
    """A template.

    Args:
      source: the template.
      name: of its file.
      tokenizer: whose special tokens it writes.
      for_tools: renders conversations with tools in its place.

    Raises:
      UserError: no jinja2, or none that can be run.
    """
    self.name = f"{Path(name).name}, xxh3 {xxhash.xxh3_128_hexdigest(source.encode('utf-8', 'surrogatepass'))}"
    if for_tools is not None:
      self.name += f", with tools {for_tools.name}"
    self._for_tools = for_tools
    spelt = {id_: text for text, id_ in tokenizer.special.items()}
    self._tokens = {
      f"{kind}_token": spelt.get(id_ if id_ is not None else -1, "")
      for kind, id_ in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id), ("pad", tokenizer.pad_id))
    }
    # Tokens that are not marked as special (<think>) but stand in the template are the template's all the same.
    marked = [
      text for text in set(re.findall(r"<[^<>\s]{1,40}>|\[[A-Z_/]{1,40}\]", source)) if tokenizer.find(text) is not None
    ]
    self.special = frozenset(tokenizer.special) | frozenset(marked)
    if for_tools is not None:
      self.special |= for_tools.special
    if not self.special:
      raise UserError(f"{name}: the tokenizer has no special tokens, so nothing would tell a turn from its text")
    self._spelling = re.compile("|".join(re.escape(text) for text in sorted(self.special, key=len, reverse=True)))
    self._template: Callable[..., str] = compile_template(source, name)

  def render(self, conversation: Conversation, purpose: Purpose = "history") -> Rendered:
    if conversation.tools and self._for_tools is not None:
      return self._for_tools.render(conversation, purpose)
    tools = self._broken([dict(tool) for tool in conversation.tools]) or None
    messages = [self._message(message) for message in conversation.messages]
    whole = self._text(messages, tools, conversation.thinks, purpose == "prompt")
    self._require_all(conversation, messages, tools, whole, purpose == "prompt")
    spans = self._spans(conversation, messages, tools, whole) if purpose == "training" else []
    out, at, lost = Writer(self.special), 0, 0
    for number, (start, end) in spans:
      out.literal(whole[at:start])
      message = conversation.messages[number]
      lost += bool(message.thinking and message.trained and self._broken(message.thinking.strip()) not in whole[start:end])
      out.speak(number, message.trained)
      out.literal(whole[start:end])
      out.stop()
      at = end
    out.literal(whole[at:])
    pieces = (piece._replace(text=piece.text.replace(BREAK, "")) for piece in out.pieces)
    return Rendered(tuple(pieces), lost)

  def _text(self, messages: list[dict[str, Any]], tools: Any, thinks: bool, prompt: bool) -> str:
    return self._template(
      messages=messages, tools=tools, add_generation_prompt=prompt, enable_thinking=thinks, documents=None, **self._tokens
    )

  def _require_all(
    self, conversation: Conversation, messages: list[dict[str, Any]], tools: Any, whole: str, prompt: bool
  ) -> None:
    """RenderError where the template drops tools or calls of them, which shows in that it gives the same text without."""

    def dropped(fewer: list[dict[str, Any]], tools: Any) -> bool:
      try:
        return self._text(fewer, tools, conversation.thinks, prompt) == whole
      except RenderError:  # it looks at them
        return False

    if tools and dropped(messages, None):
      raise RenderError("the record has tools, which the chat template drops (it gives the same text without them)")
    for number, message in enumerate(messages):
      if "tool_calls" not in message:
        continue
      silent = {key: value for key, value in message.items() if key != "tool_calls"}
      if dropped([*messages[:number], silent, *messages[number + 1 :]], tools):
        where = conversation.messages[number].where or f"message {number + 1}"
        raise RenderError(f"{where} has calls of tools, which the chat template drops (it gives the same text without them)")

  def _broken(self, value: Any) -> Any:
    """JSON in whose texts no spelling is whole."""
    if isinstance(value, str):
      if BREAK in value:
        raise RenderError(f"the text has U+{ord(BREAK):04X}, which is no character")
      return self._spelling.sub(lambda found: found.group()[0] + BREAK + found.group()[1:], value)
    if isinstance(value, Mapping):
      return {self._broken(key): self._broken(item) for key, item in value.items()}
    return [self._broken(item) for item in value] if isinstance(value, list | tuple) else value

  def _message(self, message: Message) -> dict[str, Any]:
    """A message as Hugging Face's templates take it."""
    if any(isinstance(part, Picture) for part in message.parts):
      raise RenderError("images cannot be placed by a checkpoint's own template")
    content = (
      message.content if message.content is None or isinstance(message.content, str) else "".join(map(str, message.parts))
    )
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking:
      made["reasoning_content"] = message.thinking
    if message.tool_calls:
      made["tool_calls"] = [
        {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        | ({"id": call.id} if call.id else {})
        for call in message.tool_calls
      ]
      made["content"] = content or ""
    if message.tool_responses:
      raise RenderError("what tools answer has to be messages of role 'tool'")
    made |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    return self._broken(made)

  def _spans(
    self, conversation: Conversation, messages: list[dict[str, Any]], tools: Any, whole: str
  ) -> list[tuple[int, tuple[int, int]]]:
    """Of each message of the assistant its number, and where it begins and ends in the whole."""
    found, last = [], 0
    for number, message in enumerate(conversation.messages):
      if message.role != "assistant":
        continue
      text = lambda count, prompt: self._text(messages[:count], tools, conversation.thinks, prompt)
      before, prompt = text(number, False) if number else "", text(number, True) if number else ""
      start = self._begin(whole, before, prompt, number)
      end = start + self._length(whole[start:], text(number + 1, False)[len(before) :], number)
      said = self._broken(next((part for part in message.parts if isinstance(part, str)), "")).strip()
      if start < last or said not in whole[start:end]:
        raise self._ambiguous(number, "its text is not where its turn is")
      found.append((number, (start, end)))
      last = end
    return found

  def _begin(self, whole: str, before: str, prompt: str, number: int) -> int:
    """Where the assistant begins to speak: after as much of the prompt for it as the whole has, up to a special token."""
    if not prompt.startswith(before) or not whole.startswith(before):
      raise self._ambiguous(number, "what stands before it depends on what comes after")
    asks = prompt[len(before) :]
    ends = [len(asks), *reversed([match.start() for match in self._spelling.finditer(asks)])]
    for end in ends:
      if end and whole.startswith(asks[:end], len(before)):
        return len(before) + end
    raise self._ambiguous(number, "the prompt for it does not stand before it")

  def _length(self, rest: str, alone: str, number: int) -> int:
    """How much of `rest` the assistant says: through the token with which the message ends when it is the last."""
    ends = list(self._spelling.finditer(alone))
    if not ends or alone[ends[-1].end() :].strip():
      raise self._ambiguous(number, "no special token ends it")
    token = ends[-1].group()
    stop = next((found.end() for found in self._spelling.finditer(rest) if found.group() == token), None)
    if stop is None:
      raise self._ambiguous(number, f"{token} does not end it in the whole")
    return stop

  def _ambiguous(self, number: int, why: str) -> RenderError:
    return RenderError(f"what the assistant says in message {number + 1} cannot be told from the chat template: {why}")
