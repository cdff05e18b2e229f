"""Texts with images from every kind of file whose records have fields: equal rows, no image dropped without a warning."""

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
from maxtext_like.errors import UserError

VISION = load_config("gemma4-tiny", ["use_multimodal=true"]).config.vision
SETTINGS = {"shuffle": False, "length": 64, "global_batch": 1, "vocab_size": 512, "packing": False, "eval_interval": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
  (tmp_path / "below").mkdir()
  Image.new("RGB", (32, 20), "blue").save(tmp_path / "below" / "a.png")
  return tmp_path


def write(folder: Path, records: list[dict[str, Any]], kind: str) -> str:
  path = folder / "below" / f"data.{kind}"
  if kind == "jsonl":
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
  elif kind == "array_record":
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
      writer.write(json.dumps(record).encode())
    writer.close()
  elif kind == "parquet":
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=1)
  else:
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
      writer.write_table(table, max_chunksize=1)
  return str(path)


def rows(make, path: str, kind: str, vision: Any = VISION, count: int = 2) -> list[dict[str, np.ndarray]]:
  data = make(**SETTINGS, dataset=kind.replace("_", ""), dataset_path=path, vision=vision)
  return [next(data) for _ in range(count)]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "array_record"])
def test_rows_are_the_same_from_every_kind_of_file(kind, make, folder: Path):
  records: list[dict[str, Any]] = [{"text": "see <image>!", "images": ["a.png"]}, {"text": "no <image>", "images": None}]
  expected = rows(make, write(folder, records, "jsonl"), "jsonl")
  assert [row["token_types"].any() for row in expected] == [True, False]
  forms = [records]
  if kind != "array_record":
    stored = {"bytes": (folder / "below" / "a.png").read_bytes(), "path": "gone.png"}
    forms += [[{"text": records[0]["text"], "image": stored}, {"text": records[1]["text"], "image": None}]]
    forms += [[{"text": records[0]["text"], "images": [stored]}, {"text": records[1]["text"], "images": []}]]
  for form in forms:
    for row, other in zip(rows(make, write(folder, form, kind), kind), expected, strict=True):
      for key, array in other.items():
        np.testing.assert_array_equal(row[key], array)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "array_record"])
def test_a_field_that_nobody_reads_is_told(kind, make, folder: Path):
  path = write(folder, [{"text": "see <image>!", "pics": ["a.png"]}], kind)
  with pytest.raises(UserError, match=r"no image is read, but 'pics' looks like images \(images_field=pics reads it"):
    rows(make, path, kind)
  (row,) = rows(make, path, kind, dataclasses.replace(VISION, images_field="pics"), 1)
  assert row["token_types"].any()


@pytest.mark.parametrize("kind", ["parquet", "arrow", "array_record"])
def test_a_model_that_takes_no_images_is_told_once(kind, make, folder: Path, caplog):
  off = dataclasses.replace(VISION, use_multimodal=False)
  path = write(folder, [{"text": "see <image>!", "images": ["a.png"]}] * 2, kind)
  with caplog.at_level(logging.WARNING):
    found = rows(make, path, kind, off)
  assert "pixel_values" not in found[0]
  assert caplog.text.count("images (field 'images') are left out") == 1


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_other_things_are_not_read(kind, make, folder: Path):
  """From a table without images only the text column is read, in the same order as before."""
  path = write(folder, [{"text": "see <image>!", "source": "a.txt", "image_id": 7}] * 2, kind)
  data = make(**SETTINGS, dataset=kind, dataset_path=path, vision=VISION)
  plain = make(**SETTINGS, dataset=kind, dataset_path=path)
  np.testing.assert_array_equal(next(data)["tokens"], next(plain)["tokens"])


def test_bad_rows_of_tables(make, folder: Path):
  records: list[dict[str, Any]] = [{"text": None, "image": "a.png"}, {"text": "<image>", "image": "gone.png"}]
  records += [{"text": "<image>", "image": "../a.png"}, {"text": "none", "image": "a.png"}]
  with pytest.raises(UserError) as error:
    rows(make, write(folder, records, "parquet"), "parquet")
  for said in (
    "row group 0, row 0: field 'text' is null",
    "gone.png: no such file",
    "row group 2, row 0: image: image '../a.png' is outside the folder",
    "row group 3, row 0: the text has 0 '<image>', but the record has 1 images",
  ):
    assert said in str(error.value)
