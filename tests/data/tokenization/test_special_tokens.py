"""Special tokens by meaning and by spelling, and prompts in which a spelling is the token."""

import io
from pathlib import Path

import pytest

from maxtext_like.data.tokenization.special_tokens import SPELLINGS
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer, Tokenizer, known_names, load_tokenizer, token_id

GEMMA3 = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "start_of_turn": "<start_of_turn>", "end_of_turn": "<end_of_turn>"}
GEMMA3 |= {"start_of_image": "<start_of_image>", "end_of_image": "<end_of_image>", "image": "<image_soft_token>"}
GEMMA4 = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "start_of_turn": "<|turn>", "end_of_turn": "<turn|>"}
GEMMA4 |= {"start_of_image": "<|image>", "end_of_image": "<image|>", "image": "<|image|>"}
DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "pad": "<｜▁pad▁｜>"}
DEEPSEEK |= {"user": "<｜User｜>", "assistant": "<｜Assistant｜>"}


def made(folder: Path, spellings: list[str]) -> Tokenizer:
  """Writes a tokenizer.json of a few letters and these special tokens, from id 40 on."""
  from tokenizers import AddedToken, Tokenizer, models

  vocab = {letter: i for i, letter in enumerate("abc<>_|tunr")} | {name: 40 + i for i, name in enumerate(spellings)}
  library = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
  library.add_special_tokens([AddedToken(name, special=True) for name in spellings])
  library.save(str(folder / "tokenizer.json"))
  return load_tokenizer(str(folder))


@pytest.mark.parametrize("family", [GEMMA3, GEMMA4, DEEPSEEK], ids=["gemma3", "gemma4", "deepseek"])
def test_every_family_is_known_by_meaning(family: dict[str, str], tmp_path: Path):
  tokenizer = made(tmp_path, list(family.values()))
  assert known_names(tokenizer) == [name for name in SPELLINGS if name in family]
  for i, (meaning, spelling) in enumerate(family.items()):
    assert token_id(tokenizer, meaning) == token_id(tokenizer, spelling) == 40 + i
  assert token_id(tokenizer, "b") == 1
  assert token_id(tokenizer, "no such token") is None


def test_in_a_prompt_spellings_are_tokens_and_in_a_document_they_are_text(tmp_path: Path):
  tokenizer = made(tmp_path, ["<|turn>", "<turn|>", "<|turn"])
  assert tokenizer.encode_special("<|turn>a<turn|><|turnb<turn") == [40, 0, 41, 42, 1, *tokenizer.encode("<turn")]
  assert not {40, 41, 42} & set(tokenizer.encode("<|turn>a<turn|>"))
  assert tokenizer.encode_special("") == []


def test_sentencepiece(tmp_path: Path):
  from sentencepiece import SentencePieceTrainer

  model = io.BytesIO()
  SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
    sentence_iterator=iter(["the quick brown fox jumps"] * 20), model_writer=model, vocab_size=45, hard_vocab_limit=False,
    pad_id=0, eos_id=1, bos_id=2, unk_id=3, eos_piece="<eos>", bos_piece="<bos>", user_defined_symbols=["<end_of_turn>"],
    control_symbols=["<start_of_turn>"], add_dummy_prefix=False, minloglevel=2,
  )  # fmt: skip
  path = tmp_path / "tokenizer.model"
  path.write_bytes(model.getvalue())
  tokenizer = load_tokenizer(str(path))
  turn, end = token_id(tokenizer, "start_of_turn"), token_id(tokenizer, "end_of_turn")
  assert turn != end
  assert tokenizer.encode_special("<start_of_turn>the<end_of_turn>") == [turn, *tokenizer.encode("the"), end]
  assert turn not in tokenizer.encode("<start_of_turn>the")
  assert token_id(tokenizer, "no such piece") is None


def test_bytes():
  tokenizer = BytesTokenizer()
  assert [token_id(tokenizer, name) for name in ("pad", "eos", "bos", "end_of_turn", "a", "ä", "<eos>")] == [
    0, 1, 2, None, 100, None, None,
  ]  # fmt: skip
  assert tokenizer.encode_special("<eos>") == tokenizer.encode("<eos>")
