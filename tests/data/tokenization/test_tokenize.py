"""Special tokens that the text spells: with parse they become the ids that `generate` uses, otherwise text and a warning."""

import dataclasses
import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from maxtext_like.config.load import load_config
from maxtext_like.data.tokenization.tokenizer import load_tokenizer
from maxtext_like.errors import UserError
from maxtext_like.generation.prompts import Prompt, encode

NAMES = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>"]
CHAT = [
  "<bos><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\nhi<end_of_turn>\n",
  "plain words",
  "<start_of_turn>user <bos> inside<eos>",
  "<bos>",
  "<start_of_tur <<eos>>",
]
VISION = load_config("gemma3-tiny", ["use_multimodal=true"]).config.vision


@pytest.fixture(scope="module", params=["tokenizer.json", "tokenizer.model", "bytes"])
def tokenizer(request, tmp_path_factory) -> str:
  folder = tmp_path_factory.mktemp("tokenizer")
  if request.param == "bytes":
    return "bytes"
  if request.param == "tokenizer.json":
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    letters = ["▁", "\n", *map(chr, range(33, 127))]
    vocab = {name: i for i, name in enumerate(NAMES)} | {letter: 10 + i for i, letter in enumerate(letters)}
    library = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # Like Llama: a space is added before a text, but not after a special token.
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue]
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    library.save(str(folder / request.param))
  else:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
      sentence_iterator=iter(["user model hello hi plain words inside <_>/."] * 20), model_writer=model, vocab_size=60,
      hard_vocab_limit=False, pad_id=0, eos_id=1, bos_id=2, unk_id=3, eos_piece="<eos>", bos_piece="<bos>", pad_piece="<pad>",
      control_symbols=NAMES[3:5], add_dummy_prefix=False, minloglevel=2,
    )  # fmt: skip
    (folder / request.param).write_bytes(model.getvalue())
  return str(folder / request.param)


def write(folder: Path, kind: str, records: list[dict[str, Any]]) -> dict[str, Any]:
  """Writes the records as one of the kinds of data sets."""
  path = folder / f"data.{kind}"
  if kind == "jsonl":
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
  elif kind == "parquet":
    pyarrow.parquet.write_table(pyarrow.table({"text": [record["text"] for record in records]}), path)
  else:
    path.mkdir()
    for i, record in enumerate(records):
      (path / f"{i}.txt").write_text(record["text"])
  return {"dataset": kind, "dataset_path": str(path), "packing": False, "shuffle": False, "global_batch": 1, "length": 120}


def rows(source: Any, count: int) -> list[list[int]]:
  batches = [next(source) for _ in range(count)]
  return [batch["tokens"][0][batch["segments"][0] > 0].tolist() for batch in batches]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_parsed_text_has_the_ids_of_generate(kind, make, tokenizer, tmp_path, caplog):
  given = write(tmp_path, kind, [{"text": text} for text in CHAT])
  with caplog.at_level(logging.WARNING):
    source = make(**given, tokenizer=tokenizer, special_tokens_in_text="parse")
  assert not caplog.records
  library = load_tokenizer(tokenizer)
  prompts = encode([Prompt(text) for text in CHAT], library, load_config("gemma3-tiny").config.vision).tokens
  expected = [ids if ids[-1:] == [library.eos_id] and len(ids) > 1 else [*ids, library.eos_id] for ids in prompts]
  assert rows(source, len(CHAT)) == expected
  if tokenizer != "bytes":
    assert [ids.count(library.bos_id) for ids in expected] == [1, 1, 2, 1, 1]


def test_tokenizer_json_is_read_as_the_library_reads_it(tokenizer):
  if not tokenizer.endswith(".json"):
    pytest.skip("sentencepiece has no such reading of its own")
  from tokenizers import Tokenizer

  alone, library = Tokenizer.from_file(tokenizer), load_tokenizer(tokenizer)
  for text in CHAT:
    assert library.encode_special(text) == alone.encode(text, add_special_tokens=False).ids
    assert not set(library.encode(text)) & set(range(len(NAMES)))


@pytest.mark.parametrize("key", [None, "literal"])
def test_unset_they_are_text_and_told(key, make, tokenizer, tmp_path, caplog):
  given = write(tmp_path, "jsonl", [{"text": text} for text in CHAT[:3]])
  with caplog.at_level(logging.WARNING):
    source = make(**given, tokenizer=tokenizer, special_tokens_in_text=key)
  library = load_tokenizer(tokenizer)
  assert rows(source, 3)[0] == [library.bos_id, *library.encode(CHAT[0]), library.eos_id][:120]
  if key == "literal" or tokenizer == "bytes":
    assert not caplog.records
    return
  (record,) = caplog.records
  counts = "'<start_of_turn>' 3 times, '<bos>' 2 times, '<end_of_turn>' 2 times, '<eos>' once; first in"
  assert f"2 of 3 documents spell special tokens in their text ({counts} {given['dataset_path']}:1)" in record.message.replace(
    "'<end_of_turn>' 2 times, '<bos>' 2 times", "'<bos>' 2 times, '<end_of_turn>' 2 times"
  )
  assert "special_tokens_in_text=parse" in record.message


def test_as_an_error_they_are_bad_records(make, tokenizer, tmp_path):
  given = write(tmp_path, "jsonl", [{"text": text} for text in CHAT[:3]]) | {"tokenizer": tokenizer}
  if tokenizer == "bytes":  # a tokenizer without spellings
    assert len(rows(make(**given, special_tokens_in_text="error"), 3)) == 3
    return
  with pytest.raises(UserError, match=r"(?s)2 bad records among the 3.*jsonl:1: the text spells special tokens: '<bos>' once"):
    make(**given, special_tokens_in_text="error")
  source = make(**given, special_tokens_in_text="error", on_bad_record="skip")
  library = load_tokenizer(tokenizer)
  assert rows(source, 2) == [[library.bos_id, *library.encode(CHAT[1]), library.eos_id]] * 2
  with pytest.raises(UserError, match="special_tokens_in_text: was error, skipped, is literal"):
    make(**given).set_state(source.get_state())


def test_where_nothing_is_spelled_error_and_unset_are_one_stream(make, tokenizer, tmp_path):
  given = write(tmp_path, "jsonl", [{"text": f"plain {'ab' * i}"} for i in range(9)]) | {"tokenizer": tokenizer}
  unset, error = make(**given), make(**given, special_tokens_in_text="error")
  first = rows(unset, 2)
  error.set_state(unset.get_state())
  rest = rows(unset, 3)
  assert rows(error, 3) == rest
  assert first != rest[:2]


def test_records_with_images(make, tokenizer, tmp_path):
  if not tokenizer.endswith(".json"):
    pytest.skip("the others have no piece for images")
  vision = dataclasses.replace(VISION, boi_token_id=105, eoi_token_id=106, image_token_id=NAMES.index("<image_soft_token>"))
  Image.fromarray(np.full((32, 32, 3), 90, np.uint8)).save(tmp_path / "a.png")
  record = {"text": "<start_of_turn>user\n<image> what?<end_of_turn>", "images": ["a.png"]}
  given = write(tmp_path, "jsonl", [record]) | {"tokenizer": tokenizer, "vision": vision}
  (ids,) = rows(make(**given, special_tokens_in_text="parse"), 1)
  library = load_tokenizer(tokenizer)
  (prompt,) = encode([Prompt(record["text"], (str(tmp_path / "a.png"),))], library, vision).tokens
  assert ids == [*prompt, library.eos_id]
  assert ids.count(3) == ids.count(4) == 1
  given |= write(tmp_path, "jsonl", [{"text": "plain"}, {"text": "an <image_soft_token>"}])
  assert len(rows(make(**given, special_tokens_in_text="literal"), 2)) == 2
  with pytest.raises(UserError, match=r"jsonl:2: the text contains the token 5, which stands for images"):
    make(**given, special_tokens_in_text="parse")


def test_missing_images_are_found_before_the_first_step_and_may_come_back(make, tmp_path):
  records = [{"text": "<image>", "images": [f"{i}.png"]} for i in range(30)]
  for i in range(30):
    Image.fromarray(np.full((32, 32, 3), i, np.uint8)).save(tmp_path / f"{i}.png")
  image = (tmp_path / "27.png").rename(tmp_path / "away.png")
  given = write(tmp_path, "jsonl", records) | {"vision": VISION, "vocab_size": 300}
  for _ in range(2):
    with pytest.raises(UserError, match=r"jsonl:28: image .*27\.png: no such file\n  fix: repair"):
      make(**given)
  image.rename(tmp_path / "27.png")
  make(**given)
