"""Conversations as the data of a run: complete in their rows, learned where the assistant speaks, equal from every kind of
file."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from PIL import Image

from maxtext_like.config.load import load_config
from maxtext_like.data.pack import LOSSES
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer, load_tokenizer
from maxtext_like.errors import UserError
from maxtext_like.targets import IGNORED
from tests.generation.letters import write_letters

CHAT = {
  "data_format": "chat",
  "chat_template": "gemma3",
  "length": 160,
  "global_batch": 1,
  "shuffle": False,
  "eval_interval": 0,
}
decode = BytesTokenizer().decode


def said(asked: str, answered: str, *more: str) -> dict[str, Any]:
  roles = ("user", "assistant") * 9
  return {"messages": [{"role": role, "content": text} for role, text in zip(roles, (asked, answered, *more), strict=False)]}


RECORDS = [said("Hello", "Hi."), said("One", "1", "Two", "2"), said("a" * 50, "b" * 30), said("No", "Bye.")]


def write(folder: Path, records: list[dict[str, Any]], kind: str = "jsonl") -> str:
  path = folder / f"data.{kind}"
  if kind == "jsonl":
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
  table = pyarrow.Table.from_pylist(records)
  if kind == "parquet":
    pyarrow.parquet.write_table(table, path, row_group_size=3)
  else:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
      writer.write_table(table, max_chunksize=3)
  return str(path)


def learned(batch: dict[str, np.ndarray], row: int = 0) -> str:
  targets = batch["targets"][row]
  return decode(targets[targets != IGNORED])


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_rows_are_the_same_from_every_kind_of_file(kind, make, tmp_path):
  data = make(**CHAT, dataset=kind, dataset_path=write(tmp_path, RECORDS, kind))
  first, second, third = (next(data) for _ in range(3))
  end = "<end_of_turn>"
  assert learned(first) == f"Hi.{end}"
  assert learned(second) == f"1{end}2{end}"
  assert learned(third) == "b" * 30 + end
  text = decode(first["tokens"][0])
  assert text == f"<bos><start_of_turn>user\nHello{end}\n<start_of_turn>model\nHi.{end}\n"
  # the target of a position is the next token
  at = np.flatnonzero(first["targets"][0] != IGNORED)
  np.testing.assert_array_equal(first["tokens"][0][at + 1], first["targets"][0][at])
  assert set(np.unique(first["segments"])) == {0, 1}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_what_other_rows_of_a_table_call_is_no_argument_of_this_one(kind, make, tmp_path):
  def calls(name, arguments):
    kinds = {key: {"type": "string"} for key in arguments}
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": kinds}}}
    called = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [called]}]
    return {"messages": messages, "tools": [tool]}

  records = [calls("f", {"x": "1"}), calls("g", {"y": "2", "z": ["3"]})]
  settings = CHAT | {"chat_template": "gemma4", "length": 400, "packing": False}
  table, lines = (make(**settings, dataset=each, dataset_path=write(tmp_path, records, each)) for each in (kind, "jsonl"))
  for _ in records:
    row, wanted = next(table), next(lines)
    assert decode(row["tokens"][0]) == decode(wanted["tokens"][0])
    assert learned(row) == learned(wanted)


def test_packed_conversations_are_whole(make, tmp_path):
  data = make(**CHAT | {"length": 190}, dataset_path=write(tmp_path, RECORDS))
  rows = [next(data) for _ in range(3)]
  assert [row["segments"].max() for row in rows] == [1, 1, 1]  # conversations 1 and 2 do not fit in one row, nor do 2 and 3
  data = make(**CHAT | {"length": 260}, dataset_path=write(tmp_path, RECORDS))
  row = next(data)
  assert row["segments"].max() == 2
  assert learned(row) == "Hi.<end_of_turn>1<end_of_turn>2<end_of_turn>"
  assert (row["positions"][row["segments"] == 2] == np.arange((row["segments"] == 2).sum())).all()


@pytest.mark.parametrize(("train_on", "expected"), [("last", "2<end_of_turn>"), ("all", None)])
def test_what_is_learned(train_on, expected, make, tmp_path):
  data = make(**CHAT, dataset_path=write(tmp_path, RECORDS[1:2]), train_on=train_on)
  row = next(data)
  assert learned(row) == (expected if expected else decode(row["tokens"][0][1:]))


def test_long_ones_are_cut_counted_and_told(make, tmp_path, caplog):
  records = [said("a" * 200, "b"), said("c", "d" * 200), *RECORDS, said("e", "f" * 200)]
  with caplog.at_level(logging.WARNING):
    data = make(**CHAT, dataset_path=write(tmp_path, records))
    row = next(data)
  assert caplog.text.count("a conversation is longer than max_target_length=160") == 1
  assert caplog.text.count("a conversation is left out: the part that fits in max_target_length=160") == 1
  assert "a" not in decode(row["tokens"][0]).replace("start", "")
  assert set(learned(row)) == {"d"}
  counts = data.counts()
  assert (counts["unlearned"], counts["truncated"]) == (1, 1)
  assert counts["learned_tokens"] == len(learned(row))
  with pytest.raises(UserError, match=r"1 have no learned token in their first 160 .*\n  fix: set max_target_length=\d+"):
    make(**CHAT, dataset_path=write(tmp_path, records[:1]))


def test_going_on_is_exact(make, tmp_path):
  settings = CHAT | {"shuffle": True, "length": 260, "dataset_path": write(tmp_path, RECORDS * 5)}
  data = make(**settings)
  before = [next(data)["tokens"] for _ in range(4)]
  state, counts = json.loads(json.dumps(data.get_state())), data.counts()
  after, at_end = [next(data)["tokens"] for _ in range(5)], data.counts()
  again = make(**settings)
  again.set_state(state)
  assert again.counts() == counts
  np.testing.assert_array_equal([next(again)["tokens"] for _ in range(5)], after)
  assert again.counts() == at_end
  assert len(before) == 4
  with pytest.raises(UserError, match="chat train_on: was assistant, is last"):
    make(**settings, train_on="last").set_state(state)


def test_packing_goes_on_before_a_conversation_that_did_not_fit(make, tmp_path):
  """A conversation that was read for a row without room for it is neither lost nor counted twice."""
  settings = CHAT | {"length": 190, "packing": True, "dataset_path": write(tmp_path, RECORDS)}
  data = make(**settings, split="eval", eval_path=settings["dataset_path"])
  rows = [next(data)["tokens"]]
  state = json.loads(json.dumps(data.get_state()))
  rows += [next(data)["tokens"] for _ in range(3)]
  again = make(**settings, split="eval", eval_path=settings["dataset_path"])
  again.set_state(state)
  np.testing.assert_array_equal([next(again)["tokens"] for _ in range(3)], rows[1:])
  assert again.counts() == data.counts()
  assert again.counts()["documents"] == len(RECORDS)


def test_bad_records_are_told_before_the_first_step(make, tmp_path, caplog):
  records = [*RECORDS, {"messages": [{"role": "user", "content": "a"}]}, said("a", "b"), {"text": "c"}]
  records += [{"messages": [{"role": "assistant", "content": "a"}]}]
  path = write(tmp_path, records)
  with pytest.raises(UserError) as error:
    make(**CHAT, dataset_path=path)
  assert "3 bad records among the 8" in str(error.value)
  assert f"{path}:5: the assistant says nothing that could be learned (train_on=assistant)" in str(error.value)
  assert f"{path}:7: no conversation: expected 'messages'" in str(error.value)
  assert f"{path}:8: Gemma 3 needs user and assistant to alternate" in str(error.value)
  with caplog.at_level(logging.WARNING):
    make(**CHAT, dataset_path=path, on_bad_record="skip")
  assert "3 of 8 records are bad and are left out" in caplog.text


def test_an_empty_answer_is_a_bad_record_where_it_would_be_learned(make, tmp_path):
  """It would teach the model to end the turn at once. Earlier answers are not learned with train_on=last, nor with weight 0."""
  question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
  for empty in ("", " \n", [{"type": "text", "text": ""}]):
    silent = {"role": "assistant", "content": empty}
    path = write(tmp_path, [*RECORDS, {"messages": [question, silent, question, answer]}])
    with pytest.raises(UserError, match=rf"{path}:5: messages\[1\]: the assistant's answer is empty"):
      make(**CHAT, dataset_path=path)
    make(**CHAT | {"train_on": "last"}, dataset_path=path)
    make(**CHAT | {"train_on": "all"}, dataset_path=path)
    make(**CHAT, dataset_path=write(tmp_path, [{"messages": [question, silent | {"weight": 0}, question, answer]}]))


@pytest.mark.parametrize("template", ["gemma4-small", "gemma4", "deepseek3.2"])
def test_an_answer_of_which_the_template_keeps_nothing_is_empty(template, make, tmp_path):
  """The answer is only a thought. Before the last user message the template drops it, and only the end of the turn remains.
  After that message, the template keeps it."""
  settings: dict[str, Any] = CHAT | {"chat_template": template}
  question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "d"}
  thought = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
  path = write(tmp_path, [*RECORDS, {"messages": [question, thought, question, answer]}])
  with pytest.raises(
    UserError,
    match=rf"{path}:5: messages\[1\]: the assistant's answer is empty: the chat template drops .* a thought",
  ):
    make(**settings, dataset_path=path)
  make(**settings | {"train_on": "last"}, dataset_path=path)
  make(**settings, dataset_path=write(tmp_path, [{"messages": [question, thought]}]))
  make(**settings, dataset_path=write(tmp_path, [{"messages": [question, thought | {"weight": 0}, question, answer]}]))


@pytest.mark.parametrize(
  ("record", "field", "accepts_weight"),
  [
    (
      {"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
      "conversations[1]",
      True,
    ),
    ({"prompt": "a", "completion": [{"role": "assistant", "content": ""}]}, "completion[0]", True),
    ({"prompt": "a", "completion": ""}, "completion", False),
    ({"instruction": "a", "output": "", "system": "s"}, "output", False),
    ({"instruction": "a", "output": "b", "history": [["c", ""]]}, "history[0][1]", False),
  ],
)
def test_an_empty_answer_is_told_by_the_record_s_own_name(record, field, accepts_weight, make, tmp_path):
  """If the form of the record can exclude an answer, the message says how, and a record that follows it is accepted."""
  path = write(tmp_path, [*RECORDS, record])
  with pytest.raises(UserError) as error:
    make(**CHAT, dataset_path=path)
  assert f"{path}:5: {field}: the assistant's answer is empty" in str(error.value)
  assert ('"weight": 0 there leaves it out' in str(error.value)) == accepts_weight
  if accepts_weight:
    turns = record.get("conversations") or record["completion"]
    turns[-1]["weight"] = 0
    answer = {"role": "assistant", "content": "Yes."}
    turns += [{"role": "user", "content": "b"}, answer]
    assert learned(next(make(**CHAT, dataset_path=write(tmp_path, [record])))) == "Yes.<end_of_turn>"


@pytest.mark.parametrize(("train_on", "told"), [("assistant", 1), ("last", 0)])
def test_thoughts_that_are_lost_are_counted_once(train_on, told, make, tmp_path, caplog):
  record = said("a", "b", "c", "d")
  record["messages"][1]["reasoning_content"] = "Hm."
  settings = CHAT | {"chat_template": "gemma4", "train_on": train_on}
  with caplog.at_level(logging.WARNING):
    next(make(**settings, dataset_path=write(tmp_path, [record] * 3)))
  lost = "answers learned without their thoughts: 3 before the last user message"
  assert caplog.text.count(lost) == told
  assert caplog.text.count("without their thoughts") == told


def test_a_thought_that_a_template_drops_from_the_last_answer_is_counted_as_such(make, tmp_path, caplog):
  """DeepSeek V3's template drops everything before </think>."""
  record = said("a", "<think>Hm.</think>b")
  with caplog.at_level(logging.WARNING):
    row = next(make(**CHAT | {"chat_template": "deepseek3"}, dataset_path=write(tmp_path, [record] * 2)))
  assert learned(row).startswith("b<")
  assert "answers learned without their thoughts: 2 after it" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_records_marked_as_bad_are_left_out_and_counted(kind, make, tmp_path, caplog):
  """KTO's label, and marks on every answer: the other records are learned, and unread fields are listed once."""
  marked = said("e", "f")
  marked["messages"][1]["train"] = False
  records = [
    {"prompt": "a", "completion": "b", "label": False, "id": 1, "messages": None},
    {"prompt": "c", "completion": "d", "label": True, "id": 2},
    marked,
    said("g", "h") | {"label": False},
  ]
  with caplog.at_level(logging.WARNING):
    data = make(**CHAT, dataset=kind, dataset_path=write(tmp_path, records, kind), split="train", epochs=1)
    assert [learned(next(data)), learned(next(data))] == ["d<end_of_turn>", ""]
  assert data.counts()["excluded"] == 3
  assert data.rows == 1
  assert caplog.text.count("is left out because its record marks it as not to be learned") == 1
  assert caplog.text.count("fields of the records that are not used: 'id' in 2 of 4 records") == 1
  with pytest.raises(UserError, match=r"any of the 1 documents: 1 are marked as not to be learned\n  fix: set dataset_path="):
    make(**CHAT, dataset_path=write(tmp_path, records[:1]))


def test_excluded_answers_are_not_learned_with_train_on_all(make, tmp_path):
  record = said("a", "wrong", "c", "right")
  record["messages"][1]["loss"] = False
  text = learned(next(make(**CHAT | {"train_on": "all"}, dataset_path=write(tmp_path, [record]))))
  assert "wrong" not in text
  assert "right" in text
  assert "user\na" in text


def test_a_history_in_the_prompt_is_no_answer(make, tmp_path):
  """As in TRL with completion_only_loss, only the completion is learned; with train_on=all every token is."""
  record = {"prompt": said("a", "b", "c")["messages"], "completion": [{"role": "assistant", "content": "d"}]}
  path = write(tmp_path, [record])
  assert learned(next(make(**CHAT, dataset_path=path))) == "d<end_of_turn>"
  assert "model\nb<end_of_turn>" in learned(next(make(**CHAT | {"train_on": "all"}, dataset_path=path)))


@pytest.mark.parametrize(("key", "tokens"), [(None, 0), ("literal", 0), ("parse", 2), ("error", None)])
def test_special_tokens_in_what_is_said(key, tokens, make, tmp_path, caplog):
  """The key and the rule are those for text: with parse each speaker's text has the ids, else characters and a warning."""
  tokenizer = load_tokenizer(str(write_letters(tmp_path)))
  path = write(tmp_path, [said("a <eos>", "b <eos> c")] * 2)
  settings = CHAT | {"special_tokens_in_text": key, "tokenizer": str(tmp_path), "vocab_size": 2**10, "packing": False}
  if tokens is None:
    with pytest.raises(UserError, match="the text spells special tokens: '<eos>' 2 times"):
      make(**settings, dataset_path=path)
    return
  with caplog.at_level(logging.WARNING):
    row = next(make(**settings, dataset_path=path))
  assert (row["tokens"] == tokenizer.find("<eos>")).sum() == tokens
  assert caplog.text.count("2 of 2 documents spell special tokens in their text ('<eos>' 4 times") == (key is None)


def test_more_images_than_a_row_has_places_for(make, tmp_path, caplog):
  """One conversation is cut at its second image, and the count says so; one without anything to learn before it is left out."""
  Image.new("RGB", (20, 20), "blue").save(tmp_path / "a.png")
  vision = load_config("gemma3-tiny", ["use_multimodal=true"]).config.vision
  length = 2 * vision.vision_output_length + 200
  settings = CHAT | {"length": length, "vocab_size": 2**20, "packing": False}
  first = said("<image>What?", "Blue.", "<image>And this?", "Blue, too.") | {"images": ["a.png", "a.png"]}
  late = said("<image><image>Alike?", "Yes.") | {"images": ["a.png", "a.png"]}
  path = write(tmp_path, [late, first, said("c", "d")])
  with caplog.at_level(logging.WARNING):
    data = make(**settings, vision=vision, dataset_path=path)
    assert learned(next(data)) == "Blue.<end_of_turn>"
  counts = data.counts()
  assert {name: counts[name] for name in LOSSES} == {"truncated": 0, "cut_at_image": 1, "unlearned": 1, "excluded": 0}
  assert "a conversation has more images than max_images_per_row=1" in caplog.text
  by_epoch = make(**settings, vision=vision, dataset_path=path, epochs=1)
  assert by_epoch.rows == 2
  both = make(**settings, vision=dataclasses.replace(vision, max_images_per_row=2), dataset_path=path)
  assert learned(next(both)) == "Yes.<end_of_turn>"
  assert learned(next(both)) == "Blue.<end_of_turn>Blue, too.<end_of_turn>"


def test_images_and_text_in_one_batch(make, tmp_path):
  Image.new("RGB", (20, 20), "blue").save(tmp_path / "a.png")
  vision = load_config("gemma3-tiny", ["use_multimodal=true"]).config.vision
  assert vision.image_token_id is not None
  shown = {
    "messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Blue."}],
    "images": ["a.png"],
  }
  records = [shown, said("<image>", "None.")]
  settings = CHAT | {"length": vision.vision_output_length + 120, "vocab_size": 2**20, "vision": vision, "packing": False}
  data = make(**settings, dataset_path=write(tmp_path, records))
  image, text = next(data), next(data)
  assert image["token_types"].sum() == vision.vision_output_length
  assert (learned(image), learned(text)) == ("Blue.<end_of_turn>", "None.<end_of_turn>")
  assert not text["token_types"].any()
  assert image.keys() == text.keys()
  with pytest.raises(UserError, match="has images, but the model takes none"):
    make(**settings | {"vision": None}, dataset_path=write(tmp_path, records))
  with pytest.raises(UserError, match=r"data.jsonl:1: image .*b.png: no such file"):
    make(**settings, dataset_path=write(tmp_path, [shown | {"images": ["b.png"]}, *records]))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("form", ["listed", "one", "path", "part"])
def test_images_as_tables_store_them(form, kind, make, tmp_path):
  """Hugging Face's Image: an object with bytes and path, whose path need not exist if there are bytes."""
  Image.new("RGB", (20, 20), "blue").save(tmp_path / "a.png")
  vision = load_config("gemma3-tiny", ["use_multimodal=true"]).config.vision
  stored = {"bytes": (tmp_path / "a.png").read_bytes(), "path": "lost.png"}
  mark = {"type": "image", "text": None}
  record: dict[str, Any] = {
    "listed": {"images": [stored]},
    "one": {"image": stored},
    "path": {"images": [{"bytes": None, "path": "a.png"}]},
    "part": {},
  }[form]
  if form == "part":
    mark["image"] = stored
  record["messages"] = [
    {"role": "user", "content": [mark, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]},
  ]
  settings = CHAT | {"length": vision.vision_output_length + 120, "vocab_size": 2**20, "vision": vision, "packing": False}
  row = next(make(**settings, dataset=kind, dataset_path=write(tmp_path, [record], kind)))
  named = {
    "messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Blue."}],
    "image": "a.png",
  }
  for key, array in next(make(**settings, dataset_path=write(tmp_path, [named]))).items():
    np.testing.assert_array_equal(row[key], array)
  assert row["token_types"].sum() == vision.vision_output_length


def test_images_are_named_by_the_key_or_told(make, tmp_path):
  """Findings that were stored for another field are not used."""
  Image.new("RGB", (20, 20), "blue").save(tmp_path / "a.png")
  record = said("<image>What?", "Blue.") | {"pics": ["a.png"]}
  path = write(tmp_path, [record])
  vision = load_config("gemma3-tiny", ["use_multimodal=true"]).config.vision
  off = dataclasses.replace(vision, use_multimodal=False)
  settings = CHAT | {"length": vision.vision_output_length + 120, "vocab_size": 2**20, "packing": False, "dataset_path": path}
  for given in (vision, off):
    with pytest.raises(UserError, match=r"data.jsonl:1: the text has '<image>' and no image is read, but 'pics' looks like"):
      make(**settings, vision=given)
  row = next(make(**settings, vision=dataclasses.replace(vision, images_field="pics")))
  assert row["token_types"].sum() == vision.vision_output_length
  with pytest.raises(UserError, match=r"has images, but the model takes none \(use_multimodal is false\)"):
    make(**settings, vision=dataclasses.replace(off, images_field="pics"))
