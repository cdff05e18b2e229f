"""Every record is validated before the first step: all bad ones are listed, and findings are stored for the same data."""

import json
import logging
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from maxtext_like.data import validate
from maxtext_like.data.readers.jsonl import JsonLines
from maxtext_like.errors import UserError

GOOD = [json.dumps({"text": f"record {i}"}) for i in range(400)]


def write(path: Path, lines: list[str]) -> str:
  path.write_text("".join(line + "\n" for line in lines))
  return str(path)


def spoilt(*numbers: int) -> list[str]:
  return ['{"text": 3}' if i in numbers else line for i, line in enumerate(GOOD)]


@pytest.fixture
def scans(monkeypatch):
  """Has one entry for each validation of the records."""
  counted = []

  def scan(self, before=JsonLines.scan):
    counted.append(self)
    return before(self)

  monkeypatch.setattr(JsonLines, "scan", scan)
  return counted


def test_every_bad_record_is_listed_at_once(make, tmp_path):
  path = write(tmp_path / "a.jsonl", spoilt(*range(300, 312)))
  with pytest.raises(UserError) as refused:
    make(dataset_path=path)
  lines = str(refused.value).splitlines()
  assert lines[0] == "12 bad records among the 400 of data.dataset_path:"
  reason = "field 'text' is int, expected a string"
  assert lines[1:11] == [f"  {path}:{301 + i}: {reason}" for i in range(10)]
  assert lines[11:] == ["  ... and 2 more", "  fix: repair the records: there are too many to skip them"]
  path = write(tmp_path / "b.jsonl", spoilt(300))
  with pytest.raises(UserError, match=f"^{path}:301: {reason}\n  fix: repair the record, or on_bad_record=skip"):
    make(dataset_path=path)
  make(dataset_path=path, dataset_documents_max=300)


def test_skipping_is_told_with_the_number_and_has_its_limit(make, tmp_path, caplog):
  path = write(tmp_path / "a.jsonl", spoilt(*range(20, 30)))
  with caplog.at_level(logging.WARNING):
    source = make(dataset_path=path, on_bad_record="skip", packing=False, length=32, global_batch=8)
  assert f"data.dataset_path: 10 of 400 records are bad and are left out; the first: {path}:21: field" in caplog.text
  for _ in range(50):
    next(source)
  assert source.counts()["bad"] == 10
  with pytest.raises(
    UserError, match=r"11 bad records among the 400 of data.dataset_path, more than on_bad_record=skip accepts \(10"
  ):
    make(dataset_path=write(tmp_path / "b.jsonl", spoilt(*range(20, 31))), on_bad_record="skip")


def test_what_was_found_is_kept_until_the_data_change(make, tmp_path, scans, cache):
  path = write(tmp_path / "a.jsonl", GOOD)
  for _ in range(3):
    make(dataset_path=path)
  make(dataset_path=path, special_tokens_in_text="literal", shuffle=False, data_shuffle_seed=3)
  make(dataset_path=path, split="eval", eval_fraction=0.1)
  assert len(scans) == 1
  os.utime(path, (1, 1))
  moved = tmp_path / "elsewhere" / "a.jsonl"
  moved.parent.mkdir()
  make(dataset_path=str(Path(path).rename(moved)))
  assert len(scans) == 1
  write(moved, [*GOOD[:-1], '{"text": "other"}'])
  make(dataset_path=str(moved))
  make(dataset_path=str(moved), dataset_documents_max=100)
  assert len(scans) == 3
  write(moved, spoilt(7))
  for _ in range(2):
    with pytest.raises(UserError, match=r"a\.jsonl:8"):
      make(dataset_path=str(moved))
  assert len(scans) == 4
  with pytest.raises(UserError, match="no field 'words'"):
    make(dataset_path=str(moved), text_field="words")
  assert sorted(entry.suffix for entry in (cache / "maxtext-like" / "data").iterdir()) == [".json"] * 5


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"sum": 3}', b"\xff", None])
def test_a_damaged_entry_counts_as_none(make, tmp_path, scans, cache, content):
  path = write(tmp_path / "a.jsonl", spoilt(7))
  for _ in range(2):
    with pytest.raises(UserError, match=r"a\.jsonl:8"):
      make(dataset_path=path)
  (entry,) = (cache / "maxtext-like" / "data").iterdir()
  whole = entry.read_bytes()
  entry.write_bytes(whole.replace(b'"bad_count": 1', b'"bad_count": 0') if content is None else content)
  with pytest.raises(UserError, match=r"a\.jsonl:8"):
    make(dataset_path=path)
  assert len(scans) == 2
  assert entry.read_bytes() == whole


def test_a_place_that_cannot_be_written_is_told(make, tmp_path, scans, cache, caplog):
  (cache / "maxtext-like").write_text("a file in the way")
  path = write(tmp_path / "a.jsonl", GOOD)
  for _ in range(2):
    with caplog.at_level(logging.WARNING):
      make(dataset_path=path)
  assert len(scans) == 2
  assert "maxtext-like/data: cannot be written (Not a directory), so every start validates the data again" in caplog.text


def test_parquet_and_text_are_looked_at_too(make, tmp_path):
  table = pyarrow.table({"text": ["a", "b", None, "d", None]})
  pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
  with pytest.raises(UserError, match=r"(?s)2 bad records among the 5.*row group 1, row 0: .*row group 2, row 0: .* is null"):
    make(dataset="parquet", dataset_path=str(tmp_path / "a.parquet"))
  (tmp_path / "t").mkdir()
  for i in range(9):
    (tmp_path / "t" / f"{i}.txt").write_bytes(b"text\n\xff" if i == 5 else b"text")
  with pytest.raises(UserError, match=r"5\.txt: not UTF-8 at line 2"):
    make(dataset="text", dataset_path=str(tmp_path / "t"))


def test_a_long_look_is_told_and_counts_as_alive(make, tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(validate, "LOG_SECONDS", 0.0)
  monkeypatch.setattr(validate, "ALIVE_SECONDS", 0.0)
  lived = []
  with caplog.at_level(logging.WARNING):
    make(dataset_path=write(tmp_path / "a.jsonl", GOOD), alive=lambda: lived.append(True))
  assert len(lived) == 400
  assert "100 of 400" in caplog.text


@pytest.mark.parametrize(
  ("record", "keys", "fix"),
  [
    ({"content": "a", "id": "1"}, {}, "text_field=content"),
    ({"chapter": "a", "number": 1}, {}, "text_field=chapter"),
    ({"a": "a", "b": "b", "n": 1}, {}, "text_field=NAME, one of 'a', 'b'"),
    ({"number": 1}, {}, "dataset_path=FILES with records that have a text"),
    ({"messages": [{"role": "user", "content": "a"}]}, {}, "maxtext-like sft instead of train, or data_format=chat"),
    ({"prompt": "a", "completion": "b", "text": 1}, {}, "repair the records, or dataset_path=FILES with other records"),
    ({"text": "a"}, {"data_format": "chat", "chat_template": "gemma3"}, "data_format=text, or train instead of sft"),
    ({"n": 1}, {"data_format": "chat", "chat_template": "gemma3"}, "dataset_path=FILES with conversations"),
  ],
)
@pytest.mark.parametrize(("count", "skip"), [(3, "error"), (3, "skip"), (300, "error"), (300, "skip")])
def test_advice_fits_the_reason_for_which_all_records_are_bad(record, keys, fix, count, skip, make, tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text(f"{json.dumps(record)}\n" * count)
  with pytest.raises(UserError) as refused:
    make(dataset_path=str(path), on_bad_record=skip, **keys)
  said, _, advice = str(refused.value).partition("\n  fix: ")
  assert said.startswith(f"{count} bad records among the {count} of data.dataset_path")
  assert advice.startswith(fix), advice
  assert "skip" not in advice


def test_a_field_that_some_records_lack_is_advice_for_those_alone(make, tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "good"}\n' * 30 + '{"content": "a"}\n' * 20 + "{\n" * 5)
  with pytest.raises(UserError, match=r"fix: text_field=content \(for 20 of them\)$"):
    make(dataset_path=str(path))
