"""Checks whether the chat template in a checkpoint equals the one published for its family.

A fine-tuned model may have learned another template. An exported model includes the file and is then served with a template
that it was not trained with.
"""

import functools
import importlib.util
import logging
from itertools import takewhile

from maxtext_like.data.chat.conversation import Conversation, Message
from maxtext_like.data.chat.deepseek3 import BEGIN
from maxtext_like.data.chat.jinja import Jinja, find_template
from maxtext_like.data.chat.rendering import Purpose, Renderer, RenderError
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.errors import UserError

logger = logging.getLogger(__name__)

_ASKED, _ANSWERED = (Message("user", "One?"), Message("user", "Two?")), Message("assistant", "Two.")
_PROBES: tuple[tuple[Conversation, Purpose], ...] = (
  (Conversation((_ASKED[0], _ANSWERED)), "history"),
  (Conversation((_ASKED[0], _ANSWERED, _ASKED[1])), "prompt"),
  (Conversation((Message("system", "Count."), _ASKED[0])), "prompt"),
)
_BEGIN = ("<bos>", BEGIN)
_SHOWN = 40  # characters of each text in the message


def tell_of_another(published: Renderer, tokenizer: Tokenizer) -> None:
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
  same = max(alike - _SHOWN // 2, 0)
  _warn_once(
    f"chat_template is auto and uses {published.name}, the published template of the family, but the model's own differs: "
    f"{found[1]} has {theirs[same : same + _SHOWN]!r} where {published.name} has {ours[same : same + _SHOWN]!r}. "
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
  for begin in _BEGIN:
    text = text.removeprefix(begin)
  return text.strip()


@functools.cache
def _warn_once(what: str) -> None:
  """Logs a warning once, for any number of splits."""
  logger.warning("%s", what)
