"""Conversations as tokens: the ids of the complete text, the learned ids, and no special token from the text of a user."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maxtext_like.config.load import load_config
from maxtext_like.data.chat.encode import ChatEncoder, Encoded, answers_to_learn
from maxtext_like.data.chat.records import read_conversation
from maxtext_like.data.chat.registry import RENDERERS
from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.image_text.images import load_image
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer
from maxtext_like.errors import UserError

TURNS = [
  {"role": "user", "content": "Hello there."},
  {"role": "assistant", "content": "Hi."},
  {"role": "user", "content": "ab\n\nab"},
  {"role": "assistant", "content": "Bye."},
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
  """Byte-level tokenizers with merges over newlines and each family's special tokens, some not marked as special."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

  made = {}
  for name, renderer in RENDERERS.items():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {"ĊĊ": 256, "bĊ": 257, "ab": 258}
    library = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("b", "Ċ"), ("a", "b")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    library.decoder = decoders.ByteLevel()  # pyright: ignore
    for spelling in sorted(renderer.special):
      library.add_tokens([AddedToken(spelling, special="think" not in spelling, normalized=False)])
    path = tmp_path_factory.mktemp(name.replace(".", "")) / "tokenizer.json"
    library.save(str(path))
    made[name] = load_tokenizer(str(path))
  return made


def encode(tokenizer: Tokenizer, name: str, messages: list[dict[str, Any]], learn: Any = "assistant") -> Encoded:
  read = read_conversation({"messages": messages}, "here:1", "/")
  rendered = RENDERERS[name].render(read, "training")
  return ChatEncoder(RENDERERS[name], tokenizer).encode(rendered, answers_to_learn(read, learn), "here:1")


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_ids_are_those_of_the_text(name, tokenizers):
  tokenizer = tokenizers[name]
  found = encode(tokenizer, name, TURNS)
  text = RENDERERS[name].render(read_conversation({"messages": TURNS}, "", "/"), "training").text
  assert found.ids == tokenizer.encode_special(text)
  assert found.trained.dtype == bool
  words = {
    learn: tokenizer.decode(np.array(found.ids)[encode(tokenizer, name, TURNS, learn).trained]) for learn in ("last", "all")
  }
  assert tokenizer.decode(np.array(found.ids)[found.trained]) == "Hi.Bye."
  assert words == {"last": "Bye.", "all": tokenizer.decode(found.ids)}
  ends = [found.ids[i] for i in np.flatnonzero(found.trained[:-1] & ~found.trained[1:])] if name.startswith("gemma") else []
  assert set(ends) <= {tokenizer.find(RENDERERS[name].needed[1])}  # the end of a turn is learned, the newline after it is not


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_no_token_is_spelled_by_a_user(name, tokenizers):
  """Prompt injection: the spelling of every special token of the family becomes characters, for every speaker."""
  tokenizer, spelled = tokenizers[name], " ".join(sorted(RENDERERS[name].special - {"</think>", "<|channel>", "<channel|>"}))
  plain = encode(tokenizer, name, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
  messages = [{"role": "user", "content": spelled}, {"role": "assistant", "content": f"{spelled} z"}]
  found = encode(tokenizer, name, messages)
  special = {tokenizer.find(spelling) for spelling in RENDERERS[name].special}
  assert [i for i in found.ids if i in special] == [i for i in plain.ids if i in special]
  assert tokenizer.decode([i for i in found.ids if i not in special]).count(spelled) == 2


def test_a_prompt_ends_where_the_answer_begins(tokenizers):
  """The newline before an answer is not merged into its first token, because a server's prompt could not have that token."""
  found = encode(tokenizers["gemma4-small"], "gemma4-small", [TURNS[0], {"role": "assistant", "content": "ab", "weight": 1}])
  start = int(found.trained.argmax())
  assert tokenizers["gemma4-small"].decode(found.ids[:start]).endswith("model\n")


def test_another_models_tokenizer_is_refused(tokenizers):
  with pytest.raises(UserError, match=r"gemma4 needs the tokens <\|turn>, <turn\|>, which the tokenizer lacks"):
    ChatEncoder(RENDERERS["gemma4"], tokenizers["deepseek3"])
  assert encode(BytesTokenizer(), "gemma4", TURNS).trained.sum() == len("Hi.<turn|>Bye.<turn|>")


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_images_stand_in_their_frame_and_are_not_learned(name, tmp_path: Path, tokenizers):
  Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
  vision = load_config(f"{name}-tiny", ["use_multimodal=true"]).config.vision
  parts = [{"type": "text", "text": "See"}, {"type": "image", "image": "a.png"}, {"type": "text", "text": "<image>?"}]
  read = read_conversation({"messages": [{"role": "user", "content": parts}, TURNS[1]]}, "here:1", str(tmp_path))
  rendered = RENDERERS[name].render(read, "training")
  tokenizer = tokenizers[name]
  encoder = ChatEncoder(RENDERERS[name], tokenizer, vision)
  found = encoder.encode(rendered, answers_to_learn(read, "assistant"), "here:1", lambda path: load_image(Path(path), vision))
  (span,) = found.images
  tokens = [vision.boi_token_id, *[vision.image_token_id] * span.image.tokens, vision.eoi_token_id]
  assert found.ids[span.start : span.end] == tokens
  assert tokenizer.decode(found.ids[: span.start]).endswith(f"See{vision.frame}")
  assert tokenizer.decode(np.array(found.ids[span.end :])).startswith(f"{vision.frame}<image>?")
  assert not found.trained[: span.end].any()
  with pytest.raises(BadRecordError, match="has images, but the model takes none"):
    ChatEncoder(RENDERERS[name], tokenizer).encode(rendered, None, "here:1")
