"""Finds the assistant's answers in the texts that a jinja template writes for one conversation.

A template returns only text. Answers are found by rendering the beginnings of the conversation: an answer begins at the end of
the prompt for it, and ends with the special token that ends it when it is the last message.

Special tokens that the record spells are marked before rendering, so that all others in the rendered text come from the
template. A mark is a character next to the spelling, not inside it, because a template may search for the spelling, as Qwen3's
does for </think>.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from maxtext_like.data.chat.conversation import Conversation, Message, Picture
from maxtext_like.data.chat.rendering import RenderError

AFTER, BEFORE = "\ufdd0", "\ufdd1"  # noncharacters: a spelling followed by AFTER, or preceded by BEFORE, is the record's
_MARKS = str.maketrans("", "", AFTER + BEFORE)
_DROPPED = "which the chat template drops (the text is the same without them)"
_WITH_TOOLS = "chat_template=FILE with a template that writes tools and their calls"
_THOUGHT = re.compile(r"(\s*<think>)?(.*?)(</think>)", re.DOTALL)


def unmarked(text: str) -> str:
  """Returns a text without marks."""
  return text.translate(_MARKS)


class Spans(NamedTuple):
  """A rendered text with the positions of answers in it.

  Attributes:
    text: the text, with marks.
    answers: index, start and end in ``text`` of each answer.
    lost: indices of the answers whose thought is not in ``text``.
  """

  text: str
  answers: list[tuple[int, int, int]]
  lost: list[int]


class Turns:
  """The texts that a template writes for a conversation and its beginnings.

  Args:
    conversation: conversation of a record.
    special: special tokens that the template may write.
    render: the template, a function of its variables.
  """

  def __init__(self, conversation: Conversation, special: Iterable[str], render: Callable[..., str]):
    self._conversation, self._render = conversation, render
    tokens = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    self._spelling = re.compile(tokens)
    self.own = re.compile(f"(?<!{BEFORE})(?:{tokens})(?!{AFTER})")
    self._messages = [self._message(message, mark=True) for message in conversation.messages]
    self._tools = self._marked([dict(tool) for tool in conversation.tools]) or None
    self._texts: dict[tuple[int, bool, bool], str] = {}

  def complete(self, *, prompt: bool = False) -> str:
    """Returns the text of the complete conversation, with marks.

    Raises:
      RenderError: the template refuses the conversation, drops tools or calls, or writes a different text because of the marks.
    """
    count = len(self._messages)
    text = self._text(count, prompt, self._conversation.thinks)
    self._require_calls(text, prompt)
    spelled = [self._message(message, mark=False) for message in self._conversation.messages]
    if AFTER in text or BEFORE in text:
      tools = [dict(tool) for tool in self._conversation.tools] or None
      if self._given(spelled, tools, prompt, self._conversation.thinks) != unmarked(text):
        raise RenderError(
          "the messages spell special tokens, and the chat template changes the text around them, so the template's tokens "
          "cannot be distinguished from the text of the record"
        )
    return text

  def samples(self, answers: Iterable[int], *, divide: bool) -> list[Spans]:
    """Returns texts in which the answers are marked: the complete conversation, or several texts if it does not have all
    answers.

    A template may write an answer differently once another message follows. If an answer then cannot be found in the complete
    conversation, each answer is taken from a text that ends before such a message. The fewest texts are used that have every
    answer with its thought.

    Args:
      answers: indices of messages of the assistant.
      divide: allow several texts; if False, an answer that is not found is an error.

    Raises:
      RenderError: an answer cannot be found, or the template does not write all of it.
    """
    left, count = sorted(answers), len(self._messages)
    # Usually the complete conversation has every answer.
    try:
      found = [self._find(number, count) for number in left]
      return [self._spans(count, found)]
    except _NotFoundError:
      if not divide:
        raise
    # Otherwise take texts that end earlier and earlier, until each answer was found in one of them.
    samples, end = [], count
    while left:
      found = []
      for number in left:
        try:
          answer = self._find(number, end)
        except _NotFoundError:
          if end == number + 1:
            raise
          continue
        if not answer.lost or end == number + 1:
          found.append(answer)
      if found:
        samples.append(self._spans(end, found))
      left = [number for number in left if number not in {answer.number for answer in found}]
      end = left[-1] + 1 if left else 0
    return samples[::-1]

  def _spans(self, count: int, found: list["_Answer"]) -> Spans:
    text = self._text(count, False, self._thinks(count))
    return Spans(text, [(a.number, a.start, a.end) for a in found], [a.number for a in found if a.lost])

  def _find(self, number: int, count: int) -> "_Answer":
    """Returns an answer in the text of the first ``count`` messages."""
    thinks = self._thinks(count)
    complete = self._text(count, False, thinks)
    before, prompt = (self._text(number, asks, thinks) if number else "" for asks in (False, True))
    alone = self._text(number + 1, False, thinks)
    start = self._begin(complete, before, prompt, number)
    first = min(start, self._begin(alone, before, prompt, number))  # the two texts are equal up to here
    end = first + self._length(complete[first:], alone[first:], number)
    return _Answer(number, start, end, self._loses_thought(number, unmarked(complete[start:end])))

  def _begin(self, complete: str, before: str, prompt: str, number: int) -> int:
    """Returns where the assistant begins to speak: the longest common part of prompt and text that ends at a special token."""
    if not prompt.startswith(before) and complete.startswith(prompt):
      return len(prompt)  # a text that does not ask for an answer has another ending, such as <|endoftext|>
    if not prompt.startswith(before) or not complete.startswith(before):
      raise _NotFoundError(number, "the text before the answer depends on later messages")
    asks = prompt[len(before) :]
    ends = [len(asks), *reversed([match.start() for match in self.own.finditer(asks)])]
    for end in ends:
      if end and complete.startswith(asks[:end], len(before)):
        return len(before) + end
    raise _NotFoundError(number, "the prompt for the answer does not match the text before the answer")

  def _length(self, rest: str, alone: str, number: int) -> int:
    """Returns the length of the answer in ``rest``: through the token that ends the message when it is the last one.

    That token may end the conversation rather than the message, so that its next occurrence in ``rest`` is after later
    messages. The text up to it must therefore equal that of the last message, except for one part that may be missing (a
    thought).
    """
    ends = list(self.own.finditer(alone))
    if not ends or unmarked(alone[ends[-1].end() :]).strip():
      raise _NotFoundError(number, "no special token ends the answer")
    token = ends[-1].group()
    stop = next((found.end() for found in self.own.finditer(rest) if found.group() == token), None)
    if stop is None:
      raise _NotFoundError(number, f"{token} does not end the answer in the complete conversation")
    if not _has_all_except_one_part(rest[:stop], alone[: ends[-1].end()]):
      raise _NotFoundError(number, f"the text up to the next {token} differs once other messages follow")
    return stop

  def _loses_thought(self, number: int, said: str) -> bool:
    """Returns True if the thought of an answer is missing from its text. Raises RenderError if another part is missing."""
    message = self._conversation.messages[number]
    thought, content = message.thinking or "", "".join(part for part in message.spelled_parts if isinstance(part, str))
    if content.strip() in said:
      content = ""
    elif spelled := _THOUGHT.match(content):
      thought, content = spelled[2], content[spelled.end() :]
    if content.strip() not in said:
      raise _NotFoundError(number, "its turn does not have the complete text, so the template drops or changes a part of it")
    return bool(thought.strip()) and thought.strip() not in said

  def _thinks(self, count: int) -> bool:
    if count == len(self._messages):
      return self._conversation.thinks
    return Conversation(self._conversation.messages[:count], thinking=self._conversation.thinking).thinks

  def _text(self, count: int, prompt: bool, thinks: bool) -> str:
    """Returns the text of the first messages, with marks."""
    key = (count, prompt, thinks)
    if key not in self._texts:
      self._texts[key] = self._given(self._messages[:count], self._tools, prompt, thinks)
    return self._texts[key]

  def _given(self, messages: list[dict[str, Any]], tools: Any, prompt: bool, thinks: bool) -> str:
    return self._render(messages=messages, tools=tools, add_generation_prompt=prompt, enable_thinking=thinks)

  def _require_calls(self, complete: str, prompt: bool) -> None:
    """Raises RenderError if the template drops tools or calls, that is, writes the same text without them."""
    thinks = self._conversation.thinks

    def dropped(fewer: list[dict[str, Any]], tools: Any) -> bool:
      try:
        return self._given(fewer, tools, prompt, thinks) == complete
      except RenderError:  # the template reads them
        return False

    if self._tools and dropped(self._messages, None):
      raise RenderError(f"the record has tools, {_DROPPED}", _WITH_TOOLS)
    for number, message in enumerate(self._messages):
      if "tool_calls" not in message:
        continue
      silent = {key: value for key, value in message.items() if key != "tool_calls"}
      if dropped([*self._messages[:number], silent, *self._messages[number + 1 :]], self._tools):
        where = self._conversation.messages[number].where or f"message {number + 1}"
        raise RenderError(f"{where} has calls of tools, {_DROPPED}", _WITH_TOOLS)

  def _message(self, message: Message, *, mark: bool) -> dict[str, Any]:
    """Returns a message in the form that Hugging Face's templates read."""
    if any(isinstance(part, Picture) for part in message.parts):
      raise RenderError("a checkpoint's own template cannot place images")
    if message.tool_responses:
      raise RenderError("answers of tools must be messages of role 'tool'")
    marked = self._marked if mark else lambda value: value
    content = None if message.content is None else "".join(map(str, message.spelled_parts))
    made: dict[str, Any] = {"role": message.role}
    if message.thinking and message.written is None:
      # Templates read a thought from one of these fields.
      made |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.thinking)
    if message.tool_calls:
      made["tool_calls"] = [
        {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        | ({"id": call.id} if call.id else {})
        for call in message.tool_calls
      ]
      content = content or ""
    made |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    made = marked(made)
    if content is None or message.role != "assistant" or (spelled := _THOUGHT.match(content)) is None:
      return made | {"content": marked(content)}
    # The delimiters of a thought are the model's tokens, in whatever field the thought is.
    begin, thought, end = spelled.groups(default="")
    return made | {"content": begin + marked(thought) + end + marked(content[spelled.end() :])}

  def _marked(self, value: Any) -> Any:
    """Returns a JSON value with a mark at every spelling of a special token in its texts."""
    if isinstance(value, str):
      if AFTER in value or BEFORE in value:
        raise RenderError(f"the text has U+{ord(AFTER):04X} or U+{ord(BEFORE):04X}, which are noncharacters")
      return self._spelling.sub(_marked_spelling, value)
    if isinstance(value, Mapping):
      return {self._marked(key): self._marked(item) for key, item in value.items()}
    return [self._marked(item) for item in value] if isinstance(value, list | tuple) else value


class _Answer(NamedTuple):
  number: int
  start: int
  end: int
  lost: bool


class _NotFoundError(RenderError):
  """An answer that cannot be distinguished from the rest of the text."""

  def __init__(self, number: int, why: str):
    super().__init__(
      f"the answer of the assistant in message {number + 1} cannot be found in the text of the chat template: {why}",
      "chat_template=FILE with a template that writes every answer completely, and the same text before it whatever follows",
    )


def _has_all_except_one_part(text: str, full: str) -> bool:
  """Returns True if ``text`` is ``full``, or ``full`` without one part of it. White space does not count."""
  text, full = ("".join(each.split()) for each in (text, full))
  pairs = enumerate(zip(text, full, strict=False))
  start = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(text), len(full)))
  return full.endswith(text[start:]) and len(text) <= len(full)


def _marked_spelling(found: re.Match[str]) -> str:
  """Returns a spelling with its mark: before it at the end of a text, otherwise after it, so that both ends of the text stay
  the same."""
  at_end = found.start() > 0 and not found.string[found.end() :].strip()
  return BEFORE + found.group() if at_end else found.group() + AFTER
