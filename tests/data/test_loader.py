"""make_data end to end: batches, exact resume, refusals, the held-out split, processes."""

import gzip
import json
import logging
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_like.data import loader, sources
from maxtext_like.data.pack import KEYS
from maxtext_like.data.readers import jsonl
from maxtext_like.data.readers.text import TextFiles
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.layers.embedding import Lookup
from maxtext_like.targets import IGNORED


def write(path, texts):
  path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  return str(path)


TEXTS = [f"{i:02d}" + "abcdefghij" * (i * 7 % 5) + f"{i:02d}" for i in range(40)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return write(tmp_path_factory.mktemp("data") / "a.jsonl", TEXTS)


def take(source, steps):
  return [next(source) for _ in range(steps)]


def same(first, second):
  assert len(first) == len(second)
  for a, b in zip(first, second, strict=True):
    for key in KEYS:
      np.testing.assert_array_equal(a[key], b[key])


def texts_of(batches):
  """Returns the complete documents in rows of unpacked documents."""
  rows = [row[segments > 0] for b in batches for row, segments in zip(b["tokens"], b["segments"], strict=True)]
  return [BytesTokenizer().decode(row) for row in rows if len(row)]


def test_a_batch_written_out(make, tmp_path):
  source = make(dataset_path=write(tmp_path / "a.jsonl", ["AB", "", "C", "defgh"]), length=7, shuffle=False)
  batch = next(source)
  a = 65 + 3
  tokens = [[2, a, a + 1, 1, 2, a + 2, 1], [2, 103, 104, 105, 106, 107, 1]]
  n = IGNORED
  assert batch["tokens"].tolist() == tokens
  assert batch["targets"].tolist() == [[a, a + 1, 1, n, a + 2, 1, n], [103, 104, 105, 106, 107, 1, n]]
  assert batch["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]
  assert batch["segments"].tolist() == [[1, 1, 1, 1, 2, 2, 2], [1] * 7]
  assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
  assert source.counts() == {"documents": 4, "empty": 1, "tokens": 14, "dropped_tokens": 0, "rows": 2, "bad": 0}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_resume_is_bitwise(make, path, data):
  given_ = {
    "dataset_path": path,
    "packing": data.draw(st.booleans()),
    "shuffle": data.draw(st.booleans()),
    "data_shuffle_seed": data.draw(st.integers(0, 5)),
    "eval_fraction": data.draw(st.sampled_from([0.0, 0.1])),
    "length": data.draw(st.sampled_from([5, 16, 33])),
    "split": "train",
  }
  if given_["eval_fraction"]:
    given_["split"] = data.draw(st.sampled_from(["train", "eval"]))
  batch, steps = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 30))
  unbroken = make(**given_, global_batch=batch)
  take(unbroken, steps)
  state = json.loads(json.dumps(unbroken.get_state()))
  rest = take(unbroken, 8)
  resumed = make(**given_, global_batch=batch)
  take(resumed, data.draw(st.integers(0, 2)))
  resumed.set_state(state)
  assert resumed.get_state() == state
  same(take(resumed, 8), rest)
  assert resumed.counts() == unbroken.counts()
  # another batch size (another number of devices) resumes with the next row
  other = make(**given_, global_batch=1)
  other.set_state(state)
  rows = take(other, 8 * batch)
  for key in KEYS:
    np.testing.assert_array_equal(np.concatenate([b[key] for b in rows]), np.concatenate([b[key] for b in rest]))
  for source in (unbroken, resumed, other):
    source.close()


def test_resume_of_every_other_kind(make, tmp_path):
  import pyarrow
  import pyarrow.parquet
  from array_record.python.array_record_module import ArrayRecordWriter

  table = pyarrow.table({"text": TEXTS})
  pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
  with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
    stream.write_table(table, max_chunksize=7)
  writer = ArrayRecordWriter(str(tmp_path / "a.array_record-00000-of-00001"), "group_size:7")
  for text in TEXTS:
    writer.write(text.encode())
  writer.close()
  (tmp_path / "a.txt").write_text("\n".join(TEXTS) * 9)
  kinds = [{"dataset": kind, "dataset_path": str(tmp_path)} for kind in ("parquet", "arrow", "arrayrecord")]
  for kind in ({"dataset": "synthetic"}, {"dataset": "text", "dataset_path": str(tmp_path / "a.txt")}, *kinds):
    unbroken = make(**kind)
    take(unbroken, 13)
    state = json.loads(json.dumps(unbroken.get_state()))
    resumed = make(**kind)
    resumed.set_state(state)
    same(take(resumed, 9), take(unbroken, 9))


def test_synthetic_rows_are_full_and_in_the_vocabulary(make):
  batches = take(make(dataset="synthetic", vocab_size=5, length=64, global_batch=3), 4)
  tokens = np.concatenate([b["tokens"] for b in batches])
  assert set(tokens.ravel()) == set(range(5))
  for b in batches:
    assert (b["segments"] == 1).all()
    np.testing.assert_array_equal(b["targets"][:, :-1], b["tokens"][:, 1:])
    assert (b["targets"][:, -1] == IGNORED).all()
    np.testing.assert_array_equal(b["positions"], np.tile(np.arange(64), (3, 1)))
  assert len({row.tobytes() for row in tokens}) == 12
  other = next(make(dataset="synthetic", vocab_size=5, length=64, global_batch=3, data_shuffle_seed=1))
  assert (other["tokens"] != batches[0]["tokens"]).any()
  held_out = next(make(dataset="synthetic", vocab_size=5, length=64, global_batch=3, split="eval"))
  assert (held_out["tokens"] != batches[0]["tokens"]).any()


def test_every_epoch_has_every_document(make, path):
  source = make(dataset_path=path, packing=False, length=64, global_batch=8)
  first, second = texts_of(take(source, 5)), texts_of(take(source, 5))
  assert sorted(first) == sorted(second) == sorted(TEXTS)
  assert first != second
  assert first != TEXTS


def test_progress_counts_what_was_given_and_not_what_lies_in_the_shuffle_buffer(make, path):
  keys = {"dataset_path": path, "length": 64, "global_batch": 1, "eval_interval": 0, "epochs": 2}
  source, seen = make(**keys), []
  for _ in range(source.rows):
    next(source)
    seen.append(source.progress()["epoch"])
  assert seen == pytest.approx([2 * (i + 1) / source.rows for i in range(source.rows)], abs=0.05)
  assert seen[-1] == 2
  begun, resumed = make(**keys), make(**keys)
  take(begun, 5)
  resumed.set_state(begun.get_state())
  next(resumed)
  assert resumed.progress()["epoch"] == seen[5]


def test_the_held_out_documents_are_never_trained_on(make, path):
  given_ = {"dataset_path": path, "packing": False, "length": 64, "global_batch": 4, "eval_fraction": 0.2}
  held_out = make(**given_, split="eval")
  batches = take(held_out, 4)
  assert texts_of(batches) == [TEXTS[i] for i in range(40) if i % 5 == 4], "in order, once"
  assert not batches[2]["segments"].any()
  assert (batches[3]["targets"] == IGNORED).all()
  held_out.reset()
  same(take(held_out, 4), batches)
  trained = texts_of(take(make(**given_), 8))
  assert sorted([*trained, *texts_of(batches)]) == sorted(TEXTS)


def test_nothing_is_held_out_where_nothing_evaluates(make, path):
  given_ = {"dataset_path": path, "packing": False, "length": 64, "global_batch": 4, "eval_fraction": 0.2}
  source = make(**given_, eval_interval=0)
  assert sorted(texts_of(take(source, 10))) == sorted(TEXTS)
  assert source.documents == {"": 40}
  evaluated, trained = make(**given_, split="eval"), make(**given_)
  assert (trained.documents, evaluated.documents) == ({"": 32}, {"": 8})
  # A run of an earlier version held out 20 % without evaluating, and its state says so.
  with pytest.raises(UserError, match=r"(?s)eval_fraction: was 0\.2, is 0\.0.*eval_interval=N the run resumes"):
    source.set_state(trained.get_state())
  old = json.loads(json.dumps(trained.get_state()))
  del old["identity"]["special_tokens_in_text"]
  trained.set_state(old)
  source.set_state(old, accept_changes=True)
  assert len(texts_of(take(source, 10))) == 40


def test_files_of_their_own_to_evaluate_on(make, path, tmp_path, caplog):
  other = write(tmp_path / "b.jsonl", ["one", "two", "three"])
  given_ = {"dataset_path": path, "eval_path": other, "packing": False, "length": 64, "global_batch": 4}
  trained, evaluated = make(**given_, dataset_documents_max=4), make(**given_, split="eval", dataset_documents_max=4)
  assert sorted(texts_of(take(trained, 1))) == sorted(TEXTS[:4])
  assert texts_of(take(evaluated, 2)) == ["one", "two", "three"]
  assert (trained.documents, evaluated.documents) == ({"": 4}, {"": 3})
  without = make(**{**given_, "eval_path": None, "eval_interval": 0}, dataset_documents_max=4)
  without.set_state(trained.get_state())  # adding or removing it leaves the training data unchanged
  with caplog.at_level(logging.WARNING):
    make(**{**given_, "eval_path": [other, path]}, split="eval")
  assert f"1 of the 2 files of data.eval_path are also trained on, such as {path}" in caplog.text
  with pytest.raises(UserError, match=r"data\.eval_path '.*nowhere': no such file"):
    make(**{**given_, "eval_path": str(tmp_path / "nowhere")}, split="eval")
  (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{\n')
  with pytest.raises(UserError, match=r"b\.jsonl:2: not valid JSON"):
    make(**given_, split="eval")
  (tmp_path / "b.jsonl").write_text("")
  with pytest.raises(UserError, match=r"^data\.eval_path: no records"):
    make(**given_, split="eval")


def test_a_file_beside_its_packed_copy_is_told(make, tmp_path, caplog):
  path = write(tmp_path / "a.jsonl", TEXTS)
  packed = tmp_path / "a.jsonl.gz"
  packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
  with caplog.at_level(logging.WARNING):
    make(dataset_path=str(tmp_path))
  assert f"data.dataset_path: both {packed} and {path} are read" in caplog.text


def test_a_packed_evaluation_pass_ends_with_padding(make, path):
  source = make(dataset_path=path, eval_fraction=0.1, split="eval", length=11, global_batch=3)
  batches = take(source, 30)
  count = sum(int((b["segments"] > 0).sum()) for b in batches)
  assert count == sum(len(TEXTS[i]) + 2 for i in range(9, 40, 10))
  assert all(b["tokens"].shape == (3, 11) for b in batches)


def test_a_state_of_when_each_process_had_a_stream_of_its_own(make, path):
  one, other = make(dataset_path=path), make(dataset_path=path)
  next(one)
  state = one.get_state()
  other.set_state(state | {"identity": state["identity"] | {"process": "0 of 1"}})
  same([next(one)], [next(other)])


@pytest.mark.parametrize(
  ("change", "line"),
  [
    ({"packing": False}, "packing: was True, is False"),
    ({"shuffle": False}, "shuffle: was True, is False"),
    ({"data_shuffle_seed": 3}, "data_shuffle_seed: was 0, is 3"),
    ({"length": 17}, "max_target_length: was 16, is 17"),
    ({"eval_fraction": 0.1}, r"eval_fraction: was 0\.0, is 0\.1"),
    ({"eval_fraction": 0.1}, r"every document was used for training, because eval_interval was not set\. .*eval_path"),
    ({"special_tokens_in_text": "parse"}, "special_tokens_in_text: was literal, is parse"),
    ({"dataset_documents_max": 20}, "documents: was 40, is 20"),
    ({"dataset": "text"}, "dataset: was jsonl, is text"),
    ({"dataset": "synthetic", "dataset_path": None}, "dataset: was jsonl, is synthetic"),
  ],
)
def test_a_changed_setting_is_refused_by_name(make, path, change, line):
  state = make(dataset_path=path).get_state()
  with pytest.raises(UserError, match=line):
    make(**{"dataset_path": path, **change}).set_state(state)


def test_changed_files_are_refused_by_name_or_accepted(make, tmp_path, caplog):
  a, b = write(tmp_path / "a.jsonl", TEXTS[:9]), write(tmp_path / "b.jsonl", TEXTS[9:])
  source = make(dataset_path=[a, b])
  take(source, 4)
  state = source.get_state()
  write(tmp_path / "b.jsonl", [*TEXTS[9:], "appended"])
  changed = make(dataset_path=[a, b])
  with pytest.raises(UserError, match=r"files b\.jsonl: was \d+ bytes, xxh3 \w+, is \d+ bytes") as caught:
    changed.set_state(state)
  assert "a.jsonl" not in str(caught.value)
  with caplog.at_level(logging.WARNING):
    changed.set_state(state, accept_changes=True)
  assert "b.jsonl" in caplog.text
  assert next(changed)["tokens"].shape == (2, 16)
  unpacked = make(dataset_path=[a, b], packing=False)
  unpacked.set_state(state, accept_changes=True)
  fresh = make(dataset_path=[a, b], packing=False)
  same(take(unpacked, 3), take(fresh, 3))


def test_the_policy_for_bad_records_may_change_on_resume(make, path):
  source = make(dataset_path=path)
  take(source, 2)
  resumed = make(dataset_path=path, on_bad_record="skip")
  resumed.set_state(source.get_state())
  same(take(resumed, 3), take(source, 3))


@pytest.mark.parametrize("damage", [None, [], {}, {"identity": 3, "state": 3}])
def test_a_damaged_state(make, path, damage):
  with pytest.raises(UserError, match="data state is damaged"):
    make(dataset_path=path).set_state(damage)


def test_a_damaged_position(make, path):
  source = make(dataset_path=path)
  for broken in ({"rows": {}, "ended": False}, {"rows": None, "ended": False}, {}):
    with pytest.raises(UserError, match="data state is damaged"):
      source.set_state({"identity": source.identity, "state": broken})


def test_bad_records_end_to_end(make, tmp_path, caplog):
  lines = (json.dumps({"text": text}) for text in TEXTS)
  bad = tmp_path / "bad.jsonl"
  bad.write_text("\n".join([*lines, '{"text": 3}', "{", '{"text": "cut']))
  with pytest.raises(UserError, match=r"(?s)3 bad records among the 43.*bad\.jsonl:41: .*bad\.jsonl:43: .*on_bad_record=skip"):
    make(dataset_path=str(bad))
  with caplog.at_level(logging.WARNING):
    source = make(dataset_path=str(bad), on_bad_record="skip", packing=False, global_batch=4, length=64)
    read = texts_of(take(source, 20))
  assert sorted(read) == sorted(TEXTS * 2)
  assert source.counts()["bad"] == 3
  assert caplog.text.count("bad record skipped") == 3


def test_too_many_bad_records(make, tmp_path):
  bad = tmp_path / "bad.jsonl"
  bad.write_text('{"text": "good"}\n' + "{\n" * 30)
  with pytest.raises(
    UserError, match=r"30 bad records among the 31 of data.dataset_path, more than on_bad_record=skip accepts"
  ):
    make(dataset_path=str(bad), on_bad_record="skip")
  bad.write_text("{\n" * 3)
  with pytest.raises(UserError, match=r"3 bad records among the 3 of data.dataset_path:\n"):
    make(dataset_path=str(bad), on_bad_record="skip")


def test_less_than_one_batch(make, tmp_path):
  small = write(tmp_path / "a.jsonl", ["hello", "", "world"])
  with pytest.raises(UserError, match=r"3 documents \(1 empty, 0 bad\), 14 tokens fill 1 rows of max_target_length=8"):
    make(dataset_path=small, length=8, global_batch=2)
  assert next(make(dataset_path=small, length=7, global_batch=2))["segments"].all()
  with pytest.raises(UserError, match=r"less than one global batch: .* they fill 2 rows"):
    make(dataset_path=small, length=8, global_batch=3, packing=False)
  with pytest.raises(UserError, match="no token to learn in any of the 2 documents: 2 are empty"):
    make(dataset_path=write(tmp_path / "b.jsonl", ["", " \n "]))
  with pytest.raises(
    UserError,
    match=r"the eval split has none of the 3 documents \(eval_fraction=0\.1\)\n  fix: eval_fraction=0\.5, ",
  ):
    make(dataset_path=small, eval_fraction=0.1, split="eval")
  with pytest.raises(UserError, match=r"3 rows\n  fix: max_target_length=4, epochs=1 instead of steps or add data"):
    make(dataset_path=small, length=8, global_batch=3)


@pytest.mark.parametrize(
  ("documents", "fix"),
  [
    (1, "eval_interval=0 keep_best=false"),
    (2, "eval_fraction=0.5, "),
    (40, "eval_fraction=0.05, "),
    (10, "eval_fraction=0.1, "),
  ],
)
def test_a_share_that_holds_out_a_document_is_suggested(make, tmp_path, documents, fix):
  path = write(tmp_path / "a.jsonl", ["hello"] * documents)
  with pytest.raises(UserError) as caught:
    make(dataset_path=path, eval_fraction=0.02, split="eval")
  assert f"\n  fix: {fix}" in str(caught.value)
  if word := fix.rpartition("eval_fraction=")[2].rstrip(", ") if "fraction" in fix else "":
    next(make(dataset_path=path, eval_fraction=float(word), split="eval"))


def test_wrong_sources(make, path):
  with pytest.raises(UserError, match="dataset=python-stdlib reads no files"):
    make(dataset="python-stdlib", dataset_path=path)
  with pytest.raises(UserError, match="expected one of python-stdlib, text, jsonl, parquet, arrow, arrayrecord, synthetic"):
    make(dataset="c4")
  with pytest.raises(ValueError, match="split is 'test'"):
    make(dataset_path=path, split="test")
  with pytest.raises(UserError, match=r"259 token ids, more than model.vocab_size=100"):
    make(dataset_path=path, vocab_size=100)


@pytest.mark.parametrize("token", [259, -1, 2**40])
def test_a_token_outside_the_vocabulary_never_reaches_the_device(make, path, monkeypatch, token):
  class Liar(BytesTokenizer):
    def encode(self, text):
      return [*super().encode(text)[:3], token] if text.startswith("07") else super().encode(text)

  monkeypatch.setattr(loader, "load_tokenizer", lambda *_: Liar())
  message = rf"a\.jsonl:8: token 4 has id {token}: the vocabulary has ids 0 to 258"
  with pytest.raises(UserError, match=message):
    take(make(dataset_path=path, on_bad_record="skip"), 60)


def test_a_token_without_a_row_in_a_smaller_table_never_reaches_the_device(make, path):
  """The smaller table is that of the per-layer embeddings. A placeholder is looked up as padding, whatever its id is."""
  b = ord("b") + 3
  with pytest.raises(UserError, match=rf"token \d+ has id \d+: the per-layer embedding has rows for ids 0 to {b - 2}"):
    take(make(dataset_path=path, lookup=Lookup(vocab_size=259, per_layer_rows=b - 1)), 1)
  higher = tuple(range(b - 1, 259))
  rows = take(make(dataset_path=path, lookup=Lookup(vocab_size=259, per_layer_rows=b - 1, placeholders=higher)), 1)
  assert max(row["tokens"].max() for row in rows) >= b - 1
  drawn = take(make(dataset="synthetic", lookup=Lookup(vocab_size=259, per_layer_rows=7)), 3)
  assert max(row["tokens"].max() for row in drawn) == 6


def test_text_files_have_bos_and_eos_at_their_ends_only(make, tmp_path, monkeypatch):
  monkeypatch.setattr(TextFiles.__init__, "__kwdefaults__", {"piece_bytes": 8, "skip_undecodable": False})
  (tmp_path / "a.txt").write_text("0123456\n" * 3)
  source = make(dataset="text", dataset_path=str(tmp_path), shuffle=False, length=13, global_batch=2)
  tokens = next(source)["tokens"].ravel().tolist()
  assert tokens == [2, *BytesTokenizer().encode("0123456\n" * 3), 1]


def test_the_default_data_start_quickly(make):
  started = time.process_time()
  source = make(dataset="python-stdlib", length=2048, global_batch=8, eval_fraction=0.05)
  batch = next(source)
  assert time.process_time() - started < 10  # 0.3 s on the machine where the test was written
  assert batch["segments"].all()
  assert "def " in BytesTokenizer().decode(batch["tokens"].ravel())
  same([batch], [next(make(dataset="python-stdlib", length=2048, global_batch=8, eval_fraction=0.05))])


def test_closing(make, path):
  source = make(dataset_path=path)
  next(source)
  source.close()
  source.close()
  assert not [thread for thread in threading.enumerate() if thread.name == "maxtext-like-data"]
  for use in (lambda: next(source), lambda: source.set_state(source.get_state()), source.reset):
    with pytest.raises(ValueError, match="closed"):
      use()


def test_storage_errors_are_retryable(make, path, monkeypatch):
  source = make(dataset_path=path)

  def fail(*_):
    raise RetryableError("a.jsonl: reading failed: [Errno 5] Input/output error")

  monkeypatch.setattr(jsonl.JsonLines, "read", fail)
  with pytest.raises(RetryableError, match="Errno 5"):
    take(source, 500)


def test_the_configuration_has_the_fields_that_the_pipeline_reads(make):
  import dataclasses

  from maxtext_like.config.data_keys import DataConfig

  read = {name for name, member in vars(sources.DataConfig).items() if isinstance(member, property)}
  assert len(read) == 17
  assert read <= {field.name for field in dataclasses.fields(DataConfig)}


def test_a_source_that_never_answers_has_the_limit_it_was_given(make, path, monkeypatch):
  answer, encode = threading.Event(), BytesTokenizer.encode
  source = make(dataset_path=path, stall_limit_seconds=0.6)
  monkeypatch.setattr(BytesTokenizer, "encode", lambda *given, **keys: (answer.wait(20), encode(*given, **keys))[1])
  with pytest.raises(RetryableError, match=r"no batch for 1 s: the data source is stalled"):
    take(source, 1000)
  answer.set()


def test_a_wait_that_is_left_moves_nothing(make, path, monkeypatch):
  """An exception of `waiting` ends next(), and also set_state while the thread hangs. The state does not change."""
  answer, left, encode = threading.Event(), [], BytesTokenizer.encode

  def waiting():
    left.append(None)
    raise KeyboardInterrupt

  source = make(dataset_path=path, waiting=waiting)
  fluent = make(dataset_path=path)
  monkeypatch.setattr(BytesTokenizer, "encode", lambda *given, **keys: (answer.wait(30), encode(*given, **keys))[1])
  taken = []
  with pytest.raises(KeyboardInterrupt):
    taken.extend(source)
  state = source.get_state()
  monkeypatch.setattr(loader.Prefetch.stop, "__defaults__", (0.05,))
  with pytest.raises(KeyboardInterrupt):
    source.set_state(state)
  assert source.get_state() == state
  assert len(left) == 2
  answer.set()
  monkeypatch.undo()
  same(taken, take(fluent, len(taken)))
  assert state == fluent.get_state()
