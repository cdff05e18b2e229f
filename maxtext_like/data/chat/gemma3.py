"""The template of Gemma 3: user and model alternate, and the system text comes before the first user text."""

from maxtext_like.data.chat.conversation import Conversation, Message, Picture
from maxtext_like.data.chat.rendering import OneSample, Purpose, Rendered, RenderError, Writer, refuse_flags


class Gemma3(OneSample):
  """Strips text and writes images as ``<start_of_image>``. Tools, thoughts and roles that do not alternate are refused.

  A thought that the record spells inside an answer is part of the answer's text, as in the published template.
  """

  name = "gemma3"
  needed = ("<start_of_turn>", "<end_of_turn>")
  ends = ("<end_of_turn>",)
  special = frozenset({"<bos>", *needed, "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<eos>", "<pad>"})

  def render(self, conversation: Conversation, purpose: Purpose = "history") -> Rendered:
    if conversation.tools or any(m.tool_calls or m.tool_responses or m.role == "tool" for m in conversation.messages):
      raise RenderError("Gemma 3 does not support tools")
    refuse_flags(conversation, "Gemma 3")
    if conversation.thinking or any(message.thinking and message.written is None for message in conversation.messages):
      raise RenderError("Gemma 3 does not support thoughts")
    first, *rest = conversation.messages
    prefix, shift = "", 0
    if first.role == "system":
      prefix = _system(first) + "\n\n"
      shift = 1
    else:
      rest = [first, *rest]
    out = Writer(self.special)
    out.literal("<bos>")
    for i, message in enumerate(rest):
      if message.role not in ("user", "assistant"):
        raise RenderError(
          f"Gemma 3 has no role '{message.role}'" + (" after the first message" if message.role == "system" else "")
        )
      if (message.role == "user") != (i % 2 == 0):
        raise RenderError(f"Gemma 3 needs user and assistant to alternate, but message {i + 1} is from the {message.role}")
      out.literal(f"<start_of_turn>{'user' if message.role == 'user' else 'model'}\n")
      if i == 0:
        out.say(prefix)
      if message.role == "assistant":
        out.speak(i + shift, message.trained)
      for part in message.spelled_parts:
        if isinstance(part, Picture):
          out.image("<start_of_image>", part.path)
        else:
          out.say(part.strip())
      out.literal("<end_of_turn>")
      out.stop()
      out.literal("\n")
    if purpose == "prompt":
      out.literal("<start_of_turn>model\n")
    return Rendered(tuple(out.pieces))


def _system(message: Message) -> str:
  """Returns the system text. Raises RenderError for an image or a second text, which the template would drop."""
  parts = list(message.parts)
  if not parts:
    return ""
  if len(parts) > 1 or isinstance(parts[0], Picture):
    raise RenderError("Gemma 3 takes a single text as the system message")
  return parts[0]
