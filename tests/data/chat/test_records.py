"""Every form of record becomes a conversation, and an error names its place."""

from typing import Any

import pytest

from maxtext_like.data.chat.conversation import Conversation, Message, Picture, ToolCall
from maxtext_like.data.chat.records import read_conversation
from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.image_text.image_names import ImageFields

ASK, ANSWER = Message("user", "Hi"), Message("assistant", "Hello")
BOTH = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHOWN = [{"role": "user", "content": "<image>?"}]
CALL = ToolCall("f", {"x": [1, None]})


def read(record: object) -> Conversation:
  return read_conversation(record, "data.jsonl:7", "/data")


def call(arguments: Any) -> dict[str, Any]:
  return {"messages": [BOTH[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]}


@pytest.mark.parametrize(
  ("record", "expected"),
  [
    ({"messages": BOTH}, (ASK, ANSWER)),
    ({"messages": BOTH, "prompt": None, "instruction": None}, (ASK, ANSWER)),
    ({"messages": [{"role": "model", "content": "Hello", "weight": 0}]}, (Message("assistant", "Hello", trained=False),)),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, (ASK, ANSWER)),
    ({"conversations": BOTH, "system": "S"}, (Message("system", "S"), ASK, ANSWER)),
    ({"instruction": "Hi", "input": "", "output": "Hello"}, (ASK, ANSWER)),
    ({"instruction": "A", "input": "B", "output": "Hello", "history": [["Hi", "Hello"]]},
     (ASK, ANSWER, Message("user", "A\nB"), ANSWER)),
    ({"instruction": "Hi", "context": "", "response": "Hello"}, (ASK, ANSWER)),
    ({"instruction": "A", "context": "B", "response": "Hello"}, (Message("user", "A\nB"), ANSWER)),
    ({"prompt": "Hi", "completion": "Hello"}, (ASK, ANSWER)),
    ({"prompt": BOTH[:1], "completion": BOTH[1:]}, (ASK, ANSWER)),
    ({"prompt": "Hi", "completion": "<think>\nHm.\n</think>\n\nHello"}, (ASK, Message("assistant", "Hello", "Hm."))),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                        {"from": "observation", "value": "1"}]},
     (ASK, Message("assistant", None, tool_calls=(ToolCall("f", {}),)), Message("tool", "1"))),
    ({"conversations": [{"from": "tool_call", "value": '[{"name": "f", "arguments": {}}]'},
                        {"from": "tool_response", "value": "1"}]},
     (Message("assistant", None, tool_calls=(ToolCall("f", {}),)), Message("tool", "1"))),
    ({"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                   {"role": "function", "name": "f", "content": "1"}]},
     (Message("assistant", None, tool_calls=(ToolCall("f", {}, "{}"),)), Message("tool", "1", name="f"))),
  ],
)  # fmt: skip
def test_forms(record, expected):
  assert read(record).messages == expected


@pytest.mark.parametrize("value", [False, 0, 0.0])
@pytest.mark.parametrize("name", ["weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight"])
def test_answers_that_other_trainers_leave_out(name, value):
  record = {"messages": [*BOTH, BOTH[0], BOTH[1] | {name: value}]}
  assert [message.trained for message in read(record).messages] == [True, True, True, False]
  turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", name: value}]
  assert [message.trained for message in read({"conversations": turns}).messages] == [True, False]
  assert read({"messages": [BOTH[0], BOTH[1] | {name: 1}]}).messages[1].trained
  assert read({"messages": BOTH, name: value}).excluded
  assert not read({"messages": BOTH, name: True}).excluded


@pytest.mark.parametrize("form", [{"prompt": "Hi", "completion": "Hello"}, {"messages": BOTH}])
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_a_label_of_kto(form, name):
  assert read(form | {name: False}).excluded
  assert not read(form | {name: True}).excluded
  assert not read(form | {name: "sports"}).excluded  # the class of a text
  assert read(form | {name: "sports"}).unread == (name,)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
  "name", ["do_train", "include", "ignoreLoss", "has_loss", "isMasked", "train_on_turn", "Train", "rejected", "label"]
)
def test_a_mark_under_an_unknown_name_is_refused(name, value):
  with pytest.raises(BadRecordError, match=rf"messages\[1\].{name} is {str(value).lower()}: the name looks like a mark"):
    read({"messages": [BOTH[0], BOTH[1] | {name: value}]})
  turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", name: value}]
  with pytest.raises(BadRecordError, match="like a mark for training"):
    read({"conversations": turns})


@pytest.mark.parametrize(
  "name", ["Label", "binaryLabel", "is_desirable", "chosen", "rejected", "accepted", "preferred", "thumbs_up", "is_correct"]
)
def test_a_label_under_an_unknown_name_is_refused(name):
  with pytest.raises(BadRecordError, match=f"{name} is false: the name looks like a mark"):
    read({"messages": BOTH, name: False})
  assert read({"messages": BOTH, name: "text"}).unread == (name,)
  assert read({"messages": BOTH, "is_english": False, "pretrained": False}).unread == ("is_english", "pretrained")


@pytest.mark.parametrize("name", ["weights", "loss_weights", "loss-mask", "lossMask", "Weight"])
def test_a_known_mark_in_another_spelling_is_refused(name):
  for record in ({"messages": [BOTH[0], BOTH[1] | {name: 0}]}, {"messages": BOTH, name: 0}):
    with pytest.raises(BadRecordError, match=f"{name} is 0: the name looks like a mark"):
      read(record)
  assert read({"messages": BOTH, name: [0.5]}).unread == (name,)
  assert read({"messages": BOTH, "is_correct": True}).unread == ("is_correct",)


@pytest.mark.parametrize("name", ["loss_multiplier", "lossFactor", "sample_weight", "message_weight"])
def test_a_factor_of_the_loss_is_refused_unless_it_is_1(name):
  for value in (0, 0.5, 2):
    for record in ({"messages": [BOTH[0], BOTH[1] | {name: value}]}, {"messages": BOTH, name: value}):
      with pytest.raises(BadRecordError, match=f"{name} is {value}: the name looks like a factor of the loss"):
        read(record)
  assert read({"messages": BOTH, name: 1}).unread == (name,)


def test_a_numeric_label_that_may_mean_good_or_bad_is_refused():
  for value in (-1, 0, 1):
    with pytest.raises(BadRecordError, match=f"label is {value}: expected true for a good answer"):
      read({"messages": BOTH, "label": value})
  assert read({"messages": BOTH, "label": 3}).unread == ("label",)  # the class of a text


def test_pairs_of_preferences_are_answered_with_what_to_train_on():
  with pytest.raises(BadRecordError, match="no conversation") as error:
    read({"prompt": "Hi", "chosen": "Hello", "rejected": "No"})
  assert (
    error.value.fix == "dataset_path=FILES with records that have the chosen answers as messages, or as prompt and completion"
  )


def test_fields_that_nothing_reads():
  message = BOTH[1] | {"score": 1, "empty": [], "name": "x"}
  record = {"messages": [BOTH[0] | {"train": True}, message], "id": 7, "prompt": "Hi", "none": None, "tools": [], "images": []}
  assert read(record).unread == ("id", "prompt", "messages[].train of role user", "messages[].score")
  assert read({"conversations": [{"from": "human", "value": "a", "id": 1}, {"from": "gpt", "value": "b"}]}).unread == (
    "conversations[].id",
  )
  assert read({"instruction": "a", "output": "b", "text": "a b"}).unread == ("text",)


def test_the_prompt_of_a_prompt_and_completion_has_no_answer():
  found = read({"prompt": [*BOTH, BOTH[0]], "completion": BOTH[1:]}).messages
  assert [message.in_prompt for message in found] == [True, True, True, False]


def test_variables_of_the_template():
  kwargs = {"enable_thinking": True, "preserve_thinking": True}
  found = read({"messages": BOTH, "chat_template_kwargs": kwargs})
  assert (found.thinks, found.template_kwargs) == (True, {"preserve_thinking": True})


def test_arguments_as_text_and_as_object():
  assert read(call({"x": [1, None]})).messages[1].tool_calls == (CALL,)
  assert read(call('{"x": [1, null]}')).messages[1].tool_calls[0].arguments == CALL.arguments
  assert read(call('{"x": [1, null]}')).messages[1].tool_calls[0].written == '{"x": [1, null]}'
  assert read(call(None)).messages[1].tool_calls[0].arguments == {}


def test_tools_and_thinking():
  found = read({"messages": BOTH, "tools": '[{"name": "f"}]', "chat_template_kwargs": '{"enable_thinking": true}'})
  assert found.tools == ({"type": "function", "function": {"name": "f"}},)
  assert found.thinks
  assert not read({"messages": BOTH}).thinks
  assert read({"messages": [BOTH[0], BOTH[1] | {"reasoning_content": "Hm."}]}).thinks
  assert not read({"messages": [BOTH[0], BOTH[1] | {"reasoning_content": "Hm."}, *BOTH]}).thinks


def test_images():
  listed = read({"messages": [{"role": "user", "content": "<image>What? <image>"}, BOTH[1]], "images": ["a.png", "/b.png"]})
  assert listed.messages[0].content == (Picture("/data/a.png"), "What? ", Picture("/b.png"))
  assert listed.images == ("/data/a.png", "/b.png")
  for part in ({"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {"url": "a.png"}}):
    parts = [{"type": "text", "text": "<image>?"}, part]
    assert read({"messages": [{"role": "user", "content": parts}]}).messages[0].content == ("<image>?", Picture("/data/a.png"))
  marked = [{"type": "image"}, {"type": "text", "text": "<image>?"}]
  found = read({"messages": [{"role": "user", "content": marked}], "images": ["a.png"]})
  assert found.messages[0].content == (Picture("/data/a.png"), "<image>?")


@pytest.mark.parametrize(
  "more", [{}, {"images": []}, {"images": ""}, {"image": None, "id": "7", "image_id": 7, "pics": [1, 2]}]
)
def test_a_placeholder_without_images_is_text(more):
  assert read({"messages": SHOWN} | more).messages[0].content == "<image>?"


def test_one_image_and_fields_of_another_name():
  llava = {"image": "a.png", "conversations": [{"from": "human", "value": "<image>\nWhat?"}]}
  assert read(llava).messages[0].content == (Picture("/data/a.png"), "\nWhat?")
  assert read({"messages": SHOWN, "images": "a.png", "image": "b.png"}).images == ("/data/a.png",)
  own = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
  assert read({"messages": own, "image": "thumbnail.png"}).images == ("/data/a.png",)
  record = {"messages": [{"role": "user", "content": "[IMG]?"}], "pics": ["a.png"], "image": "b.png"}
  assert read_conversation(record, "", "/data", ImageFields("pics", "[IMG]")).images == ("/data/a.png",)


def test_images_with_their_bytes():
  uri = "data:application/octet-stream;base64,UE5H"
  for stored in (b"PNG", {"bytes": b"PNG", "path": "gone.png"}, [{"bytes": b"PNG"}]):
    assert read({"messages": SHOWN, "images": stored}).images == (uri,)
  part = {"type": "image", "image": {"bytes": b"PNG", "path": None}}
  assert read({"messages": [{"role": "user", "content": [part]}]}).images == (uri,)
  empty = {"type": "image", "image": {"bytes": None, "path": None}}
  assert read({"messages": [{"role": "user", "content": [empty]}], "images": ["a.png"]}).images == ("/data/a.png",)


@pytest.mark.parametrize(
  ("record", "reason"),
  [
    ([], "the record is list, expected an object"),
    ({"text": "a"}, "no conversation: expected 'messages'.*fields: 'text'"),
    ({"messages": []}, "no messages"),
    ({"messages": "a"}, "field 'messages' is str, expected a list"),
    ({"messages": ["a"]}, r"messages\[0\] is str"),
    ({"messages": [{"role": "bot", "content": "a"}]}, r"messages\[0\] has the role 'bot', expected one of system"),
    ({"messages": [{"role": "user", "content": 3}]}, r"'messages\[0\].content' is int"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "the type 'audio', expected text or image"),
    ({"messages": [BOTH[0], {"role": "assistant", "content": None}]}, r"messages\[1\]: the assistant says nothing"),
    ({"messages": [BOTH[0], {"role": "tool", "content": "a"}]}, r"messages\[1\] is a tool's message, but no assistant message"),
    ({"messages": [BOTH[0] | {"tool_calls": [1]}]}, "only the assistant can call tools"),
    ({"messages": [BOTH[1] | {"weight": 0.5}]}, "weight is 0.5"),
    ({"messages": [BOTH[0], {"role": "assistant", "tool_calls": [{"id": [1], "function": {"name": "f"}}]}]}, "id' is list"),
    (call("[1]"), "the arguments are list, expected an object"),
    (call('{"x"'), "arguments: not valid JSON"),
    (call('{"x": 1, "x": 2}'), "'x' is listed twice"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "is from 'narrator'.*function_call, tool_call"),
    ({"conversations": [{"from": ["gpt"], "value": "a"}]}, r"conversations\[0\] is from \"\['gpt'\]\""),
    ({"messages": [{"role": "user", "content": "a"} | {"weight": "0"}]}, r'messages\[0\].weight is "0", expected 0 or 1'),
    (
      {"messages": [{"role": "user", "content": "a"}], "enable_thinking": "true"},
      'enable_thinking is "true", expected true or false',
    ),
    ({"instruction": "Hi", "output": 5}, "field 'output' is int, expected a string"),
    ({"instruction": "Hi", "output": "", "history": [["a", 5]]}, r"field 'history\[0\]\[1\]' is int, expected a string"),
    ({"conversations": [{"from": "gpt", "value": "a", "weight": 2}]}, r"conversations\[0\].weight is 2, expected 0 or 1"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "https://x.y/z.png"}]}]}, "https:.*not fetched"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "../z.png"}]}]}, "z.png' is outside the folder"),
    ({"messages": [{"role": "user", "content": "<image>"}], "images": ["a.png", "b.png"]}, "1 places for images.* lists 2"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "1 places for images.* lists 0"),
    ({"messages": [BOTH[0], BOTH[1] | {"train": "false"}]}, r'messages\[1\].train is "false", expected 0 or 1'),
    ({"messages": [BOTH[0], BOTH[1] | {"loss_weight": 0.5}]}, r"messages\[1\].loss_weight is 0.5, expected 0 or 1"),
    (
      {"messages": [BOTH[0], BOTH[1] | {"train_detail": [{"train": False}]}]},
      r"messages\[1\].train_detail is .* no clear meaning",
    ),
    ({"messages": [BOTH[0], BOTH[1] | {"train": False, "weight": 1}]}, r"contradict each other: weight=true, train=false"),
    ({"messages": BOTH, "label": 0}, "label is 0: expected true for a good answer or false for a bad one"),
    ({"messages": BOTH, "weight": 0.5}, "weight is 0.5, expected 0 or 1"),
    ({"messages": BOTH, "loss_mask": [0, 1]}, r"loss_mask is \[0, 1\], expected 0 or 1"),
    ({"messages": BOTH, "enable_thinking": "yes"}, 'enable_thinking is "yes"'),
    ({"messages": BOTH, "chat_template_kwargs": "thinking"}, "chat_template_kwargs: not valid JSON"),
    ({"messages": BOTH, "chat_template_kwargs": [1]}, "chat_template_kwargs is list, expected an object"),
    (
      {"messages": [BOTH[0], BOTH[1] | {"function_call": {"name": "f"}, "tool_calls": [{"function": {"name": "f"}}]}]},
      "has both tool_calls and function_call",
    ),
    ({"messages": [BOTH[0] | {"function_call": {"name": "f"}}]}, "only the assistant can call tools"),
    ({"messages": SHOWN, "images": 7}, "images: expected an image"),
    ({"messages": BOTH, "image": "a.png"}, "0 places for images, and 'image' lists 1"),
    ({"messages": BOTH, "images": [b"a" * 13_000_000]}, "images: the images inside it have 17333333 bytes in base64, more"),
    ({"messages": SHOWN * 2, "images": [b"a" * 7_000_000] * 2}, "the images inside it have 18666\\d+ bytes"),
    ({"messages": SHOWN, "pics": ["a.png"]}, r"the text has '<image>' and no image is read, but 'pics' .*\(images_field=pics"),
    ({"messages": SHOWN, "shot": "x/A.JPEG"}, "'shot' looks like images"),
    ({"messages": SHOWN, "shot": [{"bytes": b"a", "path": None}]}, "'shot' looks like images"),
    ({"messages": SHOWN, "shot": "data:image/png;base64,aa"}, "'shot' looks like images"),
    ({"messages": SHOWN, "image_path": "a"}, "'image_path' looks like images"),
    ({"messages": [SHOWN[0] | {"images": ["a"]}]}, r"'messages\[0\].images' looks like images \(list them in the record's own"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "pics": ["a.png"]}, "lists 0, but 'pics' looks like"),
    ({"messages": BOTH, "tools": [{"type": "function"}]}, r"tools\[0\]: expected a function with a name"),
  ],
)
def test_what_is_wrong_is_told(record, reason):
  with pytest.raises(BadRecordError, match=reason) as error:
    read(record)
  assert error.value.place == "data.jsonl:7"
