"""JSON lines: accepted records, and every kind of bad record with its file and line."""

import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.readers import jsonl
from maxtext_like.data.readers import lines as line_files
from maxtext_like.data.readers.jsonl import JsonLines
from maxtext_like.errors import UserError


def lines(path, content: bytes, field="text"):
  path.write_bytes(content)
  return JsonLines([str(path)], field)


def texts(documents):
  return [documents.read(i).text for i in range(len(documents))]


@settings(deadline=None)
@given(
  st.lists(st.text(st.characters(exclude_categories=("Cs",))), min_size=1, max_size=12),
  st.booleans(),
  st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
  st.booleans(),
  st.integers(1, 40),
)
def test_any_text_comes_back(tmp_path_factory, values, ascii_only, newline, terminated, chunk):
  data = newline.join(json.dumps({"text": v}, ensure_ascii=ascii_only).encode() for v in values)
  path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
  before, line_files.CHUNK_BYTES = line_files.CHUNK_BYTES, chunk
  try:
    documents = lines(path, data + newline * terminated)
  finally:
    line_files.CHUNK_BYTES = before
  assert texts(documents) == values


def test_bom_crlf_blank_lines_separators_and_no_last_newline(tmp_path):
  content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \t\n\n{"text": "b\xe2\x80\xa8c\xc2\x85d", "other": [1, {"x": null}]}\n'
  content += b'{"text":"e\\u0000"}'
  documents = lines(tmp_path / "a.jsonl", content)
  assert [text for text in texts(documents) if text] == ["a", "b\u2028c\x85d", "e\0"]
  assert documents.place(len(documents) - 1) == f"{tmp_path}/a.jsonl:6"


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    (b'{"text": "a"', r"not valid JSON: Expecting ',' delimiter \(character 12\)"),
    (b"plain text", r"not valid JSON: Expecting value \(character 0\)"),
    (b'{"text": "a"} {"text": "b"}', "not valid JSON: Extra data"),
    (b"{'text': 'a'}", "not valid JSON"),
    (b'{"text": "a\0b"}', "not valid JSON: Invalid control character"),
    (b'{"text": "\xff"}', r"not UTF-8 at byte 10 \(0xff\)"),
    (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
    (b'{"text": "ab\\ud800c"}', r"lone surrogate \(\\ud800\) at character 2"),
    (b'{"txt": "a", "id": 3}', r"no field 'text' \(data.text_field\); fields: 'txt', 'id'"),
    (b"{}", "fields: none"),
    (b'{"text": null}', "field 'text' is NoneType, expected a string"),
    (b'{"text": 5}', "field 'text' is int"),
    (b'{"text": ["a"]}', "field 'text' is list"),
    (b'["a"]', "the line is list, expected an object"),
    (b'"a"', "the line is str"),
    (b'{"text": "a", "score": NaN}', "NaN is not valid JSON"),
    (b'{"text": "a", "score": -Infinity}', "-Infinity is not valid JSON"),
    (b'{"text": "a", "text": "b"}', "'text' is listed twice"),
    (b'{"text": "a", "meta": {"k": 1, "k": 2}}', "'k' is listed twice"),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    (b'{"text": "a", "n": ' + b"[" * 200000, "nested too deeply"),
    (b"x", "not valid JSON"),
  ],
)
def test_bad_lines(tmp_path, line, reason):
  documents = lines(tmp_path / "a.jsonl", b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}\n')
  assert len(documents) == 3
  with pytest.raises(BadRecordError, match=reason) as caught:
    documents.read(1)
  assert caught.value.place == f"{tmp_path}/a.jsonl:3"
  assert (documents.read(0).text, documents.read(2).text) == ("first", "last")


def test_a_truncated_last_line_says_so(tmp_path):
  documents = lines(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "tru')
  with pytest.raises(BadRecordError, match="is the file cut off"):
    documents.read(1)


@pytest.mark.parametrize("content", [b'{"text": "tru', b"PAR1", '{"text": "a"}'.encode("utf-16"), b'{"text": 1}\r{"text": 2}'])
def test_one_bad_line_without_a_newline(tmp_path, content):
  with pytest.raises(BadRecordError, match="is the file cut off"):
    lines(tmp_path / "a.jsonl", content).read(0)


def test_a_long_line_is_refused_unread(tmp_path, monkeypatch):
  monkeypatch.setattr(jsonl, "MAX_RECORD_BYTES", 20)
  documents = lines(tmp_path / "a.jsonl", b'{"text": "123456789"}\n{"text": "12345678"}\n')
  with pytest.raises(BadRecordError, match="21 bytes, more than the limit of 20"):
    documents.read(0)
  assert documents.read(1).text == "12345678"


@pytest.mark.parametrize("content", [b"", b"\n\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_lines(tmp_path, content):
  with pytest.raises(UserError, match=rf"no records: 1 file\(s\), {len(content)} bytes"):
    lines(tmp_path / "a.jsonl", content)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("indent", [None, 1])
def test_one_list_is_refused_with_the_command_that_makes_lines(tmp_path, indent, packed):
  tmp_path = tmp_path / "of .json"
  tmp_path.mkdir()
  path, records = tmp_path / ("a.json.gz" if packed else "a.json"), [{"text": "é"}, {"text": "b"}]
  data = b"\xef\xbb\xbf\n  " + json.dumps(records, indent=indent, ensure_ascii=False).encode()
  path.write_bytes(gzip.compress(data) if packed else data)
  with pytest.raises(UserError, match=r"a\.json.*: begins with '\[' like a single JSON list") as error:
    JsonLines([str(path)], "text")
  command, then = str(error.value).split("fix: ")[1].split("; then ")
  assert then.startswith("dataset_path=")
  subprocess.run(command.replace("python", sys.executable), shell=True, check=True)
  assert texts(JsonLines([str(tmp_path / "a.lines.jsonl")], "text")) == ["é", "b"]


def test_a_line_that_is_a_list_is_one_bad_record(tmp_path):
  documents = lines(tmp_path / "a.jsonl", b'["a"]\n{"text": "b"}\n')
  with pytest.raises(BadRecordError, match="the line is list, expected an object"):
    documents.read(0)
  assert documents.read(1).text == "b"


def test_several_files_and_another_field(tmp_path):
  (tmp_path / "a.jsonl").write_bytes(b'{"body": "a"}\n{"body": "b"}\n')
  (tmp_path / "b.jsonl").write_bytes(b"")
  (tmp_path / "c.jsonl").write_bytes(b'\n{"body": "c"}\n')
  documents = JsonLines([str(tmp_path / f"{name}.jsonl") for name in "abc"], "body")
  assert texts(documents) == ["a", "b", "c"]
  assert documents.place(2).endswith("c.jsonl:2")
  before = documents.fingerprint()
  (tmp_path / "c.jsonl").write_bytes(b'\n{"body": "d"}\n')
  after = JsonLines([str(tmp_path / f"{name}.jsonl") for name in "abc"], "body").fingerprint()
  assert {name for name in before if before[name] != after[name]} == {"c.jsonl"}


@pytest.mark.parametrize(
  ("name", "content", "columns"),
  [
    ("a.csv", b'question,answer\r\n"1,1?",2\r\n', "'question', 'answer'"),
    ("a.csv", "\ufeffid;text\n1;é\n".encode(), "'id', 'text'"),
    ("a.jsonl", b"id\ttext\n1\ta\n2\tb\n", "'id', 'text'"),
    ("a b.csv", b"id,text\n", "'id', 'text'"),
    ("a.csv", b",".join(b"c%d" % i for i in range(300)) + b"\n", "'c0', 'c1', 'c2', 'c3', 'c4', 'c5', 'c6', 'c7' and 292 more"),
  ],
)
def test_a_table_is_no_json_lines_and_is_converted_by_the_fix(tmp_path, name, content, columns):
  with pytest.raises(UserError) as refused:
    lines(tmp_path / name, content)
  said, _, fix = str(refused.value).partition("\n  fix: ")
  said = said.removeprefix(f"{tmp_path / name}: looks like a table (CSV) with the columns ")
  assert said == f"{columns}, but dataset=jsonl reads one JSON object on each line"
  command, _, then = fix.partition("; then dataset_path=")
  done = subprocess.run(command, shell=True, env={"PATH": f"{Path(sys.executable).parent}:/bin"}, check=False)
  assert done.returncode == 0
  made = (tmp_path / f"{name.partition('.')[0]}.converted.jsonl").read_text()
  assert then == shlex.quote(str(tmp_path / f"{name.partition('.')[0]}.converted.jsonl"))
  assert [json.loads(line) for line in made.splitlines()] == list(TABLES.get(content, []))


TABLES = {
  b'question,answer\r\n"1,1?",2\r\n': [{"question": "1,1?", "answer": "2"}],
  b"id\ttext\n1\ta\n2\tb\n": [{"id": "1", "text": "a"}, {"id": "2", "text": "b"}],
  "\ufeffid;text\n1;é\n".encode(): [{"id": "1", "text": "é"}],
}


@pytest.mark.parametrize("content", [b'"a", "b"\n{"text": "a"}\n', b"one\ntwo\n", b"Hello, world\nHow are you?\n"])
def test_what_is_no_table_has_bad_lines(tmp_path, content):
  with pytest.raises(BadRecordError, match="not valid JSON"):
    lines(tmp_path / "a.jsonl", content).read(0)
