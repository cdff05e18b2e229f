"""Records of text and images: their tokens, refusals with file and line, and rows that never divide an image."""

import base64
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maxtext_like.config.load import load_config
from maxtext_like.config.vision import PatchVision, VisionConfig
from maxtext_like.data.image_text import multimodal
from maxtext_like.data.image_text.images import load_image, measure_image, patched_size, tower_arrays
from maxtext_like.errors import UserError

VISION = {name: load_config(name, ["use_multimodal=true"]).config.vision for name in ("gemma3-tiny", "gemma4-tiny")}
GEMMA3, GEMMA4 = VISION.values()
IMAGE, BOI, EOI, BOS, EOS = 260, 261, 262, 2, 1
SIZES = {"a.png": (32, 32), "b.png": (60, 20), "c.jpg": (15, 70)}  # height, width


def encoded(text: str) -> list[int]:
  return [byte + 3 for byte in text.encode()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
  noise = np.random.default_rng(0)
  for name, size in SIZES.items():
    Image.fromarray(noise.integers(0, 256, (*size, 3), np.uint8)).save(tmp_path / name)
  return tmp_path


@pytest.fixture
def rows(folder: Path, make):
  """Makes batches from records in order, one row in a batch."""

  def build(records: list[dict], vision: VisionConfig, **given):
    path, text = folder / "data.jsonl", "".join(json.dumps(record) + "\n" for record in records)
    if not path.exists() or path.read_text() != text:  # another source of the test may be reading the file
      path.write_text(text)
    given = {"shuffle": False, "length": 64, "global_batch": 1, "vocab_size": 512} | given
    return make(dataset_path=str(path), vision=vision, **given)

  return build


def tokens_of(name: str, folder: Path, vision: VisionConfig) -> int:
  return load_image(folder / name, vision).tokens


@pytest.mark.parametrize("name", VISION)
def test_placeholders_become_framed_image_tokens(name: str, rows, folder: Path):
  vision = VISION[name]
  record = {"text": "see <image> and <image>!", "images": ["a.png", "b.png"]}
  source = rows([record], dataclasses.replace(vision, max_images_per_row=2), packing=False)
  batch = next(source)
  newlines = "\n\n" if name == "gemma3-tiny" else ""
  frames = [[BOI, *[IMAGE] * tokens_of(image, folder, vision), EOI] for image in ("a.png", "b.png")]
  expected = [BOS, *encoded("see " + newlines), *frames[0], *encoded(newlines + " and " + newlines), *frames[1]]
  expected += [*encoded(newlines + "!"), EOS]
  tokens, targets = batch["tokens"][0], batch["targets"][0]
  assert tokens[: len(expected)].tolist() == expected
  np.testing.assert_array_equal(batch["token_types"], batch["tokens"] == IMAGE)
  ahead = np.array([*expected[1:], -100])
  np.testing.assert_array_equal(targets[: len(expected)], np.where(ahead == IMAGE, -100, ahead))
  assert (targets[len(expected) :] == -100).all()
  alone = tower_arrays([load_image(folder / image, vision) for image in ("a.png", "b.png")], vision)
  for key, array in alone.items():
    np.testing.assert_array_equal(batch[key][0], array)


def test_rows_without_images_need_none_and_a_literal_placeholder_is_text(rows):
  records = [{"text": "<image> here"}, {"text": "none", "images": []}, {"text": "nor <image>", "images": None}]
  for vision in VISION.values():
    source = rows(records, vision, packing=False)
    for record in records:
      batch = next(source)
      ids = [BOS, *encoded(record["text"]), EOS]
      assert batch["tokens"][0, : len(ids)].tolist() == ids
      assert not batch["token_types"].any()
      assert not batch["pixel_values"].any()


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("places", [1, 3])
def test_packing_splits_no_image_and_loses_no_token(name: str, places: int, rows, folder: Path):
  """In every row each run of image tokens is complete and framed, and the images belong to it in order."""
  vision = dataclasses.replace(VISION[name], max_images_per_row=places)
  random = np.random.default_rng(7)
  records = []
  for i in range(30):
    names = random.choice(list(SIZES), random.integers(0, 4)).tolist()
    text = "".join("x" * random.integers(0, 30) + "<image>" for _ in names) + "y" * random.integers(1, 60)
    records.append({"text": f"{i}" + text, "images": names})
  source = rows(records, vision)
  # One document in a row gives the tokens that the packed rows must add up to.
  whole = rows(records, dataclasses.replace(vision, max_images_per_row=3), packing=False, length=400)
  levels = {image: tower_arrays([load_image(folder / image, vision)], vision)["pixel_values"][0] for image in SIZES}
  expected = [batch["tokens"][batch["segments"] > 0] for batch in (next(whole) for _ in records)]
  images = [name for record in records for name in record["images"]]
  stream, got = [], []
  while len(stream) < len(images) or sum(map(len, got)) < sum(map(len, expected)):
    batch = next(source)
    tokens, segments = batch["tokens"][0], batch["segments"][0]
    got.append(tokens[segments > 0])
    runs = np.flatnonzero(np.diff(np.concatenate([[0], tokens == IMAGE, [0]]))).reshape(-1, 2)
    assert len(runs) <= places
    for place, (start, end) in enumerate(runs):
      assert (tokens[start - 1], tokens[end]) == (BOI, EOI)
      assert len(set(segments[start - 1 : end + 1])) == 1
      found = [k for k, pixels in levels.items() if np.array_equal(pixels, batch["pixel_values"][0, place])]
      assert len(found) == 1
      assert end - start == tokens_of(found[0], folder, vision)
      stream += found
    assert not batch["pixel_values"][0, len(runs) :].any()
  assert stream[: len(images)] == images
  everything = np.concatenate(expected)
  np.testing.assert_array_equal(np.concatenate(got)[: len(everything)], everything)


def test_resuming_inside_a_document_with_images_gives_the_same_rows(rows):
  records = [{"text": "ab<image>cd" * 3 + str(i), "images": ["a.png", "b.png", "c.jpg"]} for i in range(12)]
  first = rows(records, GEMMA4, shuffle=True)
  for _ in range(5):
    next(first)
  state = json.loads(json.dumps(first.get_state()))
  expected = [next(first) for _ in range(4)]
  again = rows(records, GEMMA4, shuffle=True)
  again.set_state(state)
  for batch in expected:
    for key, array in next(again).items():
      np.testing.assert_array_equal(array, batch[key])
  other = rows(records, dataclasses.replace(GEMMA4, max_images_per_row=2), shuffle=True)
  with pytest.raises(UserError, match="vision max_images_per_row: was 1, is 2"):
    other.set_state(state)


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_rows_of_each_process_are_those_of_one(name: str, processes: int, rows, monkeypatch):
  """Rows are bitwise equal, and no process decodes the images of another process's rows."""
  records = [{"text": "ab<image>cd" * (i % 4) + str(i), "images": [*SIZES, "a.png"][: i % 4]} for i in range(16)]
  vision = dataclasses.replace(VISION[name], max_images_per_row=2)
  whole = [next(source) for source in [rows(records, vision, shuffle=True, global_batch=4)] for _ in range(3)]
  unpacked, load = [], multimodal.load_for
  monkeypatch.setattr(multimodal, "load_for", lambda *given: unpacked.append(given) or load(*given))
  for own in np.split(np.arange(4), processes):
    source = rows(records, vision, shuffle=True, global_batch=4, own_rows=own.tolist())
    for batch in whole:
      for key, array in next(source).items():
        assert array.shape == batch[key].shape
        np.testing.assert_array_equal(array[own], batch[key][own])
        if key == "pixel_values":
          assert not np.delete(array, own, axis=0).any()
        elif key != "image_position_ids":
          np.testing.assert_array_equal(array, batch[key])
    source.close()  # wait for the batches that are made ahead
  made = sum(
    len(batch["pixel_values"][batch["pixel_values"].any(axis=tuple(range(2, batch["pixel_values"].ndim)))]) for batch in whole
  )
  assert made <= len(unpacked) <= made + 4 * 4 * 2 * 2, "two batches are made ahead"


def test_an_image_that_shows_itself_damaged_when_its_row_is_made(rows, folder: Path):
  data = (folder / "b.png").read_bytes()
  (folder / "b.png").write_bytes(data[: len(data) // 2])
  records = [{"text": f"{i}<image>", "images": ["b.png" if i == 3 else "a.png"]} for i in range(4)]
  with pytest.raises(UserError, match=r"image .*b\.png: .*: the header is valid, but .*\n  fix: repair the file"):
    rows(records, GEMMA4, packing=False, global_batch=4, own_rows=[2, 3])
  assert next(rows(records, GEMMA4, packing=False, global_batch=4, own_rows=[0, 1]))["segments"].any(axis=1).all()
  source = rows(records, GEMMA4, packing=False, global_batch=3, own_rows=[0], on_bad_record="skip")
  assert [next(source)["segments"].any(axis=1).all() for _ in range(2)] == [True, True]
  assert source.counts()["bad"] == 1, "all processes leave it out"


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_an_image_on_its_side_takes_up_as_many_tokens(height, width):
  assert isinstance(GEMMA4, PatchVision)
  one, other = patched_size(height, width, GEMMA4), patched_size(width, height, GEMMA4)
  assert one[0] * one[1] == other[0] * other[1]


@pytest.mark.parametrize("name", VISION)
def test_the_header_says_how_many_tokens(name: str, folder: Path):
  for image in SIZES:
    assert measure_image(folder / image, VISION[name]).tokens == load_image(folder / image, VISION[name]).tokens
  turned = Image.open(folder / "c.jpg")
  exif = turned.getexif()
  exif[0x0112] = 6
  turned.save(folder / "turned.jpg", exif=exif)
  assert measure_image(folder / "turned.jpg", VISION[name]).tokens == load_image(folder / "turned.jpg", VISION[name]).tokens


FAULTS = {
  "the text has 2 '<image>', but the record has 1 images": {"text": "<image><image>", "images": ["a.png"]},
  "the text has 0 '<image>', but the record has 1 images": {"text": "none", "images": ["a.png"]},
  "the text has 0 '<image>', but the record has 1 images.": {"text": "none", "image": "a.png"},
  "images: expected an image: the name of a file": {"text": "<image>", "images": [7]},
  "image: an image has no bytes and no path": {"text": "<image>", "image": {"bytes": None}},
  r"'pics' looks like images \(images_field=pics reads it": {"text": "<image>", "pics": ["a.png"]},
  "image '../a.png' is outside the folder": {"text": "<image>", "images": ["../a.png"]},
  "image 'x/../../a.png' is outside the folder": {"text": "<image>", "images": ["x/../../a.png"]},
  "missing.png: no such file": {"text": "<image>", "images": ["missing.png"]},
  "broken.png: not a PNG or JPEG image": {"text": "<image>", "images": ["broken.png"]},
  "cannot be read: embedded null byte": {"text": "<image>", "images": ["a\0.png"]},
}


@pytest.mark.parametrize("reason", FAULTS)
def test_faults_have_file_and_line_and_can_be_skipped(reason: str, rows, folder: Path):
  (folder / "broken.png").write_bytes(b"nothing of the kind")
  records = [{"text": "fine <image>", "images": ["a.png"]}, FAULTS[reason]]

  def read():
    source = rows(records, GEMMA4)
    for _ in range(3):
      next(source)

  with pytest.raises(UserError, match=f"data.jsonl:2: .*{reason.rstrip('.')}"):
    read()
  skipping = rows(records, GEMMA4, on_bad_record="skip", packing=False)
  assert [next(skipping)["token_types"].sum() for _ in range(2)] == [16, 16]
  assert skipping.counts()["bad"] == 1


def test_absolute_paths_and_folders_below(rows, folder: Path, tmp_path_factory):
  elsewhere = tmp_path_factory.mktemp("elsewhere")
  (folder / "below").mkdir()
  for target in (elsewhere / "z.png", folder / "below" / "z.png"):
    target.write_bytes((folder / "a.png").read_bytes())
  records = [{"text": "<image>", "images": [name]} for name in (str(elsewhere / "z.png"), "below/z.png", "below/../a.png")]
  source = rows(records, GEMMA3, packing=False)
  pixels = [next(source)["pixel_values"] for _ in records]
  assert all(np.array_equal(pixels[0], other) for other in pixels)


def test_a_row_too_short_for_an_image_is_refused_before_anything_is_read(rows):
  with pytest.raises(UserError, match="max_target_length = 17 has no room for an image"):
    rows([{"text": "x"}], GEMMA3, length=17)


def test_text_that_gives_the_image_token_is_refused(rows):
  byte = dataclasses.replace(GEMMA4, image_token_id=ord("x") + 3)
  with pytest.raises(UserError, match=r"data\.jsonl:1: the text contains the token 123, which stands for images"):
    rows([{"text": "axb"}], byte)


def test_without_use_multimodal_images_are_left_out_with_a_warning(rows, caplog: pytest.LogCaptureFixture):
  off = load_config("gemma4-tiny").config.vision
  source = rows([{"text": "an <image>", "images": ["missing.png"]}], off, packing=False)
  batch = next(source)
  assert batch.keys() == {"tokens", "targets", "positions", "segments"}
  assert batch["tokens"][0, 1:11].tolist() == encoded("an <image>")
  assert [r.message for r in caplog.records if "data.jsonl:1: images (field 'images') are left out" in r.message]
  assert len(caplog.records) == 1
  caplog.clear()
  next(rows([{"text": "an <image>", "pics": "missing.png"}, {"text": "a <image>"}], off, packing=False))
  assert [r.message for r in caplog.records if "data.jsonl:1: images (field 'pics') are left out" in r.message]


def test_one_image_needs_no_list_and_a_field_may_be_named(rows, folder: Path):
  named = [({"images": ["a.png"]}, GEMMA4), ({"images": "a.png"}, GEMMA4), ({"image": "a.png"}, GEMMA4)]
  named += [({"images": [{"bytes": None, "path": "a.png"}]}, GEMMA4)]
  named += [({"pics": "a.png"}, dataclasses.replace(GEMMA4, images_field="pics"))]
  found = [next(rows([{"text": "see <image>!"} | given], vision, packing=False)) for given, vision in named]
  for other in found[1:]:
    for key, array in found[0].items():
      np.testing.assert_array_equal(other[key], array)
  literal = next(rows([{"text": "see <image>!", "source": "a text", "images": []}], GEMMA4, packing=False))
  assert not literal["token_types"].any()


def test_synthetic_tokens_never_stand_for_an_image(make):
  source = make(dataset="synthetic", vision=dataclasses.replace(GEMMA4, image_token_id=5), vocab_size=8, length=64)
  batch = next(source)
  assert set(np.unique(batch["tokens"])) == set(range(8)) - {5}
  assert not batch["token_types"].any()


def test_other_sources_carry_empty_places(make):
  batch = next(make(dataset="python-stdlib", vision=GEMMA3, vocab_size=512, length=64))
  assert batch["pixel_values"].shape == (2, 1, 3, 32, 32)
  assert not batch["pixel_values"].any()


def test_images_without_pillow(rows, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
  with pytest.raises(UserError, match=r"pip install -e '.\[vision\]'"):
    rows([{"text": "x"}], GEMMA3)


@pytest.mark.parametrize("name", VISION)
def test_an_image_may_stand_in_its_record_and_nothing_is_fetched(name: str, rows, folder: Path):
  vision = VISION[name]
  uri = f"data:image/png;base64,{base64.b64encode((folder / 'a.png').read_bytes()).decode()}"
  found = [next(rows([{"text": "see <image>!", "images": [image]}], vision, packing=False)) for image in ("a.png", uri)]
  for key, array in found[0].items():
    np.testing.assert_array_equal(found[1][key], array)
  for image, said in (
    (
      "https://example.com/a.png",
      r"data\.jsonl:1: images: an image must be a file or a data: URI, found https:\.\.\.",
    ),
    ("data:image/png;base64,@@", r"image data:image/png;base64,@@... \(24 characters\): cannot be read"),
    ("data:image/png,abc", r"a data: URI must be base64"),
  ):
    with pytest.raises(UserError, match=said):
      rows([{"text": "see <image>!", "images": [image]}], vision)
