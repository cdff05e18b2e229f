"""The renderers by name, and which of them a model takes."""

from maxtext_like.data.chat.deepseek3 import DeepSeek3, DeepSeek32
from maxtext_like.data.chat.gemma3 import Gemma3
from maxtext_like.data.chat.gemma4 import Gemma4
from maxtext_like.data.chat.rendering import Renderer

RENDERERS: dict[str, Renderer] = {
  renderer.name: renderer
  for renderer in (Gemma3(), Gemma4(empty_thought=True), Gemma4(empty_thought=False), DeepSeek3(), DeepSeek32())
}
