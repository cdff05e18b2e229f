"""Data in passes: each document once in a pass, rows counted in advance, and resuming, also with more passes."""

import json
import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_loader import TEXTS, same, take, write

from maxtext_like.data import epochs
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer
from maxtext_like.errors import UserError

CHATS = [[("user", f"{i}?"), ("assistant", "x" * (i * 7 % 23 + 1))] for i in range(30)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  return write(tmp_path_factory.mktemp("text") / "a.jsonl", [*TEXTS[:30], "", *TEXTS[30:], " "])


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
  path = tmp_path_factory.mktemp("chats") / "a.jsonl"
  records = [{"messages": [{"role": role, "content": said} for role, said in chat]} for chat in CHATS]
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return str(path)


def rows_of(source):
  """Returns every row of a source that ends, and the number of batches."""
  batches = []
  while (batch := next(source))["segments"].any():
    batches.append(batch)
  return [
    row[on > 0].tolist() for b in batches for row, on in zip(b["tokens"], b["segments"], strict=True) if on.any()
  ], batches


def words(rows):
  """Returns how often each text is in the rows. A text begins and ends with its number."""
  return Counter(token for row in rows for token in row)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_document_is_in_each_pass_once_and_the_rows_are_known(make, text, chats, data):
  kind = data.draw(st.sampled_from(["text", "chat"]))
  keys = {"dataset_path": chats, "data_format": "chat", "chat_template": "gemma3"} if kind == "chat" else {"dataset_path": text}
  keys |= {"shuffle": data.draw(st.booleans()), "packing": data.draw(st.booleans()), "eval_interval": 0}
  batch, length = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([64, 97, 400]))
  passes = data.draw(st.integers(1, 3))
  whole = make(**keys, length=length, global_batch=batch, epochs=passes)
  rows, batches = rows_of(whole)
  assert whole.rows == len(rows)
  assert len(batches) == -(-whole.rows // batch)
  once = rows_of(make(**keys, length=length, epochs=1))[0]
  if kind == "text" and keys["packing"]:
    tokenizer = BytesTokenizer()
    ids = [[tokenizer.bos_id, *tokenizer.encode(t), tokenizer.eos_id] for t in TEXTS]
    assert words(once) == words(ids)
    assert len(rows) == passes * len(once)  # for any shuffle: rows are cut to their length
    for i in range(passes):
      assert words(rows[i * len(once) : (i + 1) * len(once)]) == words(once)
  assert words(rows) == Counter({token: passes * count for token, count in words(once).items()})
  assert (whole.counts()["documents"], whole.counts()["rows"]) == (passes * sum(whole.documents.values()), whole.rows)

  # From any batch on, bitwise equal; and with more passes after the last one.
  at = data.draw(st.integers(0, len(batches)))
  begun = make(**keys, length=length, global_batch=batch, epochs=passes)
  take(begun, at)
  state = json.loads(json.dumps(begun.get_state()))
  resumed = make(**keys, length=length, global_batch=batch, epochs=passes)
  resumed.set_state(state)
  same(take(resumed, len(batches) - at), batches[at:])
  longer = make(**keys, length=length, global_batch=batch, epochs=passes + 1)
  longer.set_state(state)
  left = longer.rows_left(state)
  assert len(rows_of(longer)[0]) == left >= max(longer.rows - at * batch, 1)  # the last batch was padded
  other = make(**keys, length=length, global_batch=data.draw(st.integers(1, 5)), epochs=passes)
  other.set_state(state)
  assert len(rows_of(other)[0]) == other.rows_left(state) == max(whole.rows - at * batch, 0)
  for source in (whole, begun, resumed, longer, other):
    source.close()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("change", ["files", "packing"])
def test_of_other_data_the_rows_that_are_left_are_counted_from_where_they_go_on(make, text, tmp_path, caplog, shuffle, change):
  keys = {"shuffle": shuffle, "eval_interval": 0, "length": 97, "global_batch": 2}
  begun = make(dataset_path=text, **keys, epochs=2)
  take(begun, 7)
  state = begun.get_state()
  more = write(tmp_path / "b.jsonl", [f"{i} more" * (i % 9) for i in range(50)])
  changed = {"dataset_path": [text, more]} if change == "files" else {"dataset_path": text, "packing": False}
  other = make(**keys, **changed, epochs=3)
  with pytest.raises(UserError, match="cannot resume: the data differ from those of the checkpoint"):
    other.rows_left(state)
  left = other.rows_left(state, accept_changes=True)
  anew = change == "packing" and shuffle  # there is no shuffle buffer to resume in
  assert left == other.rows if anew else 0 < left < other.rows
  with caplog.at_level(logging.WARNING):
    other.set_state(state, accept_changes=True)
  where = "the first document" if anew else "the document with the same number"
  assert f"differ from those of the checkpoint, starting at {where}:" in caplog.text
  assert len(rows_of(other)[0]) == left


def test_a_damaged_position_is_told(make, text):
  source = make(dataset_path=text, epochs=1)
  state = source.get_state()
  with pytest.raises(UserError, match="data state is damaged: KeyError"):
    source.rows_left(state | {"state": {"ended": False}})


def test_a_number_that_was_counted_is_not_counted_again(make, text, cache, monkeypatch, caplog):
  make(dataset_path=text, epochs=2)
  (entry,) = (cache / "maxtext-like" / "data").glob("rows-*.json")
  entry.write_text('{"rows": 7}')
  assert make(dataset_path=text, epochs=2).rows == 7
  assert make(dataset_path=text, epochs=3).rows != 7
  entry.write_text('{"rows": ')
  monkeypatch.setattr(epochs, "LOG_SECONDS", -1.0)
  lived = []
  monkeypatch.setattr(epochs, "ALIVE_SECONDS", -1.0)
  with caplog.at_level(logging.WARNING):
    assert make(dataset_path=text, epochs=2, alive=lambda: lived.append(1)).rows != 7
  assert "2 of 42 documents" in caplog.text
  assert len(lived) >= 42


def test_data_without_an_end_and_data_in_passes_are_no_continuation_of_each_other(make, text):
  endless, ending = make(dataset_path=text), make(dataset_path=text, epochs=2)
  for one, other in ((endless, ending), (ending, endless)):
    with pytest.raises(UserError, match="by_epoch: was"):
      one.set_state(other.get_state())


def test_a_bad_record_is_found_while_counting_and_a_left_out_one_counts_in_no_row(make, tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "one two"}\n{"no": 1}\n{"text": "three four"}\n')
  with pytest.raises(UserError, match=r"a\.jsonl:2"):
    make(dataset_path=str(path), epochs=1, packing=False)
  source = make(dataset_path=str(path), epochs=3, packing=False, on_bad_record="skip", global_batch=4)
  assert source.rows == 6
  assert np.sum(next(source)["segments"].any(1)) == 4
  assert np.sum(next(source)["segments"].any(1)) == 2
