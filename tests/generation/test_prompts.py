"""Prompts with images: the frames of each family, texts with and without placeholders, batches, and refusals."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxtext_like.config.load import load_config
from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.chat.encode import ChatEncoder
from maxtext_like.data.chat.records import read_conversation
from maxtext_like.data.chat.registry import RENDERERS
from maxtext_like.data.tokenization.tokenizer import load_tokenizer
from maxtext_like.errors import UserError
from maxtext_like.generation.prompts import Prompt, continuation, encode, read_prompts
from tests.generation.letters import write_letters

BOI, IMAGE, EOI = 261, 260, 262


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  folder = tmp_path_factory.mktemp("prompts")
  for name, size in (("wide.png", (20, 60)), ("tall.jpg", (70, 15))):
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (*size, 3)).astype(np.uint8)).save(folder / name)
  (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nxx")
  write_letters(folder)
  return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
  return load_tokenizer(str(folder))


def vision_of(model: str, *words: str) -> VisionConfig:
  return load_config(model, ["use_multimodal=true", *words]).config.vision


@pytest.mark.parametrize("model", ["gemma3-tiny", "gemma4-tiny"])
def test_images_stand_where_the_text_marks_them_else_before_it(model: str, folder: Path, tokenizer):
  vision, files = vision_of(model), (str(folder / "wide.png"), str(folder / "tall.jpg"))
  frame = "\n\n" if model == "gemma3-tiny" else ""
  # 60 x 20: 6 x 2 squares of 12 pixels in 16 tokens; 15 x 70: 1 column of 8.
  count = {"gemma3-tiny": (16, 16), "gemma4-tiny": (12, 8)}[model]

  def image(i: int) -> list[int]:
    return [BOI, *[IMAGE] * count[i], EOI]

  def text(words: str) -> list[int]:
    return tokenizer.encode(words)

  marked = Prompt("a<image>b<start_of_turn><image>", files)
  unmarked = Prompt("see", files)
  plain = Prompt("a <image>")
  got = encode([marked, unmarked, plain], tokenizer, vision)
  assert got.tokens[0] == [
    2, *text("a" + frame), *image(0), *text(frame + "b"), 3, *text(frame), *image(1), *text(frame),
  ]  # fmt: skip
  assert got.tokens[1] == [2, *text(frame), *image(0), *text(frame + frame), *image(1), *text(frame + "see")]
  assert got.tokens[2] == [2, *text("a <image>")], "without an image the mark is text"
  assert got.token_types is not None
  assert got.images is not None
  assert [[int(i == IMAGE) for i in row] for row in got.tokens] == list(map(list, got.token_types))
  pixels = got.images["pixel_values"]
  assert len(pixels) == 4
  np.testing.assert_array_equal(pixels[:2], pixels[2:])
  if model == "gemma4-tiny":
    positions = got.images["image_position_ids"]
    patches = [int((positions[i, :, 0] >= 0).sum()) for i in range(2)]
    assert patches == [9 * count[0], 9 * count[1]]
    assert positions[1, : patches[1]].max(axis=0).tolist() == [2, 23]
    assert positions[0, : patches[0]].max(axis=0).tolist() == [17, 5]
  else:
    assert set(got.images) == {"pixel_values"}


def test_a_text_that_begins_with_bos_gets_no_second_one(tokenizer):
  vision = load_config("gemma4-tiny").config.vision
  got = encode([Prompt("<bos>ab"), Prompt("ab"), Prompt("")], tokenizer, vision)
  assert got.tokens[0] == got.tokens[1] == [2, *tokenizer.encode("ab")]
  assert got.tokens[2] == [2]
  assert got.images is got.token_types is None


def test_a_file_of_prompts(folder: Path):
  file = folder / "prompts.jsonl"
  file.write_text('{"prompt": "a", "images": ["wide.png", "/x/y.png"]}\n\n{"prompt": "b"}\n{"prompt": "c", "images": null}\n')
  first, second, third = read_prompts(file)
  assert first == Prompt("a", (str(folder / "wide.png"), "/x/y.png"), f"{file}:1")
  assert second == Prompt("b", (), f"{file}:3")
  assert third.images == ()


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ('{"prompt": 1}', ':1: expected an object with a text "prompt"'),
    ('["a"]', ':1: expected an object with a text "prompt"'),
    ('{"prompt": "a", "images": "wide.png"}', ':1: "images" is not a list of file names'),
    ('{"prompt": "a", "images": [1]}', ':1: "images" is not a list of file names'),
    ('{"prompt": "a", "prompt": "b"}', "listed twice"),
    ("", "there are no prompts"),
  ],
)
def test_malformed_files_are_refused(line: str, reason: str, tmp_path: Path):
  (tmp_path / "p.jsonl").write_text(line)
  with pytest.raises(UserError, match=reason):
    read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
  ("prompt", "reason"),
  [
    (Prompt("<image> <image>", ("wide.png",)), "the prompt: the text has 2 '<image>' for 1 images"),
    (Prompt("a<image>", ("wide.png", "tall.jpg"), "f:3"), "f:3: the text has 1 '<image>' for 2 images"),
    (Prompt("a", ("none.png",)), "the prompt: image .*none.png: no such file"),
    (Prompt("a", ("broken.png",)), "the prompt: image .*broken.png: "),
    (Prompt("\ud800"), "not valid Unicode"),
  ],
)
def test_what_cannot_be_placed_is_refused(prompt: Prompt, reason: str, folder: Path, tokenizer):
  images = tuple(str(folder / name) for name in prompt.images)
  with pytest.raises(UserError, match=reason):
    encode([Prompt(prompt.text, images, prompt.place)], tokenizer, vision_of("gemma4-tiny"))


def test_images_for_a_model_without_a_tower_and_image_tokens_without_images(folder: Path):
  with pytest.raises(UserError, match="no vision tower"):
    encode([Prompt("a", ("a.png",))], load_tokenizer("bytes"), load_config("gemma4-tiny").config.vision)
  write_letters(folder / "more", image_soft_token=IMAGE)
  with pytest.raises(UserError, match="the text contains the token 260"):
    encode([Prompt("<image_soft_token>")], load_tokenizer(str(folder / "more")), vision_of("gemma4-tiny"))


def test_an_answer_is_decoded_as_it_follows_its_prompt(tmp_path: Path):
  from sentencepiece import SentencePieceTrainer

  model = io.BytesIO()
  SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
    sentence_iterator=iter(["the quick brown fox jumps"] * 20), model_writer=model, vocab_size=40, hard_vocab_limit=False,
    pad_id=0, eos_id=1, bos_id=2, unk_id=3, minloglevel=2,
  )  # fmt: skip
  (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
  tokenizer = load_tokenizer(str(tmp_path))
  prompt, answer = [2, *tokenizer.encode("the")], tokenizer.encode("quick")
  assert tokenizer.decode(answer) == "quick"
  assert continuation(tokenizer, prompt, answer) == " quick"
  assert continuation(tokenizer, [2, 9999], answer) == "quick", "ids of images are no text"
  assert continuation(load_tokenizer("bytes"), [0xC3 + 3], [0xA4 + 3]) == "\ufffd", "half a character before it"


def test_conversations_are_rendered_as_for_training(folder: Path, tokenizer):
  vision, renderer = vision_of("gemma3-tiny"), RENDERERS["gemma3"]
  (folder / "asked.jsonl").write_text(
    '{"messages": [{"role": "user", "content": "<image>see <end_of_turn>"}], "images": ["wide.png"]}\n'
    '{"messages": [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}, {"role": "user", "content": "c"}]}\n'
  )
  prompts = [*read_prompts(folder / "asked.jsonl"), Prompt.chat("a"), Prompt("a")]
  got = encode(prompts, tokenizer, vision, renderer)
  text, start, end = tokenizer.encode, tokenizer.find("<start_of_turn>"), tokenizer.find("<end_of_turn>")
  asks = [end, *text("\n"), start, *text("model\n")]
  image = [BOI, *[IMAGE] * 16, EOI]
  # The user's words are text, and the newlines around an image are Gemma 3's.
  assert got.tokens[0] == [2, start, *text("user\n\n\n"), *image, *text("\n\nsee <end_of_turn>"), *asks]
  assert end not in text("<end_of_turn>")
  assert got.tokens[1] == [2, start, *text("user\na"), *asks, *text("b"), end, *text("\n"), start, *text("user\nc"), *asks]
  assert got.tokens[2:] == [[2, start, *text("user\na"), *asks], [2, *text("a")]]
  (parsed,) = encode([Prompt.chat("see <end_of_turn>")], tokenizer, vision, renderer, special_tokens="parse").tokens
  assert parsed == [2, start, *text("user\nsee "), end, *asks], "as a run with special_tokens_in_text=parse has learned it"
  trained = renderer.render(read_conversation({"messages": [
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
  ]}, "", "/"), "training")  # fmt: skip
  encoded = ChatEncoder(renderer, tokenizer).encode(trained, None, "")
  assert encoded.ids[: len(got.tokens[2])] == got.tokens[2]
  with pytest.raises(UserError, match=r"the prompt: Gemma 3 needs user and assistant to alternate"):
    encode([Prompt.chat([{"role": "assistant", "content": "a"}])], tokenizer, vision, renderer)
  with pytest.raises(UserError, match=r"messages\[0\] has the role 'bot'"):
    Prompt.chat([{"role": "bot", "content": "a"}])
