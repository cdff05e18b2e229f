"""The renderers by name, and the choice of a model's renderer.

A fine-tuned model may have learned another chat template than the one published for its family. If its checkpoint has such a
template, a warning says so: an exported model includes the file and is then served with a template that it was not trained
with.
"""

import functools
import importlib.util
import logging
from itertools import takewhile
from pathlib import Path

from maxtext_like.data.chat.conversation import Conversation, Message
from maxtext_like.data.chat.deepseek3 import BEGIN, DeepSeek3, DeepSeek32
from maxtext_like.data.chat.gemma3 import Gemma3
from maxtext_like.data.chat.gemma4 import Gemma4
from maxtext_like.data.chat.jinja import Jinja, find_template, read_template, template_beside
from maxtext_like.data.chat.rendering import Purpose, Renderer, RenderError
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

AUTO = "auto"
RENDERERS: dict[str, Renderer] = {
  renderer.name: renderer
  for renderer in (Gemma3(), Gemma4(empty_thought=True), Gemma4(empty_thought=False), DeepSeek3(), DeepSeek32())
}
_ASKED, _ANSWERED = (Message("user", "One?"), Message("user", "Two?")), Message("assistant", "Two.")
_PROBES: tuple[tuple[Conversation, Purpose], ...] = (
  (Conversation((_ASKED[0], _ANSWERED)), "history"),
  (Conversation((_ASKED[0], _ANSWERED, _ASKED[1])), "prompt"),
  (Conversation((Message("system", "Count."), _ASKED[0])), "prompt"),
)
_BEGINNINGS = ("<bos>", BEGIN)
_SHOWN_CHARACTERS = 40  # characters of each text in the message


def choose(name: str, published: str | None, tokenizer: Tokenizer) -> Renderer:
  """Returns the renderer that data.chat_template names.

  Args:
    name: name of a renderer, path of a jinja file, or "auto": the template published for the family, or else the jinja template
      stored with the tokenizer.
    published: name of the family's template; None if it has none.
    tokenizer: tokenizer of the model.

  Raises:
    UserError: there is no such template, or it cannot be used.
  """
  if name == AUTO and published is not None:
    warn_if_other_template(RENDERERS[published], tokenizer)
    name = published
  if name in RENDERERS:
    return RENDERERS[name]
  if name == AUTO:
    found = template_beside(tokenizer)
    if found is None:
      raise UserError(
        "chat_template is auto, but no published chat template of the model's family is known, and none is stored with the "
        f"tokenizer\n  fix: use a tokenizer with its chat_template.jinja, or set chat_template to one of "
        f"{', '.join(RENDERERS)} or the path of a jinja file"
      )
    return found
  path = Path(name).expanduser()
  if not path.is_file():
    raise UserError(
      f"chat_template is '{name}', expected {AUTO}, {', '.join(RENDERERS)} or the path of a jinja file",
      fix=f"write chat_template={AUTO}, or the path of an existing file",
    )
  return Jinja(read_template(path), str(path), tokenizer)


def warn_if_other_template(published: Renderer, tokenizer: Tokenizer) -> None:
  """Warns once if the template stored with the tokenizer, which is not used, differs from the published one, which is used.

  The two are compared on conversations that every template supports. A template that cannot be run, or that exceeds a limit of
  ``worker_process.py``, is reported as not compared. Without jinja2 nothing is compared.
  """
  if importlib.util.find_spec("jinja2") is None or not tokenizer.files:
    return
  try:
    if (found := find_template(tokenizer.files[0].parent)) is None:
      return
    texts = _first_difference(published, Jinja(*found, tokenizer))
  except UserError as error:
    _warn_once(f"chat_template is auto and uses {published.name}; the model's own template cannot be compared with it: {error}")
    return
  if texts is None:
    return
  ours, theirs = texts
  alike = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(ours, theirs, strict=False)))
  begin = max(alike - _SHOWN_CHARACTERS // 2, 0)
  shown = slice(begin, begin + _SHOWN_CHARACTERS)
  _warn_once(
    f"chat_template is auto and uses {published.name}, the published template of the family, but the model's own differs: "
    f"{found[1]} has {theirs[shown]!r} where {published.name} has {ours[shown]!r}. "
    f"chat_template={found[1]} uses the file; chat_template={published.name} keeps the published one without this warning"
  )


def _first_difference(published: Renderer, own: Renderer) -> tuple[str, str] | None:
  """Returns the texts of the first conversation for which two templates differ; None if there is no such conversation."""
  for conversation, purpose in _PROBES:
    try:
      ours, theirs = (_text(renderer, conversation, purpose) for renderer in (published, own))
    except RenderError:  # one of them has no system turn
      continue
    if ours != theirs:
      return ours, theirs
  return None


def _text(renderer: Renderer, conversation: Conversation, purpose: Purpose) -> str:
  """Returns the rendered text without its first token, which not every tokenizer spells."""
  text = renderer.render(conversation, purpose).text
  for begin in _BEGINNINGS:
    text = text.removeprefix(begin)
  return text.strip()


@functools.cache
def _warn_once(what: str) -> None:
  """Logs a warning once, for any number of splits."""
  logger.warning("%s", what)
