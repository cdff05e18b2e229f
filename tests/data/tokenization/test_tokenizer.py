"""Tokenizers: bytes, tokenizer.json, sentencepiece; damaged files and vocabularies that do not fit."""

import io
import json
import logging
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtext_like.data.tokenization import tokenizer as data_tokenizer
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer, load_tokenizer
from maxtext_like.errors import UserError

TEXT = "the quick brown fox <eos> jumps over the lazy dog; naïve café 漢字 🙂"


@pytest.fixture(scope="session")
def hugging_face(tmp_path_factory):
  """A folder with a byte-level BPE tokenizer.json of about 300 ids: <pad> 0, <eos> 1, <bos> 2."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  library = Tokenizer(models.BPE())
  library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
  library.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
  trainer = trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<pad>", "<eos>", "<bos>"], show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  library.train_from_iterator([TEXT] * 3, trainer)
  library.enable_truncation(5)
  library.enable_padding(length=50)
  folder = tmp_path_factory.mktemp("hf")
  library.save(str(folder / "tokenizer.json"))
  return folder


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
  from sentencepiece import SentencePieceTrainer

  model = io.BytesIO()
  SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
    sentence_iterator=iter([TEXT] * 20), model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2,
    pad_id=0, eos_id=1, bos_id=2, unk_id=3,
  )  # fmt: skip
  path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
  path.write_bytes(model.getvalue())
  return path


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_bytes_round_trip(text):
  tokenizer = BytesTokenizer()
  ids = tokenizer.encode(text)
  assert all(3 <= token < tokenizer.vocab_size for token in ids)
  assert tokenizer.decode([2, *ids, 1, 0]) == text


def test_bytes_ids():
  assert BytesTokenizer().encode("A\0é") == [0x41 + 3, 3, 0xC3 + 3, 0xA9 + 3]
  assert BytesTokenizer().decode([258]) == "\ufffd"
  for token in (259, -1):
    with pytest.raises(ValueError, match=rf"token id {token} outside"):
      BytesTokenizer().decode([token])


def test_hugging_face(hugging_face):
  tokenizer = load_tokenizer(str(hugging_face), 400)
  assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
  assert tokenizer.files == (hugging_face / "tokenizer.json",)
  ids = tokenizer.encode(TEXT)
  assert len(ids) > 20, "truncation and padding of the file are off"
  assert tokenizer.decode([2, *ids, 1, 0]) == TEXT
  assert not {0, 1, 2} & set(ids), "a special token's name inside a text is text"
  assert max(ids) < tokenizer.vocab_size
  same = load_tokenizer(str(hugging_face / "tokenizer.json"))
  assert same.fingerprint == tokenizer.fingerprint


def test_tokenizer_config_names_the_special_tokens(hugging_face, tmp_path):
  (tmp_path / "tokenizer.json").write_bytes((hugging_face / "tokenizer.json").read_bytes())
  config = tmp_path / "tokenizer_config.json"
  config.write_text(json.dumps({"bos_token": {"content": "<pad>"}, "eos_token": None}))
  tokenizer = load_tokenizer(str(tmp_path))
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, None, 0)
  assert tokenizer.files == (tmp_path / "tokenizer.json", config)
  assert tokenizer.fingerprint != load_tokenizer(str(hugging_face)).fingerprint
  for content, message in [
    ('{"eos_token": "<end>"}', "eos_token is '<end>', but the tokenizer.json in the same folder lacks"),
    ("[1]", "expected a JSON object, found list"),
    ("{", "not JSON"),
    ("[" * 200000, "not JSON"),
  ]:
    config.write_text(content)
    with pytest.raises(UserError, match=message):
      load_tokenizer(str(tmp_path))


def test_sentencepiece(sentencepiece_model):
  tokenizer = load_tokenizer(str(sentencepiece_model), 1000)
  assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
  assert tokenizer.decode(tokenizer.encode("the lazy fox")) == "the lazy fox"
  assert not {1, 2} & set(tokenizer.encode("fox <eos> </s> <s>"))
  assert load_tokenizer(str(sentencepiece_model.parent)).fingerprint == tokenizer.fingerprint


def test_larger_than_the_models_vocabulary(hugging_face, sentencepiece_model):
  for name in ("bytes", str(hugging_face), str(sentencepiece_model)):
    size = load_tokenizer(name).vocab_size
    assert load_tokenizer(name, size).vocab_size == size
    with pytest.raises(UserError, match=rf"has {size} token ids, more than model.vocab_size={size - 1}") as refused:
      load_tokenizer(name, size - 1)
    # A checkpoint with fewer ids than bytes was trained with a tokenizer that is missing. Rows are no remedy for that.
    fix = (
      "tokenizer=DIRECTORY with the model's own tokenizer; for a model without a checkpoint, "
      if name == "bytes"
      else ("the model's own tokenizer, or ")
    )
    assert f"\n  fix: {fix}vocab_size={size}" in str(refused.value)


def test_holes_in_the_ids_count(hugging_face, tmp_path):
  content = json.loads((hugging_face / "tokenizer.json").read_text())
  content["model"]["vocab"]["odd"] = 5000
  (tmp_path / "tokenizer.json").write_text(json.dumps(content))
  assert load_tokenizer(str(tmp_path)).vocab_size == 5001


def damaged_json(good: bytes):
  yield b""
  yield b"{}"
  yield good[: len(good) // 2]
  yield good[:-5]
  yield b"[" * 100_000
  yield b'{"a":' * 50_000
  yield good.replace(b'"BPE"', b'"XYZ"')
  yield good.replace(b"<pad>", b"\xff\xfe")
  yield b"\0" * 100


def test_damaged_files(hugging_face, sentencepiece_model, tmp_path, caplog):
  good = (hugging_face / "tokenizer.json").read_bytes()
  path = tmp_path / "tokenizer.json"
  for content in damaged_json(good):
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: not"):
      load_tokenizer(str(path))
  path = tmp_path / "a.model"
  good = sentencepiece_model.read_bytes()
  with caplog.at_level(logging.CRITICAL):
    for content in (b"", b"hello", good[:100], good[:-7], b"\0" * 1000, bytes(byte ^ 0x55 for byte in good)):
      path.write_bytes(content)
      with pytest.raises(UserError, match=r"a\.model: (not a|the) sentencepiece model"):
        load_tokenizer(str(path))


@pytest.mark.slow
def test_too_large_a_file_is_refused_unread(tmp_path, monkeypatch):
  path = tmp_path / "tokenizer.json"
  path.touch()
  os.truncate(path, data_tokenizer.MAX_TOKENIZER_BYTES + 1)  # sparse
  with pytest.raises(UserError, match="more than the limit of 268435456"):
    load_tokenizer(str(path))


def test_names_that_are_no_tokenizer(tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "two").mkdir()
  for name in ("a.model", "b.model"):
    (tmp_path / "two" / name).touch()
  (tmp_path / "x.txt").touch()
  for name, message in [
    ("", "no such file or folder\n  fix: set it to 'bytes'"),
    ("byte", "no such file or folder\n  fix: set it to 'bytes'"),
    (str(tmp_path / "empty"), r"no tokenizer\.json, no tokenizer\.model and no \.model file"),
    (str(tmp_path / "two"), r"and 2 \.model files"),
    (str(tmp_path / "x.txt"), r"expected a \.json"),
    ("/dev/null", "not a regular file"),
  ]:
    with pytest.raises(UserError, match=message):
      load_tokenizer(name)
