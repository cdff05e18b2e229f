"""The templates of DeepSeek V3, and of V3.2, which has its own encoding and no published jinja template."""

import json
from typing import Any

from maxtext_like.data.chat.conversation import Conversation, Message, ToolCall
from maxtext_like.data.chat.rendering import OneSample, Purpose, Rendered, RenderError, Writer, refuse_flags, text_of

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
_TOOL_TOKENS = [
  f"<｜tool▁{name}｜>"
  for name in (
    *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"),
    *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"),
  )
]


class DeepSeek3(OneSample):
  """DeepSeek V3: all system texts come first, the answers of tools are framed once, and there are no thoughts."""

  name = "deepseek3"
  needed = (BEGIN, END, USER, ASSISTANT)
  ends = (END,)
  special = frozenset({*needed, *_TOOL_TOKENS, "<think>", "</think>", "<｜▁pad▁｜>"})

  def render(self, conversation: Conversation, purpose: Purpose = "history") -> Rendered:
    if conversation.tools:
      raise RenderError("DeepSeek V3's template does not declare tools; describe them in the system message")
    refuse_flags(conversation, "DeepSeek V3")
    if conversation.thinking or any(message.thinking and message.written is None for message in conversation.messages):
      raise RenderError("DeepSeek V3's template does not support thoughts")
    out = Writer(self.special)
    out.literal(BEGIN)
    out.say("\n\n".join(text_of(m.content, "DeepSeek") for m in conversation.messages if m.role == "system"))
    lost: list[int] = []
    called = answered = False  # the template opens the calls and the answers once in a conversation
    after_tool = False
    # Each message continues from the state of the earlier ones, as the published template does.
    for i, message in enumerate(conversation.messages):
      content = message.written if message.written is not None else text_of(message.content, "DeepSeek")
      if message.role == "user":
        after_tool = False
        out.literal(USER)
        out.say(content)
      elif message.role == "tool":
        after_tool = True
        out.literal(("" if answered else "<｜tool▁outputs▁begin｜>") + "<｜tool▁output▁begin｜>")
        out.say(content)
        out.literal("<｜tool▁output▁end｜>")
        answered = True
      elif message.role == "assistant" and message.tool_calls:
        after_tool = False
        self._calls(out, i, message, content, called)
        called = True
      elif message.role == "assistant":
        out.literal("<｜tool▁outputs▁end｜>" if after_tool else ASSISTANT)
        out.speak(i, message.trained)
        kept = content if after_tool else content.split("</think>")[-1]
        if message.trained and len(kept) < len(content):
          lost.append(i)
        out.say(kept)
        out.literal(END)
        out.stop()
        after_tool = False
      elif message.role != "system":
        raise RenderError(f"DeepSeek V3 has no role '{message.role}'")
    if after_tool:
      out.literal("<｜tool▁outputs▁end｜>")
    elif purpose == "prompt":
      out.literal(ASSISTANT)
    return Rendered(tuple(out.pieces), tuple(lost))

  def _calls(self, out: Writer, number: int, message: Message, content: str, called: bool) -> None:
    if message.tool_responses:
      raise RenderError("DeepSeek takes the answers of tools as messages of role 'tool'")
    if not called:
      out.literal(ASSISTANT)
    out.speak(number, message.trained)
    for i, call in enumerate(message.tool_calls):
      if i == 0 and not called:
        out.say(content)
        out.literal("<｜tool▁calls▁begin｜>")
      else:
        out.literal("\n")
      out.literal("<｜tool▁call▁begin｜>function<｜tool▁sep｜>")
      out.say(call.name)
      out.literal("\n```json\n")
      out.say(call.written if call.written is not None else _json(call.arguments))
      out.literal("\n```<｜tool▁call▁end｜>")
    out.literal("<｜tool▁calls▁end｜>" + END)
    out.stop()


_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use \
JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, \
booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""
"""The text in front of the tools that the model was trained with. Every byte matters."""


class DeepSeek32(OneSample):
  """DeepSeek V3.2: a user message ends with ``<think>`` (thinking, and no user message follows) or ``</think>``; calls are
  DSML."""

  name = "deepseek3.2"
  needed = (BEGIN, END, USER, ASSISTANT)
  ends = (END,)
  special = frozenset({*needed, "<think>", "</think>", "｜DSML｜", "<｜▁pad▁｜>"})

  def render(self, conversation: Conversation, purpose: Purpose = "history") -> Rendered:
    refuse_flags(conversation, "DeepSeek V3.2")
    messages, shift = list(conversation.messages), 0
    if conversation.tools and messages[0].role not in ("system", "developer"):
      messages.insert(0, Message("system", ""))
      shift = -1
    last_user = max((i for i, message in enumerate(messages) if message.role in ("user", "developer")), default=-1)
    thinks = conversation.thinks
    if conversation.thinking is None:
      thinks = any(message.thinking for message in messages[last_user + 1 :])
    lost = [i + shift for i, message in enumerate(messages) if i <= last_user and message.thinking and message.trained]
    if purpose == "prompt" and messages[-1].role not in ("user", "developer", "tool"):
      raise RenderError("DeepSeek V3.2 answers a user or a tool, but the last message is from neither")
    if thinks and any(message.role == "developer" for message in messages[:last_user]):
      raise RenderError("DeepSeek V3.2 with thinking does not support a developer message before the last user message")
    out = Writer(self.special)
    out.literal(BEGIN)
    for i, message in enumerate(messages):
      content = text_of(message.content, "DeepSeek")
      if message.tool_responses:
        raise RenderError("DeepSeek takes the answers of tools as messages of role 'tool'")
      if message.role == "system":
        out.say(content)
        if i == 0 and conversation.tools:
          self._tools(out, conversation)
      elif message.role in ("user", "developer"):
        out.literal(USER)
        if message.role == "developer":
          if i == 0 and conversation.tools:
            self._tools(out, conversation)
          out.literal("\n\n# The user's message is: ")
        out.say(content)
        out.literal(ASSISTANT + ("<think>" if i == last_user and thinks else "</think>"))
      elif message.role == "tool":
        self._result(out, messages, i, content, "<think>" if i >= last_user and thinks else "</think>")
      else:
        self._answer(out, i + shift, message, content, thinks and i > last_user)
    if purpose == "prompt" and messages[-1].role == "tool" and out.pieces[-1].kind != "special":
      raise RenderError("a tool call in the last assistant message has no answer yet")
    return Rendered(tuple(out.pieces), tuple(lost))

  def _tools(self, out: Writer, conversation: Conversation) -> None:
    out.literal("\n\n" + _TOOLS)
    for tool in conversation.tools:
      out.say(_json(tool["function"]))
      out.literal("\n")
    out.literal("</functions>\n")

  def _result(self, out: Writer, messages: list[Message], at: int, content: str, think: str) -> None:
    """Writes the answer of a tool, inside a frame around all answers to one message."""
    asked = next((i for i in range(at - 1, -1, -1) if messages[i].role != "tool"), -1)
    calls = messages[asked].tool_calls if asked >= 0 else ()
    if len(calls) < at - asked:
      raise RenderError(f"message {at + 1} is the answer of a tool, but there are only {len(calls)} calls before it")
    out.literal("\n\n<function_results>" if at - asked == 1 else "")
    out.literal("\n<result>")
    out.say(content)
    out.literal("</result>")
    if at - asked == len(calls):
      out.literal("\n</function_results>\n\n" + think)

  def _answer(self, out: Writer, number: int, message: Message, content: str, thinks: bool) -> None:
    if thinks and not message.thinking and not message.tool_calls:
      raise RenderError("DeepSeek V3.2 with thinking needs a thought or a call in each answer to the last user message")
    out.speak(number, message.trained)
    if thinks:
      out.say(message.thinking or "")
      out.literal("</think>")
    out.say(content)
    if message.tool_calls:
      out.literal("\n\n<｜DSML｜function_calls>\n")
      for i, call in enumerate(message.tool_calls):
        out.literal("\n" if i else "")
        self._call(out, call)
      out.literal("\n</｜DSML｜function_calls>")
    out.literal(END)
    out.stop()

  def _call(self, out: Writer, call: ToolCall) -> None:
    out.literal('<｜DSML｜invoke name="')
    out.say(call.name)
    out.literal('">\n')
    for i, (key, value) in enumerate(call.arguments.items()):
      out.literal(("\n" if i else "") + '<｜DSML｜parameter name="')
      out.say(key)
      out.literal(f'" string="{"true" if isinstance(value, str) else "false"}">')
      out.say(value if isinstance(value, str) else _json(value))
      out.literal("</｜DSML｜parameter>")
    out.literal("\n</｜DSML｜invoke>")


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)
