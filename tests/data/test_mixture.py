"""Mixtures of sources: shares of the tokens, exact resume, separate passes, reported changes, refusals."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from maxtext_like.data.pack import KEYS
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer
from maxtext_like.errors import UserError

LETTERS = {"code": "c", "news": "n", "web": "w"}


def write(path, texts):
  path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  return str(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
  """The texts of each source repeat one letter: 9 short documents, 20 of all lengths, 40 longer ones."""
  folder, sizes = (
    tmp_path_factory.mktemp("sources"),
    {"code": [3] * 9, "news": range(1, 21), "web": [30 + i for i in range(40)]},
  )
  return {name: write(folder / f"{name}.jsonl", [LETTERS[name] * size for size in sizes[name]]) for name in sizes}


WEIGHTS = {"web": 6.0, "code": 1.0, "news": 3.0}


def tokens_of(batches):
  """Returns the tokens of each source in rows, including bos and eos of its documents."""
  found = dict.fromkeys(LETTERS, 0)
  for batch in batches:
    for row, segments in zip(batch["tokens"], batch["segments"], strict=True):
      for segment in range(1, segments.max() + 1):
        ids = row[segments == segment]
        text = BytesTokenizer().decode(ids)
        for name, letter in LETTERS.items():
          found[name] += len(ids) * (letter in text)
  return found


def take(source, steps):
  return [next(source) for _ in range(steps)]


def same(first, second):
  for a, b in zip(first, second, strict=True):
    for key in KEYS:
      np.testing.assert_array_equal(a[key], b[key])


def test_each_source_has_its_share_of_the_tokens(make, paths, caplog):
  with caplog.at_level(logging.WARNING):
    source = make(dataset_path=paths, dataset_weights=WEIGHTS, length=64, global_batch=16)
    batches = take(source, 24)
  read = source.progress()
  total = sum(read[f"tokens/{name}"] for name in LETTERS)
  for name, weight in WEIGHTS.items():
    assert abs(read[f"tokens/{name}"] - total * weight / 10) <= 72, "one document of the longest"
  assert read["epoch/code"] == source.counts()["documents/code"] / 9 > 30
  assert read["epoch/web"] == source.counts()["documents/web"] / 40 > 5
  assert sum(source.counts()[f"documents/{name}"] for name in LETTERS) == source.counts()["documents"]
  assert "starting pass 2 over the 9 documents of code" in caplog.text
  assert "pass 3 over" not in caplog.text
  assert "starting pass 32 over the 9 documents of code" in caplog.text
  shares = tokens_of(batches)
  np.testing.assert_allclose([shares[name] / sum(shares.values()) for name in WEIGHTS], [0.6, 0.1, 0.3], atol=0.02)


def test_documents_that_are_cut_count_what_is_used(make, paths):
  source = make(dataset_path=paths, dataset_weights=dict.fromkeys(LETTERS, 1), length=8, global_batch=30, packing=False)
  used = tokens_of(take(source, 8))
  assert max(used.values()) - min(used.values()) <= 8


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_resume_is_bitwise(make, paths, data):
  keys = {
    "dataset_path": paths,
    "dataset_weights": {name: data.draw(st.floats(0.1, 9)) for name in paths},
    "packing": data.draw(st.booleans()),
    "shuffle": data.draw(st.booleans()),
    "eval_fraction": data.draw(st.sampled_from([0.0, 0.2])),
    "length": data.draw(st.sampled_from([7, 33])),
  }
  batch, steps = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 40))
  unbroken = make(**keys, global_batch=batch)
  take(unbroken, steps)
  state = json.loads(json.dumps(unbroken.get_state()))
  rest = take(unbroken, 6)
  keys["dataset_path"] = dict(reversed(paths.items()))  # the order in which the sources are written has no effect
  resumed, other = make(**keys, global_batch=batch), make(**keys, global_batch=1)
  resumed.set_state(state)
  assert resumed.get_state() == state
  same(take(resumed, 6), rest)
  assert resumed.counts() == unbroken.counts()
  other.set_state(state)
  rows = take(other, 6 * batch)
  for key in KEYS:
    np.testing.assert_array_equal(np.concatenate([b[key] for b in rows]), np.concatenate([b[key] for b in rest]))
  for source in (unbroken, resumed, other):
    source.close()


def test_other_weights_are_refused_by_name_or_count_from_there_on(make, paths, caplog):
  def mixed(weights, length=16):
    return make(dataset_path={name: paths[name] for name in weights}, dataset_weights=weights, length=length, shuffle=False)

  source = mixed({"web": 9, "code": 1})
  take(source, 100)
  state, before = source.get_state(), source.progress()
  changed = mixed({"web": 1, "code": 9})
  with pytest.raises(UserError, match=r"weights code: was 1, is 9\n  weights web: was 9, is 1\n.*allow_data_change=true"):
    changed.set_state(state)
  with caplog.at_level(logging.WARNING):
    changed.set_state(state, accept_changes=True)
  assert "weights code: was 1, is 9" in caplog.text
  take(changed, 100)
  read = {name: changed.progress()[f"tokens/{name}"] - before[f"tokens/{name}"] for name in ("web", "code")}
  assert read["code"] > 8 * read["web"] > 0, "from there on, whatever was read before"
  more = mixed({"web": 1, "code": 1, "news": 2})
  more.set_state(state, accept_changes=True)
  assert more.counts()["documents/news"] == 0
  assert 0 <= source.counts()["documents/web"] - more.counts()["documents/web"] <= 1, "the document that was being read"
  take(more, 10)
  alone = make(dataset_path=paths["web"], shuffle=False)
  with pytest.raises(UserError, match=r"sources: was .*, is absent"):
    alone.set_state(state)
  alone.set_state(state, accept_changes=True)
  same(take(alone, 3), take(make(dataset_path=paths["web"], shuffle=False), 3))
  more.set_state(alone.get_state(), accept_changes=True)
  assert more.counts()["documents"] == 0


def test_each_source_is_evaluated_by_itself(make, paths, tmp_path):
  keys = {"dataset_path": paths, "dataset_weights": WEIGHTS, "packing": False, "length": 80, "global_batch": 4}
  held_out = make(**keys, eval_fraction=0.2, split="eval", source="web")
  assert held_out.documents == {"web": 8}
  assert tokens_of(take(held_out, 3)) == {"web": sum(32 + i for i in range(4, 40, 5)), "code": 0, "news": 0}
  trained = make(**keys, eval_fraction=0.2)
  assert trained.documents == {"web": 32, "code": 8, "news": 16}
  with pytest.raises(ValueError, match="one of code, news, web"):
    make(**keys, eval_fraction=0.2, split="eval")
  with pytest.raises(UserError, match=r"the eval split has none of the 9 documents of code \(eval_fraction=0\.1\)"):
    make(**keys, eval_fraction=0.1, split="eval", source="code")
  own = write(tmp_path / "own.jsonl", ["own"])
  assert make(**keys, eval_path={"own": own, "web": paths["web"]}, split="eval", source="own").documents == {"own": 1}
  assert make(**keys, eval_path=own, split="eval", source="").documents == {"": 1}


@pytest.mark.parametrize("named", ["file", "folder"])
def test_a_source_may_be_of_another_kind_of_files(make, paths, tmp_path, named):
  (tmp_path / "web").mkdir()
  texts = [json.loads(line)["text"] for line in Path(paths["web"]).read_text().splitlines()]
  other = tmp_path / "web" / "texts.parquet"
  parquet.write_table(pyarrow.table({"text": texts}), other)
  other = str(other if named == "file" else other.parent)
  keys = {"dataset_weights": WEIGHTS, "eval_fraction": 0.2}
  mixed, plain = make(dataset_path=paths | {"web": other}, **keys), make(dataset_path=paths, **keys)
  same(take(mixed, 20), take(plain, 20))
  held_out = {"split": "eval", "source": "web"}
  same(
    take(make(dataset_path=paths | {"web": other}, **keys, **held_out), 2),
    take(make(dataset_path=paths, **keys, **held_out), 2),
  )
  own = {"eval_path": other, "split": "eval", "source": ""}
  assert make(dataset_path=paths["code"], **own).documents == {"": 40}


def test_files_of_a_folder_that_are_not_read_are_told(make, paths, tmp_path, caplog):
  shutil.copy(paths["web"], tmp_path / "web.jsonl")
  for name in ("a.parquet", "b.parquet", "c.json", "d.txt", ".e.parquet"):
    (tmp_path / name).touch()
  with caplog.at_level(logging.WARNING):
    make(dataset_path=str(tmp_path))
    make(dataset_path=str(tmp_path))
  told = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
  assert told == [
    f"data.dataset_path: 1 files *.json in {tmp_path} are not read, because dataset is jsonl",
    f"data.dataset_path: 2 files *.parquet in {tmp_path} are not read, because dataset is jsonl",
  ]


def test_sources_that_cannot_be_mixed(make, paths, tmp_path):
  both = {"web": paths["web"], "code": [paths["code"], paths["web"]]}
  with pytest.raises(
    UserError, match=r"data.dataset_path: .*web\.jsonl is in two sources, code and web\n  fix: name it in one"
  ):
    make(dataset_path=both, dataset_weights={"web": 1, "code": 1})
  (tmp_path / "web.parquet").write_bytes(b"PAR1")
  with pytest.raises(UserError, match=r"web\.parquet is a file for dataset=parquet, but it is read with dataset=jsonl\n  fix"):
    make(dataset_path=[paths["web"], str(tmp_path / "web.parquet")])
  empty = write(tmp_path / "empty.jsonl", ["", " ", "", ""])
  with pytest.raises(
    UserError, match=r"data\.dataset_path\.blank: no token to learn in any of the 4 documents.*\n  fix: leave blank out"
  ):
    make(dataset_path={"web": paths["web"], "blank": empty}, dataset_weights={"web": 1000, "blank": 1})
  (tmp_path / "none.jsonl").write_text("")
  with pytest.raises(UserError, match=r"data\.dataset_path\.none: no records: 1 file\(s\), 0 bytes"):
    make(dataset_path={"web": paths["web"], "none": str(tmp_path / "none.jsonl")}, dataset_weights={"web": 1, "none": 1})
  with pytest.raises(UserError, match=r"data\.dataset_path\.lost '/nowhere': no such file or folder"):
    make(dataset_path={"web": paths["web"], "lost": "/nowhere"}, dataset_weights={"web": 1, "lost": 1})
  (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{\n')
  with pytest.raises(UserError, match=r"bad\.jsonl:2: not valid JSON"):
    make(dataset_path={"web": paths["web"], "bad": str(tmp_path / "bad.jsonl")}, dataset_weights={"web": 1, "bad": 1})
