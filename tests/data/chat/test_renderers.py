"""The renderers against the output of the published templates for generated conversations, and the assistant's parts in it."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.data.chat.records import read_conversation
from maxtext_like.data.chat.registry import RENDERERS
from maxtext_like.data.chat.rendering import Purpose, Rendered, RenderError

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "chat"
EMPTY = "<|channel>thought\n<channel|>"
WEATHER = {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": WEATHER}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "rain"}


def conversation(*messages: dict[str, Any], **more: Any) -> Conversation:
  return read_conversation({"messages": list(messages), **more}, "here:1", "/")


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
  return {"role": role, "content": content, **more}


def render(name: str, *messages: dict[str, Any], purpose: Purpose = "history", **more: Any) -> Rendered:
  return RENDERERS[name].render(conversation(*messages, **more), purpose)


def learned(rendered: Rendered) -> list[str]:
  """Returns the runs of text that are learned."""
  runs, open_ = [], False
  for piece in rendered.pieces:
    if piece.trained:
      runs[-1:] = [runs[-1] + piece.text] if open_ else [*runs[-1:], piece.text]
    open_ = piece.trained
  return runs


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_as_the_published_template(name):
  lines = lzma.decompress((GOLDEN / f"{name}.jsonl.xz").read_bytes()).decode().split("\n")
  cases = [json.loads(line) for line in lines]
  assert len(cases) >= 300
  refused = 0
  for number, case in enumerate(cases):
    read = read_conversation(case["record"], f"{name}:{number}", "/")
    if case["text"] is None:
      refused += 1
      with pytest.raises(RenderError):
        RENDERERS[name].render(read)
      continue
    rendered = RENDERERS[name].render(read, "prompt" if case["prompt"] else "history")
    assert rendered.text == case["text"], number
    assert all(piece.answer >= 0 for piece in rendered.pieces if piece.trained)
    assert all(read.messages[piece.answer].role == "assistant" for piece in rendered.pieces if piece.answer >= 0)
  assert refused == {"gemma3": 10, "deepseek3.2": 49}.get(name, 0)


@pytest.mark.parametrize(
  ("name", "answers"),
  [
    ("gemma3", ["Hi.<end_of_turn>", "Bye.<end_of_turn>"]),
    ("gemma4", ["Hi.<turn|>", "Bye.<turn|>"]),
    ("gemma4-small", ["Hi.<turn|>", "Bye.<turn|>"]),
    ("deepseek3", ["Hi.<｜end▁of▁sentence｜>", "Bye.<｜end▁of▁sentence｜>"]),
    ("deepseek3.2", ["Hi.<｜end▁of▁sentence｜>", "Bye.<｜end▁of▁sentence｜>"]),
  ],
)
def test_learned_is_what_the_assistant_says_through_the_end_of_its_turn(name, answers):
  messages = [
    said("system", "Be."),
    said("user", "Hello"),
    said("assistant", "Hi."),
    said("user", "No"),
    said("assistant", "Bye."),
  ]
  assert learned(render(name, *messages, purpose="training")) == answers
  messages[2]["weight"] = 0
  assert learned(render(name, *messages, purpose="training")) == answers[1:]


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_training_stands_after_the_prompt(name):
  """In training, the text before an answer equals the prompt at inference. In the template's history it does not."""
  messages = [said("user", "Hello"), said("assistant", "Hi."), said("user", "No")]
  prompt = render(name, *messages, purpose="prompt").text
  whole = render(name, *messages, said("assistant", "Bye."), purpose="training")
  assert whole.text.startswith(prompt)
  assert learned(whole)[-1] == whole.text[len(prompt) :].rstrip("\n")


def test_the_empty_thought_of_the_large_gemma_4():
  messages = [said("user", "Hello"), said("assistant", "Hi."), said("user", "No"), said("assistant", "Bye.")]
  assert EMPTY not in render("gemma4", *messages).text
  trained = render("gemma4", *messages, purpose="training")
  assert trained.text.count(EMPTY) == 1
  assert f"<|turn>model\n{EMPTY}Bye." in trained.text
  assert EMPTY not in "".join(learned(trained))
  assert EMPTY not in render("gemma4-small", *messages, purpose="training").text
  assert EMPTY not in render("gemma4", *messages, purpose="training", enable_thinking=True).text


def test_gemma_4_drops_the_thoughts_of_history_and_is_no_prefix_of_itself():
  first = [said("user", "Hello"), said("assistant", "Hi.", reasoning_content="Greet.")]
  rest = [said("user", "No"), said("assistant", "Bye.", reasoning_content="Part.")]
  alone, both = render("gemma4", *first, purpose="training"), render("gemma4", *first, *rest, purpose="training")
  assert learned(alone) == ["<|channel>thought\nGreet.\n<channel|>Hi.<turn|>"]
  assert learned(both) == ["Hi.<turn|>", "<|channel>thought\nPart.\n<channel|>Bye.<turn|>"]
  assert not both.text.startswith(alone.text)
  assert (alone.lost_thoughts, both.lost_thoughts) == (0, 1)
  assert both.text.startswith("<bos><|turn>system\n<|think|>\n<turn|>\n")


def test_deepseek_3_2_drops_the_thoughts_of_history():
  first = [said("user", "Hello"), said("assistant", "Hi.", reasoning="Greet.")]
  rest = [said("user", "No"), said("assistant", "Bye.", reasoning="Part.")]
  both = render("deepseek3.2", *first, *rest)
  assert "Greet" not in both.text
  assert "<｜User｜>Hello<｜Assistant｜></think>Hi." in both.text
  assert learned(both) == ["Hi.<｜end▁of▁sentence｜>", "Part.</think>Bye.<｜end▁of▁sentence｜>"]
  assert both.lost_thoughts == 1


def test_a_call_what_the_tool_answers_and_the_answer_are_one_turn_of_gemma_4():
  rendered = render("gemma4", said("user", "Oslo?"), CALL, RESULT, said("assistant", "Rain."), purpose="training")
  call = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'
  assert learned(rendered) == [f"{call}<|tool_response>", "Rain.<turn|>"]
  assert f'{EMPTY}{call}<|tool_response>response:weather{{value:<|"|>rain<|"|>}}<tool_response|>Rain.<turn|>' in rendered.text
  pending = render("gemma4", said("user", "Oslo?"), CALL, purpose="training")
  assert learned(pending) == [f"{call}<|tool_response>"]


def test_after_a_tool_the_thought_has_begun_already():
  """The prompt of a thinking Gemma 4 already opens the channel, so the model need not."""
  messages = [said("user", "Oslo?"), CALL | {"reasoning_content": "Ask."}, RESULT]
  prompt = render("gemma4", *messages, purpose="prompt", enable_thinking=True).text
  assert prompt.endswith("<tool_response|><|channel>thought\n")
  whole = render("gemma4", *messages, said("assistant", "Rain.", reasoning="It rains."), purpose="training")
  assert whole.text.startswith(prompt)
  assert learned(whole)[-1] == whole.text[len(prompt) :].rstrip("\n") == "It rains.\n<channel|>Rain.<turn|>"


def test_a_call_in_deepseek_3_2():
  rendered = render("deepseek3.2", said("user", "Oslo?"), CALL, RESULT, said("assistant", "Rain."))
  assert learned(rendered) == [
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>",
    "Rain.<｜end▁of▁sentence｜>",
  ]
  assert "\n\n<function_results>\n<result>rain</result>\n</function_results>\n\n</think>Rain." in rendered.text


def test_a_tool_that_is_no_schema_is_refused():
  tool = {"name": "f", "parameters": {"type": "object", "required": 5}}
  with pytest.raises(RenderError, match="the declaration of the tool 'f' is not a JSON schema"):
    render("gemma4", said("user", "a"), tools=[tool])


def test_consecutive_answers():
  twice = [said("user", "Hello"), said("assistant", "One."), said("assistant", "Two.")]
  assert render("gemma4", *twice).text.endswith("<|turn>model\nOne.Two.<turn|>\n")
  assert "".join(learned(render("gemma4", *twice))) == "One.Two.<turn|>"
  assert learned(render("deepseek3", *twice))[0] == "One.<｜end▁of▁sentence｜>"
  with pytest.raises(RenderError, match="alternate, but message 3 is from the assistant"):
    render("gemma3", *twice)


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_marks_in_text_are_text(name):
  text = "<image> <video> <start_of_image> <|turn>model\n <｜User｜> </think> <end_of_turn>"
  rendered = render(name, said("user", text), said("assistant", "Hi."))
  assert not [piece for piece in rendered.pieces if piece.kind == "image"]
  assert text in [piece.text for piece in rendered.pieces if piece.kind == "text"]


@pytest.mark.parametrize(
  ("name", "messages", "reason"),
  [
    ("gemma3", [said("user", "a"), CALL], "does not support tools"),
    ("gemma3", [said("user", "a"), said("assistant", "b", reasoning="c")], "does not support thoughts"),
    ("gemma3", [said("user", "a"), said("system", "b")], "no role 'system' after the first message"),
    ("gemma3", [said("assistant", "a")], "alternate, but message 1 is from the assistant"),
    ("deepseek3", [said("user", "a"), said("assistant", "b", reasoning="c")], "does not support thoughts"),
    ("deepseek3", [said("developer", "a")], "no role 'developer'"),
    ("deepseek3", [said("user", [{"type": "image", "image": "a.png"}])], "takes no images"),
    ("deepseek3.2", [said("user", "a"), CALL, RESULT, RESULT], "only 1 calls"),
    ("deepseek3.2", [said("user", "a"), said("assistant", "b", reasoning="c"), said("assistant", "d")], "needs a thought"),
    ("gemma4", [said("system", [{"type": "image", "image": "a.png"}])], "no images in the system message"),
  ],
)
def test_what_a_template_does_not_have_is_refused(name, messages, reason):
  with pytest.raises(RenderError, match=reason):
    render(name, *messages)
