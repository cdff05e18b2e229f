"""The renderers by name, and the choice of a model's renderer."""

from pathlib import Path

from maxtext_like.data.chat.deepseek3 import DeepSeek3, DeepSeek32
from maxtext_like.data.chat.gemma3 import Gemma3
from maxtext_like.data.chat.gemma4 import Gemma4
from maxtext_like.data.chat.jinja import Jinja, read_template, template_beside
from maxtext_like.data.chat.own_template import tell_of_another
from maxtext_like.data.chat.rendering import Renderer
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.errors import UserError

AUTO = "auto"
RENDERERS: dict[str, Renderer] = {
  renderer.name: renderer
  for renderer in (Gemma3(), Gemma4(empty_thought=True), Gemma4(empty_thought=False), DeepSeek3(), DeepSeek32())
}


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
    tell_of_another(RENDERERS[published], tokenizer)
    name = published
  if name in RENDERERS:
    return RENDERERS[name]
  if name == AUTO:
    found = template_beside(tokenizer)
    if found is None:
      raise UserError(
        "chat_template is auto, but no published chat template of the model's family is known, and none is stored with the "
        f"tokenizer\n  fix: a tokenizer with its chat_template.jinja, or chat_template= one of {', '.join(RENDERERS)} or the "
        f"path of a jinja file"
      )
    return found
  path = Path(name).expanduser()
  if not path.is_file():
    raise UserError(f"chat_template is '{name}', expected {AUTO}, {', '.join(RENDERERS)} or the path of a jinja file")
  return Jinja(read_template(path), str(path), tokenizer)
