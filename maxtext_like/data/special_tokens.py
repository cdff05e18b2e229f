"""Special tokens by what they mean, however a tokenizer spells them, and text whose special tokens are meant as such.

Documents are text through and through: "<eos>" inside one is five letters. A prompt is written by whoever runs the model,
and "<start_of_turn>user" in it is the token, as in Hugging Face's tokenizers.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from maxtext_like.data.tokenizer import Tokenizer

# Gemma 3, Gemma 4, DeepSeek, then others that use the same tokens.
SPELLINGS: dict[str, tuple[str, ...]] = {
  "bos": ("<bos>", "<｜begin▁of▁sentence｜>", "<s>", "<|begin_of_text|>"),
  "eos": ("<eos>", "<｜end▁of▁sentence｜>", "</s>", "<|end_of_text|>", "<|endoftext|>"),
  "pad": ("<pad>", "<｜▁pad▁｜>", "[PAD]"),
  "start_of_turn": ("<start_of_turn>", "<|turn>"),
  "end_of_turn": ("<end_of_turn>", "<turn|>"),
  "start_of_image": ("<start_of_image>", "<|image>"),
  "end_of_image": ("<end_of_image>", "<image|>"),
  "image": ("<image_soft_token>", "<|image|>"),
  "user": ("<｜User｜>",),
  "assistant": ("<｜Assistant｜>",),
}
"""Meaning to spellings. bos, eos and pad are what tokenizer_config.json says where it says something."""


def token_id(tokenizer: "Tokenizer", name: str) -> int | None:
  """The id of a token named by its meaning (a key of ``SPELLINGS``) or spelt out; None: the tokenizer has none."""
  if name in ("bos", "eos", "pad"):
    return {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}[name]
  found = (tokenizer.find(spelling) for spelling in SPELLINGS.get(name, (name,)))
  return next((i for i in found if i is not None), None)


def known_names(tokenizer: "Tokenizer") -> list[str]:
  """The meanings that a tokenizer has a token for."""
  return [name for name in SPELLINGS if token_id(tokenizer, name) is not None]


def encode_prompt(tokenizer: "Tokenizer", text: str) -> list[int]:
  """Token ids of a text in which the spelling of a special token stands for that token."""
  special: Mapping[str, int] = tokenizer.special
  if not special:
    return tokenizer.encode(text)
  spellings = sorted(special, key=len, reverse=True)  # the longest first: one may begin another
  ids: list[int] = []
  for part in re.split(f"({'|'.join(map(re.escape, spellings))})", text):
    if part:
      ids += [special[part]] if part in special else tokenizer.encode(part)
  return ids
