#!/usr/bin/env python3
"""Makes tests/golden/chat: generated conversations and their text from the published chat templates.

  python tests/parity/chat_goldens.py ORACLES

ORACLES is a folder with third-party files that are not part of this repository. A copy of each is at the place after the colon:

  gemma3.jinja          of google/gemma-3-*-it: trl/chat_templates/gemma3.jinja in TRL
  gemma4.jinja          of google/gemma-4-31B-it, of 2026-07-09: gemma4_31b_chat_template.jinja2 in ollama's testdata
  gemma4-small.jinja    of google/gemma-4-E2B-it: gemma4_e2b_chat_template.jinja2 there
  deepseek3.jinja       of DeepSeek V3, whose prompt ends with <｜Assistant｜>
  deepseek_v32.py       DeepSeek V3.2's own encoding: mlx_lm/chat_templates/deepseek_v32.py in mlx-lm

Each line of a file: {"record": ..., "prompt": true or false, "text": the template's output, or null if it raises an error}.
"""

import copy
import importlib.util
import json
import lzma
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2.sandbox

OUT = Path(__file__).resolve().parents[1] / "golden" / "chat"
COUNT = 340
WORDS = (
  "alpha beta gamma delta eps zeta 3.5 7 ok naïve 東京 <image> <video> <b>x</b> {curly} 'one' \"two\" a,b: c;\n\n  x\ty "
  "line\nbreak   trailing  {{ braces }} {% raw %} https://x.y/z <eos> | || \\n end."
).split(" ")
Record = dict[str, Any]


class Draw:
  """Draws random conversations for a model family."""

  def __init__(self, family: str, seed: int):
    self.family, self.random = family, random.Random(f"{family} {seed}")

  def text(self, most: int = 7) -> str:
    words = [self.random.choice(WORDS) for _ in range(self.random.randint(1, most))]
    return self.random.choice(["", "", " ", "\n"]) + " ".join(words) + self.random.choice(["", "", " ", "\n\n"])

  def chance(self, share: float) -> bool:
    return self.random.random() < share

  def value(self, depth: int = 0) -> Any:
    kinds = ["text", "text", "int", "float", "bool", "none"] + (["list", "object"] if depth < 2 else [])
    match self.random.choice(kinds):
      case "text":
        return self.text(3)
      case "int":
        return self.random.randint(-9, 99)
      case "float":
        return self.random.choice([0.5, 1.0, -2.25, 1e-7, 1e20])
      case "bool":
        return self.chance(0.5)
      case "list":
        return [self.value(depth + 1) for _ in range(self.random.randint(0, 3))]
      case "object":
        return self.arguments(depth + 1)
    return None

  def arguments(self, depth: int = 0) -> Record:
    names = self.random.sample(["city", "Unit", "zip", "b", "A", "name"], self.random.randint(0, 4))
    return {name: self.value(depth) for name in names}

  def schema(self, depth: int = 0) -> Record:
    kind = self.random.choice(["string", "integer", "boolean", "array", "object"] if depth < 2 else ["string", "number"])
    made: Record = {"type": kind}
    if self.chance(0.7):
      made["description"] = self.text(4)
    if self.chance(0.2):
      made["nullable"] = True
    if kind == "string" and self.chance(0.4):
      made["enum"] = ["celsius", "Fahrenheit"]
    if kind == "array" and self.chance(0.8):
      made["items"] = self.schema(depth + 1)
    if kind == "object" and self.chance(0.8):
      made["properties"] = {name: self.schema(depth + 1) for name in self.random.sample(["p", "Q", "r"], 2)}
      if self.chance(0.5):
        made["required"] = ["p"]
    return made

  def tool(self, name: str) -> Record:
    function: Record = {"name": name, "description": self.text(4)}
    if self.chance(0.9):
      properties = {key: self.schema() for key in self.random.sample(["city", "Unit", "days"], self.random.randint(1, 3))}
      function["parameters"] = {"type": "object", "properties": properties}
      if self.chance(0.6):
        function["parameters"]["required"] = [next(iter(properties))]
    if self.family.startswith("gemma4") and self.chance(0.2):
      function["response"] = {"type": "object", "description": self.text(3)}
    return {"type": "function", "function": function}

  def content(self, role: str) -> Any:
    images = self.family.startswith("gemma") and role == "user"
    if not self.family.startswith("gemma") or self.chance(0.7):
      return self.text()
    parts = [{"type": "text", "text": self.text()} for _ in range(self.random.randint(1, 2))]
    if images:
      parts.insert(self.random.randint(0, len(parts)), {"type": "image", "image": "a.png"})
    return parts

  def record(self) -> Record:
    tools = self.family in ("gemma4", "gemma4-small", "deepseek3", "deepseek3.2") and self.chance(0.5)
    thinks = self.family in ("gemma4", "gemma4-small", "deepseek3.2") and self.chance(0.5)
    made: Record = {"messages": []}
    if self.family in ("gemma4", "gemma4-small", "deepseek3.2"):
      made["enable_thinking"] = thinks
      if tools or self.chance(0.1):
        made["tools"] = [self.tool(name) for name in ("weather", "search")[: self.random.randint(1, 2)]]
    messages = made["messages"]
    if self.chance(0.5):
      developer = self.family.startswith(("gemma4", "deepseek3.2")) and self.chance(0.3)
      messages.append({"role": "developer" if developer else "system", "content": self.text()})
      if self.family.startswith("gemma4") and self.chance(0.2):
        messages[0]["content"] = [{"type": "text", "text": self.text()} for _ in range(self.random.randint(1, 2))]
    for _ in range(self.random.randint(1, 3)):
      messages.append({"role": "user", "content": self.content("user")})
      while tools and self.chance(0.5):
        messages += self.round(thinks)
      answers = 1 if self.family == "gemma3" or not self.chance(0.15) else 2
      messages += [self.answer(thinks) for _ in range(answers)]
    if self.chance(0.3) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
      messages.append({"role": "user", "content": self.content("user")})
    if self.chance(0.4) and any(message.get("tool_calls") for message in messages):
      while messages[-1]["role"] != "tool" and not messages[-1].get("tool_calls"):
        messages.pop()  # the record ends with a tool's answer or a tool call
      if self.chance(0.3) and messages[-1]["role"] == "tool":
        messages.pop()
    if self.chance(0.03):
      messages.insert(1, {"role": "user", "content": self.text()})
    return made

  def answer(self, thinks: bool) -> Record:
    made: Record = {"role": "assistant", "content": self.content("assistant")}
    if thinks and self.chance(0.9):
      made["reasoning_content"] = self.text(5)
    if self.family.startswith("gemma4") and isinstance(made["content"], str) and self.chance(0.1):
      made["content"] = f"<|channel>thought\n{self.text(3)}<channel|>" + made["content"]
    return made

  def round(self, thinks: bool) -> list[Record]:
    """Draws an assistant message with tool calls, and the tools' answers."""
    calls = []
    for i in range(self.random.randint(1, 2)):
      arguments: Any = self.arguments()
      if self.chance(0.5):
        arguments = json.dumps(arguments)
      function = {"name": self.random.choice(["weather", "search"]), "arguments": arguments}
      calls.append({"id": f"c{i}", "type": "function", "function": function})
    asked: Record = {"role": "assistant", "content": self.random.choice([None, "", self.text(3)]), "tool_calls": calls}
    if thinks and self.chance(0.7):
      asked["reasoning_content"] = self.text(4)
    if self.family.startswith("gemma4") and self.chance(0.15):
      asked["tool_responses"] = [{"name": "weather", "response": self.random.choice([self.arguments(), self.text(3)])}]
      return [asked]
    answers: list[Record] = []
    for call in calls:
      content: Any = self.text(4)
      if self.family.startswith("gemma4") and self.chance(0.2):
        content = [{"type": "text", "text": self.text(3)}, {"type": "image", "image": "a.png"}]
      answers.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return [asked, *answers]


def given(record: Record, *, text_arguments: bool) -> list[Record]:
  """Returns the messages in the template's form: tool arguments as an object, or as JSON text."""
  messages = copy.deepcopy(record["messages"])
  for message in messages:
    for call in message.get("tool_calls") or ():
      arguments = call["function"]["arguments"]
      if text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
      if not text_arguments and isinstance(arguments, str):
        arguments = json.loads(arguments)
      call["function"]["arguments"] = arguments
  return messages


def jinja(source: str, family: str) -> Callable[[Record, bool], str | None]:
  """Returns a function that renders a record as Hugging Face's tokenizers do, or returns None if the template refuses it."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  environment.globals["raise_exception"] = refuse
  environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
  template = environment.from_string(source)
  bos = "<bos>" if family.startswith("gemma") else "<｜begin▁of▁sentence｜>"

  def render(record: Record, prompt: bool) -> str | None:
    messages = given(record, text_arguments=family == "deepseek3")
    more = {key: record[key] for key in ("tools", "enable_thinking") if key in record}
    try:
      return template.render(messages=messages, bos_token=bos, add_generation_prompt=prompt, **more)
    except jinja2.TemplateError:
      return None

  return render


def encoding(path: Path) -> Callable[[Record, bool], str | None]:
  """Returns a function that renders a record with DeepSeek V3.2's own code. It ends a user's message with the prompt."""
  spec = importlib.util.spec_from_file_location("oracle", path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)

  def render(record: Record, prompt: bool) -> str | None:
    messages = given(record, text_arguments=True)
    if "tools" in record:
      if messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": ""})
      messages[0]["tools"] = record["tools"]
    try:
      return module.encode_messages(messages, "thinking" if record["enable_thinking"] else "chat")
    except AssertionError:
      return None

  return render


def asks(record: Record, family: str) -> bool:
  """Returns True if the text should end with a prompt for the model's answer.

  For DeepSeek V3.2 the prompt only follows a user's message or the answers of all tools.
  """
  messages = record["messages"]
  if messages[-1]["role"] != "tool" or family != "deepseek3.2":
    return messages[-1]["role"] != "assistant" or (family.startswith("gemma4") and len(messages) % 5 == 0)
  asked = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
  return len(messages) - 1 - asked == len(messages[asked]["tool_calls"])


def main() -> None:
  folder = Path(sys.argv[1])
  OUT.mkdir(exist_ok=True)
  for family in ("gemma3", "gemma4", "gemma4-small", "deepseek3", "deepseek3.2"):
    own = family == "deepseek3.2"
    oracle = encoding(folder / "deepseek_v32.py") if own else jinja((folder / f"{family}.jinja").read_text(), family)
    lines, refused = [], 0
    for seed in range(COUNT):
      draw = Draw(family, seed)
      record = draw.record()
      prompt = asks(record, family)
      text = oracle(record, prompt)
      refused += text is None
      lines.append(json.dumps({"record": record, "prompt": prompt, "text": text}, ensure_ascii=False))
    data = lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    (OUT / f"{family}.jsonl.xz").write_bytes(data)
    print(f"{family}: {COUNT} conversations, {refused} refused, {len(data)} bytes")


if __name__ == "__main__":
  main()
