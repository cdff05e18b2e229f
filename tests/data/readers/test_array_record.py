"""ArrayRecord files: three forms of records, groups, damage; and tf.train.Example encoded independently."""

import contextlib
import json
import os
import re
import sys
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.data.documents import BadRecordError, Record
from maxtext_like.data.readers import array_record
from maxtext_like.data.readers.array_record import ArrayRecord
from maxtext_like.errors import UserError

TEXTS = [f"number {i} " + "é" * (i * 7 % 13) for i in range(25)]


def write(path, records, options="group_size:1"):
  writer = ArrayRecordWriter(str(path), options)
  for record in records:
    writer.write(record)
  writer.close()
  return str(path)


def _example_type():
  """Returns tf.train.Example as TensorFlow's example.proto and feature.proto declare it, built with Google's library."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")

  def message(name, *fields, within=None):
    made = (file.message_type if within is None else within.nested_type).add(name=name)
    for number, (field, label, kind) in enumerate(fields, 1):
      made.field.add(
        name=field, number=number, label=label, **({"type": kind} if isinstance(kind, int) else {"type": 11, "type_name": kind})
      )
    return made

  one, many = 1, 3
  message("BytesList", ("value", many, 12))
  message("FloatList", ("value", many, 2))
  message("Int64List", ("value", many, 3))
  lists = ("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")
  feature = message("Feature", *((field, one, f".tensorflow.{kind}") for field, kind in lists))
  feature.oneof_decl.add(name="kind")
  for field in feature.field:
    field.oneof_index = 0
  features = message("Features", ("feature", many, ".tensorflow.Features.FeatureEntry"))
  entry = message("FeatureEntry", ("key", one, 9), ("value", one, ".tensorflow.Feature"), within=features)
  entry.options.map_entry = True
  message("Example", ("features", one, ".tensorflow.Features"))
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


Example: Any = _example_type()


def example(**features):
  made = Example()
  for name, value in features.items():
    feature = made.features.feature[name]
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str):
      feature.bytes_list.value.extend(text.encode() for text in values)
    else:
      (feature.int64_list if isinstance(values[0], int) else feature.float_list).value.extend(values)
  return made.SerializeToString()


FORMS = {
  "tf.train.Example": [example(id=[i, -i], score=0.5, text=text) for i, text in enumerate(TEXTS)],
  "JSON": [json.dumps({"text": text, "id": 1}).encode() for text in TEXTS],
  "text": [text.encode() for text in TEXTS],
}


@pytest.mark.parametrize("options", ["group_size:1", "group_size:4"])
@pytest.mark.parametrize("form", FORMS)
def test_the_three_forms(tmp_path, form, options, monkeypatch):
  monkeypatch.setattr(array_record, "OPEN_FILES", 1)
  records = FORMS[form]
  paths = [write(tmp_path / "a.array_record", records[:9], options), write(tmp_path / "b.array_record", records[9:], options)]
  documents = ArrayRecord(paths, "text")
  assert documents.form == form
  assert [getattr(record, "text", None) for record in documents.scan()] == TEXTS
  assert [documents.read(i).text for i in (24, 0, 9, 8)] == [TEXTS[i] for i in (24, 0, 9, 8)]
  assert documents.place(10) == f"{paths[1]}, record 1"
  assert documents.groups == (None if options == "group_size:1" else [0, 4, 8, 9, 13, 17, 21])
  assert documents.fingerprint()["records are"] == form


def test_bad_records(tmp_path, monkeypatch):
  wrong = {
    "tf.train.Example": [
      (example(body="x"), "no feature 'text'; features: 'body'"),
      (example(text=3), "integers, expected one text"),
    ],
    "JSON": [
      (b'{"text": "cut', "not valid JSON: .*but the first records are JSON"),
      (b'{"text": 3}', "is int, expected a str"),
    ],
    "text": [(b"\xff\xfe", "not UTF-8 at byte 0")],
  }
  wrong["tf.train.Example"].append((example(text="x")[:-1], "a field of"))
  wrong["JSON"].append((b'{"body": ""}', "not an object with the field 'text'"))
  for form, cases in wrong.items():
    path = write(tmp_path / f"{form}.array_record", [*FORMS[form], *(record for record, _ in cases), b""])
    *_, empty = found = list(ArrayRecord([path], "text").scan())
    assert empty == Record("")
    for bad, (_, reason) in zip(found[len(TEXTS) : -1], cases, strict=True):
      assert re.search(rf"array_record, record \d+: .*{reason}", str(bad))
  monkeypatch.setattr(array_record, "MAX_RECORD_BYTES", 9)
  with pytest.raises(BadRecordError, match="bytes, more than the limit of 9"):
    ArrayRecord([path], "text").read(3)


def test_no_such_field(tmp_path):
  for form, names in (("JSON", "'text', 'id'"), ("tf.train.Example", "'(id|text|score)'")):
    with pytest.raises(UserError, match=rf"records are {form} without 'body' \(data.text_field\); fields: {names}"):
      ArrayRecord([write(tmp_path / "a.array_record", FORMS[form])], "body")


def test_files_that_are_none_or_change(tmp_path):
  with pytest.raises(UserError, match=r"data.eval_path: no records: 1 array_record file\(s\), 0 records"):
    ArrayRecord([write(tmp_path / "a.array_record", [])], "text", key="eval_path")
  path = tmp_path / "b.array_record"
  write(path, FORMS["text"])
  data = path.read_bytes()
  for cut in (0, 10, len(data) // 3, len(data) // 2, len(data) - 1):
    path.write_bytes(data[:cut])
    with pytest.raises(UserError, match=r"b\.array_record: damaged, cut off or not an array_record file"):
      ArrayRecord([str(path)], "text")
  path.write_bytes(data)
  documents = ArrayRecord([str(path)], "text")
  os.utime(path, (1, 1))
  assert documents.read(3).text == TEXTS[3]
  write(path, FORMS["text"][::-1])
  with pytest.raises(UserError, match=r"b\.array_record: the file changed during the run"):
    documents.read(3)
  path.unlink()
  with pytest.raises(UserError, match="existed when the run started"):
    documents.read(3)


def test_no_flipped_byte_changes_a_text_in_silence(tmp_path):
  path = tmp_path / "a.array_record"
  write(path, FORMS["text"])
  data = path.read_bytes()
  used = np.flatnonzero(np.frombuffer(data, np.uint8))
  for at in np.random.default_rng(0).choice(used, 60).tolist():
    path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    try:
      documents = ArrayRecord([str(path)], "text")
      assert [documents.read(i).text for i in range(len(documents))] == TEXTS
    except (UserError, BadRecordError):
      pass


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=300), min_size=1, max_size=4) | st.integers(-5, 5)))
def test_messages_of_the_protocol_are_read(features):
  found = array_record.example_features(example(**features))
  assert found.keys() == features.keys()
  for name, value in features.items():
    kind, encoded = found[name]
    assert kind == ("integers" if isinstance(value, int) else "bytes")
    assert isinstance(value, int) or [text.decode() for text in array_record.bytes_values(encoded)] == value


@settings(deadline=None)
@given(st.binary(max_size=40), st.integers(0, 90))
def test_what_is_no_message_is_refused_or_read(data, cut):
  for wrong in (data, example(text="a" * 70)[:cut]):
    with contextlib.suppress(array_record.NotExampleError):
      assert isinstance(array_record.example_features(wrong), dict)


def test_a_missing_package_is_told(tmp_path, monkeypatch):
  path = write(tmp_path / "a.array_record", FORMS["text"])
  monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
  with pytest.raises(UserError, match=r"array-record, which is not installed(?s:.*)fix: .*arrayrecord"):
    ArrayRecord([path], "text")
