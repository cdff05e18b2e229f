"""The verb data marks learned tokens and reports bad records. The verb sft is train on conversations."""

import json
import sys
from pathlib import Path

import pytest

import maxtext_like
from maxtext_like.api import sft
from maxtext_like.cli.main import main
from maxtext_like.config.files import configs_folder
from maxtext_like.errors import UserError

ASKED = {"role": "user", "content": "1+1?\x1b[31m"}
RECORDS = [{"messages": [ASKED, {"role": "assistant", "content": answer}]} for answer in ("2", "two", "x" * 90)]
WORDS = ["gemma3-tiny", "data_format=chat", "dataset=jsonl", "max_target_length=96"]


@pytest.fixture
def chats(tmp_path: Path, monkeypatch) -> Path:
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  path = tmp_path / "chats.jsonl"
  path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
  return path


def test_what_is_learned_is_marked(chats, capsys):
  assert main(["data", *WORDS, f"dataset_path={chats}", "--show", "1"]) == 0
  turn = "<bos><start_of_turn>user\n1+1?\\x1b[31m<end_of_turn>\n<start_of_turn>model\n"
  assert capsys.readouterr().out.split("\n") == [
    f"--- {chats}:1: 84 tokens, 14 learned",
    *f"{turn}⟦2<end_of_turn>⟧\n".split("\n"),
    "template gemma3",
    "documents 3, 0 empty, 0 bad",
    f"tokens    {84 + 86 + 173}, {14 + 16 + 27} learned (16.6%)",
    "cut       1 truncated at max_target_length=96, 0 dropped (no learned token left)",
    "rows      3 of 96 tokens, 92.4% filled",
    "",
  ]


def test_rows_in_which_nothing_is_learned_are_a_fault(chats, capsys):
  assert main(["data", *WORDS, f"dataset_path={chats}", "--show=0", "max_target_length=64"]) == 2
  tokens, cut, rows, fault, fix = capsys.readouterr().out.splitlines()[2:]
  assert tokens == "tokens    0, 0 learned"
  assert cut.startswith("cut       0 truncated at max_target_length=64, 3 dropped")
  assert rows == "rows      0 of 64 tokens, 0.0% filled"
  assert fault.startswith("no token is learned")
  assert fix.startswith("  fix: set max_target_length above 64")
  assert fix.endswith("train_on=all")


def test_what_a_row_cuts_and_images_are_told(chats, tmp_path, capsys):
  image = pytest.importorskip("PIL.Image")
  image.new("RGB", (40, 20)).save(tmp_path / "a.png")
  shown = {"messages": [{"role": "user", "content": "<image>?"}, RECORDS[0]["messages"][1]], "images": ["a.png"]}
  chats.write_text(json.dumps(RECORDS[2]) + "\n" + json.dumps(shown) + "\n" + json.dumps([shown]) + "\n")
  assert main(["data", *WORDS, "use_multimodal=true", f"dataset_path={chats}"]) == 2
  out = capsys.readouterr().out
  cut = "learned, truncated at max_target_length=96:"
  assert f"--- {chats}:1: 173 tokens, 27 {cut} 76 more learned tokens are after the cut\n" in out
  assert f"⟦{'x' * 27}⟧\n--- truncated here; the rest is not trained on:\n{'x' * 63}<end_of_turn>\n" in out
  assert f"--- {chats}:2: 98 tokens, 13 {cut} 1 more learned tokens" in out
  assert "<start_of_turn>user\n\n\n<boi><image> x 16<eoi>\n\n?<end_of_turn>" in out
  assert (
    f"{chats}:3: the record is list, expected an object: in a file that is one list, each entry must be a separate line" in out
  )


def test_what_may_not_be_meant_is_noted(chats, capsys):
  """Notes name fields that nothing reads, thoughts that the template drops, and the number of records that a field excludes."""
  thought = RECORDS[0]["messages"][1] | {"reasoning_content": "Add."}
  turns = [ASKED, thought, ASKED, RECORDS[1]["messages"][1]]
  records = [{"messages": turns, "source": "web"}, RECORDS[0] | {"label": False}, RECORDS[1] | {"source": "web"}]
  chats.write_text("".join(json.dumps(record) + "\n" for record in records))
  words = ["chat_template=gemma4-small", "max_target_length=200", "--show=0"]
  assert main(["data", *WORDS, f"dataset_path={chats}", *words]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[1] == "documents 3, 0 empty, 0 bad"
  assert "0 dropped (no learned token left), 1 left out because of a field" in lines[3]
  assert lines[5] == "note      fields of the records that are not used: 'source' in 2 of 3 records"
  lost = "note      answers learned without their thoughts: 1 before the last user message, where the template drops"
  assert lines[6].startswith(f"{lost} thoughts (first in {chats}:1). train_on=last")


def test_of_many_bad_records_some_are_listed(chats, capsys):
  chats.write_text('{"text": "a"}\n' * 12)
  assert main(["data", *WORDS, f"dataset_path={chats}", "--show=0"]) == 2
  lines = capsys.readouterr().out.splitlines()
  assert lines[-2].startswith(f"bad       {chats}:10: ")
  assert lines[-1] == "bad       ... and 2 more"


def test_on_a_terminal_it_is_green(chats, capsys, monkeypatch):
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  monkeypatch.delenv("NO_COLOR", raising=False)
  assert main(["data", *WORDS, f"dataset_path={chats}", "--show=1"]) == 0
  assert "model\n\x1b[32m2<end_of_turn>\x1b[0m\n" in capsys.readouterr().out


def test_bad_records_are_listed(chats, capsys):
  chats.write_text(chats.read_text() + '{"text": "a"}\n')
  assert main(["data", *WORDS, f"dataset_path={chats}", "--show", "0"]) == 2
  out = capsys.readouterr().out
  assert "documents 4, 0 empty, 1 bad\n" in out
  assert f"bad       {chats}:4: no conversation: expected 'messages'" in out
  assert main(["data", *WORDS, f"dataset_path={chats}", "--show", "x"]) == 2
  assert "invalid int value: 'x'" in capsys.readouterr().err


def test_text_and_several_sources(chats, tmp_path, capsys):
  found = maxtext_like.look_at_data("gemma3-tiny", show=1, documents=2, max_target_length=32)
  assert found.template is None
  assert [learned for _, learned in found.records[0].parts] == [False, True]
  counts = found.counts[""]
  assert (counts.documents, counts.available > 100, counts.filled > 0.9) == (2, True, True)
  other = tmp_path / "other.jsonl"
  other.write_text(chats.read_text())
  path = {"dataset_path": {"a": str(chats), "b": str(other)}, "dataset_weights": {"a": 1, "b": 2}}
  found = maxtext_like.look_at_data("gemma3-tiny", dataset="jsonl", data_format="chat", show=1, **path)
  assert found.counts.keys() == {"a", "b"}
  assert len(found.records) == 2
  with pytest.raises(UserError, match="show=-1: not an integer of 0 or more"):
    maxtext_like.look_at_data("gemma3-tiny", show=-1)
  with pytest.raises(UserError, match="dataset=synthetic has no text"):
    maxtext_like.look_at_data("gemma3-tiny", dataset="synthetic")


@pytest.mark.parametrize("there", ["a.parquet", "sub/a.parquet", "data-00000-of-00001.arrow", "a.jsonl", "a.jsonl.gz"])
def test_sft_looks_into_folders_and_overlays_for_the_kind_of_files(there, tmp_path, monkeypatch):
  (tmp_path / "d" / there).parent.mkdir(parents=True)
  (tmp_path / "d" / there).touch()
  taken = []
  monkeypatch.setattr(sft, "train", lambda loaded, **_: taken.append(loaded.config.data.dataset))
  overlay = tmp_path / "over.yml"
  overlay.write_text(f"data:\n  dataset_path: {tmp_path}/d\n")
  for words in ([f"dataset_path={tmp_path}/d"], [str(overlay)], [f"dataset_path={tmp_path}/d/**/*"]):
    assert main(["sft", "gemma3-tiny", *words]) == 0
  assert taken == [next(kind for kind in ("parquet", "arrow", "jsonl") if kind in there)] * 3


def test_sft_takes_no_kind_of_several_in_a_folder(tmp_path, capsys):
  for name in ("a.parquet", "b.jsonl"):
    (tmp_path / name).touch()
  assert main(["sft", "gemma3-tiny", f"dataset_path={tmp_path}"]) == 2
  assert "has files of several kinds: parquet, jsonl\n  fix: " in capsys.readouterr().err


def test_sft_needs_nothing_of_the_file_that_words_give(tmp_path, monkeypatch, capsys):
  """As with ``train``, arguments may add what files lack: base.yml has no model, and the overlay has fewer positions than the
  default length."""
  taken = []
  monkeypatch.setattr(sft, "train", lambda loaded, **_: taken.append(loaded.config))
  (tmp_path / "a.jsonl").touch()
  words = [f"dataset_path={tmp_path}/a.jsonl", "max_target_length=64"]
  assert main(["sft", str(configs_folder() / "base.yml"), "model_name=gemma3-tiny", *words]) == 0
  overlay = tmp_path / "short.yml"
  overlay.write_text("model:\n  max_position_embeddings: 128\n")
  assert main(["sft", "gemma3-tiny", str(overlay), *words]) == 0
  assert [config.training.max_target_length for config in taken] == [64, 64]
  assert main(["sft", "gemma3-tiny", *words, "lora_rnk=3"]) == 2
  assert "lora_rnk" in capsys.readouterr().err


def test_data_takes_the_words_of_sft(chats, capsys):
  words = ["gemma3-tiny", f"dataset_path={chats}", "max_target_length=96", "--show", "1"]
  assert main(["data", *words]) == 2  # without --sft, the kind of data must be set
  capsys.readouterr()
  assert main(["data", "--sft", *words]) == main(["data", *words, "dataset=jsonl", "data_format=chat"])
  assert "template gemma3" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("words", "expected"),
  [
    (["dataset_path=a.jsonl"], ("chat", "jsonl")),
    (["dataset_path=[a.parquet, b.parquet]"], ("chat", "parquet")),
    (["dataset_path=folder", "dataset=arrow"], ("chat", "arrow")),
  ],
)
def test_sft_is_train_on_conversations(words, expected, monkeypatch):
  taken = []
  monkeypatch.setattr(sft, "train", lambda loaded, **_: taken.append(loaded.config))
  assert main(["sft", "gemma3-tiny", *words, "train_on=last"]) == 0
  assert (taken[0].data.data_format, taken[0].data.dataset) == expected
  assert taken[0].data.train_on == "last"
