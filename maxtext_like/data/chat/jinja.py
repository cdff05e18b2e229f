"""Conversations in the model's own template: the jinja file in its checkpoint. ``turns.py`` finds the answers in the rendered
text."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import xxhash

from maxtext_like import strict_json
from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.data.chat.rendering import Purpose, Rendered, RenderError, Writer
from maxtext_like.data.chat.sandbox import compile_template
from maxtext_like.data.chat.turns import Spans, Turns, unmarked
from maxtext_like.data.readers.input_files import open_regular
from maxtext_like.data.tokenization.tokenizer import MORE_TEMPLATES, Tokenizer
from maxtext_like.errors import UserError

MAX_BYTES = 2**20  # largest template; the longest known one has 30 KiB
_FIX = "chat_template=FILE with the template in a separate file"
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates in transformers; the second is for conversations with tools


def find_template(folder: Path) -> tuple[str, str] | None:
  """Returns the template stored with a tokenizer and the name of its file; None if there is none.

  Raises:
    UserError: a file cannot be read or used, or there are several named templates without a default.
  """
  found = _named_templates(folder)
  if found and DEFAULT not in found:
    path = next(iter(found.values()))[1]
    raise UserError(
      f"{path}: the chat templates there are {', '.join(map(strict_json.printable, found))}, but none is named {DEFAULT}\n"
      f"  fix: chat_template=FILE with one of them in a separate file, or rename the intended one to {DEFAULT}"
    )
  return found.get(DEFAULT)


def template_beside(tokenizer: Tokenizer) -> "Jinja | None":
  """Returns the template stored with a tokenizer, with its variant for tools; None if there is none. Raises UserError."""
  folder = tokenizer.files[0].parent if tokenizer.files else None
  if folder is None or (found := find_template(folder)) is None:
    return None
  tools = _named_templates(folder).get(TOOL_USE)
  return Jinja(*found, tokenizer, Jinja(*tools, tokenizer) if tools else None)


def _named_templates(folder: Path) -> dict[str, tuple[str, str]]:
  """Returns the templates stored with a tokenizer by their names in transformers, each with its file."""
  if (path := folder / "chat_template.jinja").is_file():
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return {name: (read_template(path), str(path)) for name, path in ((DEFAULT, path), *((path.stem, path) for path in more))}
  for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
    if path.is_file() and (named := _named_in(path)):
      return named
  return {}


def _named_in(path: Path) -> dict[str, tuple[str, str]]:
  """Returns the templates in a JSON file, which has a single template or a list with names."""
  found = strict_json.parse_file(path, limit=16 * MAX_BYTES).get("chat_template")
  entries = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}]
  pairs = ((entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict))
  return {key: (text, str(path)) for key, text in pairs if isinstance(key, str) and isinstance(text, str)}


def read_template(path: Path) -> str:
  """Returns the text of a template's file, or the default template of a tokenizer_config.json. Raises UserError."""
  if path.suffix == ".json" and (named := _named_in(path)):
    if DEFAULT not in named:
      raise UserError(f"{path}: the chat templates there are {', '.join(named)}, but none is named {DEFAULT}\n  fix: {_FIX}")
    return named[DEFAULT][0]
  try:
    with open_regular(path) as file:
      data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
      raise UserError(f"{path}: more than {MAX_BYTES} bytes, so it is not a chat template\n  fix: {_FIX}")
    return data.decode("utf-8")
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}", fix=_FIX) from None
  except UnicodeDecodeError as error:
    raise UserError(f"{path}: not UTF-8 at byte {error.start}", fix=_FIX) from None


class Jinja:
  """A template with the special tokens of one tokenizer."""

  needed: tuple[str, ...] = ()
  ends: tuple[str, ...] = ()  # generation_config.json has them

  def __init__(self, source: str, name: str, tokenizer: Tokenizer, for_tools: "Jinja | None" = None):
    """Compiles a template.

    Args:
      source: text of the template.
      name: name of its file.
      tokenizer: has the special tokens that the template writes.
      for_tools: renders conversations with tools instead of this template.

    Raises:
      UserError: jinja2 is not installed, or the template cannot be run.
    """
    self.name = f"{Path(name).name}, xxh3 {xxhash.xxh3_128_hexdigest(source.encode('utf-8', 'surrogatepass'))}"
    if for_tools is not None:
      self.name += f", with tools {for_tools.name}"
    self._for_tools = for_tools
    spelled = {id_: text for text, id_ in tokenizer.special.items()}
    self._tokens = {
      f"{kind}_token": spelled.get(id_ if id_ is not None else -1, "")
      for kind, id_ in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id), ("pad", tokenizer.pad_id))
    }
    # Tokens in the template that are not marked as special belong to the template too. Thoughts may be in any answer.
    spelled_there = {*re.findall(r"<[^<>\s]{1,40}>|\[[A-Z_/]{1,40}\]", source), "<think>", "</think>"}
    marked = [text for text in spelled_there if tokenizer.find(text) is not None]
    self.special = frozenset(tokenizer.special) | frozenset(marked)
    if for_tools is not None:
      self.special |= for_tools.special
    if not self.special:
      raise UserError(
        f"{name}: the tokenizer has no special tokens, so a turn could not be distinguished from its text\n"
        "  fix: tokenizer=PATH of the tokenizer that was published with the model"
      )
    self._source = source
    self._template: Callable[..., str] = compile_template(source, name)

  def render(self, conversation: Conversation, purpose: Purpose = "history") -> Rendered:
    if purpose == "training":
      answers = frozenset(i for i, message in enumerate(conversation.messages) if message.role == "assistant")
      first, *more = self.samples(conversation, answers)
      if more:
        raise RenderError("the chat template cannot write every answer in a single text")
      return first
    if conversation.tools and self._for_tools is not None:
      return self._for_tools.render(conversation, purpose)
    turns = self._turns(conversation)
    return self._rendered(conversation, turns, Spans(turns.complete(prompt=purpose == "prompt"), [], []))

  def samples(self, conversation: Conversation, learned: frozenset[int] | None) -> tuple[Rendered, ...]:
    if conversation.tools and self._for_tools is not None:
      return self._for_tools.samples(conversation, learned)
    answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    # With train_on=all every text is learned, so only excluded answers must be found.
    wanted = (i for i in answers if (not conversation.messages[i].trained if learned is None else i in learned))
    if learned is not None:
      wanted = (i for i in wanted if conversation.messages[i].trained)
    turns = self._turns(conversation)
    turns.complete()
    found = turns.samples(wanted, divide=learned is not None)
    return tuple(self._rendered(conversation, turns, spans) for spans in found)

  def _turns(self, conversation: Conversation) -> Turns:
    given = {**self._tokens, "documents": None}
    flags = conversation.template_kwargs
    if reserved := sorted(set(flags) & {*given, "messages", "tools", "add_generation_prompt"}):
      raise RenderError(f"chat_template_kwargs has {reserved[0]}, which the trainer sets itself")
    if unknown := [name for name in flags if not re.search(rf"\b{re.escape(name)}\b", self._source)]:
      raise RenderError(
        f"chat_template_kwargs has {strict_json.printable(unknown[0])}, which the chat template does not read",
        fix="chat_template=FILE with a template that reads it",
      )
    return Turns(conversation, self.special, functools.partial(self._template, **given, **flags))

  def _rendered(self, conversation: Conversation, turns: Turns, spans: Spans) -> Rendered:
    out, at, text = Writer(self.special), 0, spans.text

    def write(end: int) -> None:
      nonlocal at
      for token in turns.own.finditer(text, at, end):
        out.say(unmarked(text[at : token.start()]))
        out.literal(token.group())
        at = token.end()
      out.say(unmarked(text[at:end]))
      at = end

    for number, start, end in spans.answers:
      write(start)
      out.speak(number, conversation.messages[number].trained)
      write(end)
      out.stop()
    write(len(text))
    return Rendered(tuple(out.pieces), tuple(spans.lost))
