"""Turns prompts into the input of the engine: token ids, and images at the places that the text marks.

B prompts, T positions, I images.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxtext_like.config.schema import Config
from maxtext_like.config.vision import VisionConfig
from maxtext_like.data.chat.conversation import Conversation
from maxtext_like.data.chat.encode import ChatEncoder
from maxtext_like.data.chat.records import read_conversation
from maxtext_like.data.chat.registry import choose
from maxtext_like.data.chat.rendering import Renderer, RenderError
from maxtext_like.data.documents import BadRecordError
from maxtext_like.data.image_text.image_names import is_data
from maxtext_like.data.image_text.images import TowerImage, require_pillow, tower_arrays
from maxtext_like.data.image_text.multimodal import interleave, load_for
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.errors import UserError
from maxtext_like.generation.engine import Prompts
from maxtext_like.models.registry import FAMILIES
from maxtext_like.strict_json import parse

_CONTEXT = 8  # tokens of the prompt that an answer is decoded with


@dataclass(frozen=True)
class Prompt:
  """A text to continue, or a conversation to answer.

  Attributes:
    text: the text. The spelling of a special token in it is that token.
    images: paths of the images, at the placeholders in the text, or before the text if it has no placeholder.
    place: names the prompt in errors.
    conversation: a conversation to answer instead of a text to continue; the model's chat template renders it.
  """

  text: str
  images: tuple[str, ...] = ()
  place: str = "the prompt"
  conversation: Conversation | None = None

  @classmethod
  def chat(
    cls,
    messages: "str | Sequence[Mapping[str, Any]]",
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    images: Sequence[str] = (),
    think: bool = False,
  ) -> "Prompt":
    """Makes a prompt from a conversation: the text of a user, or messages in OpenAI's form.

    Args:
      messages: messages of any role; the last one is to be answered.
      tools: declarations of tools in OpenAI's form.
      images: files for the places where messages have ``<image>``, or parts of type image without a name.
      think: ask the model to think, if it supports that.

    Raises:
      UserError: it is not a conversation.
    """
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    record = {
      "messages": listed,
      "tools": list(tools) or None,
      "enable_thinking": think or None,
      "images": list(images) or None,
    }
    return cls._of_record(record, cls.place, os.getcwd())

  @classmethod
  def _of_record(cls, record: Mapping[str, Any], place: str, folder: str) -> "Prompt":
    try:
      conversation = read_conversation(record, place, folder)
    except BadRecordError as error:
      raise UserError(str(error), fix=error.fix or "correct this prompt") from None
    return cls("", conversation.images, place, conversation)


def read_prompts(path: Path) -> list[Prompt]:
  """Reads the prompts of a .jsonl file: {"prompt": "...", "images": ["a.png"]}, or conversations to answer: {"messages":
  [...]}.

  Images are relative to the file's folder.

  Raises:
    UserError: names file and line.
  """
  try:
    lines = path.read_bytes().splitlines()
  except OSError as error:
    raise UserError(f"{path}: cannot be read: {error.strerror}", fix="name a .jsonl file that exists and can be read") from None
  prompts = []
  for number, line in enumerate(lines, 1):
    if line.strip():
      place = f"{path}:{number}"
      record = parse(line, place)
      if isinstance(record, dict) and "messages" in record:
        prompts.append(Prompt._of_record(record, place, str(path.parent.absolute())))
        continue
      if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UserError(
          f'{place}: expected an object with a text "prompt" or with "messages"',
          fix='write {"prompt": "..."} or {"messages": [...]} on the line',
        )
      images = record.get("images") or []
      if not isinstance(images, list) or not all(isinstance(name, str) and name for name in images):
        raise UserError(f'{place}: "images" is not a list of file names', fix='write "images": ["a.png"]')
      prompts.append(
        Prompt(record["prompt"], tuple(n if is_data(n) else str(path.parent / Path(n).expanduser()) for n in images), place)
      )
  if not prompts:
    raise UserError(f"{path}: there are no prompts in it\n  fix: write one JSON object on each line")
  return prompts


def chat_renderer(config: Config, tokenizer: Tokenizer) -> tuple[Renderer, set[int]]:
  """Returns the renderer of a model's conversations, and the tokens that end an answer in it. Raises UserError if there is
  none."""
  published = FAMILIES[config.model.decoder_block].chat_template(config.model)
  renderer = choose(config.data.chat_template, published, tokenizer)
  return renderer, {token for end in renderer.ends if (token := tokenizer.find(end)) is not None}


def encode(
  prompts: Sequence[Prompt],
  tokenizer: Tokenizer,
  vision: VisionConfig,
  renderer: Renderer | None = None,
  *,
  special_tokens: str | None = None,
) -> Prompts:
  """Encodes prompts for the engine, each with the beginning-of-text token if the tokenizer has one.

  Args:
    prompts: prompts in order.
    tokenizer: tokenizer of the model.
    vision: the ``vision:`` section.
    renderer: renders conversations; needed if any prompt is one.
    special_tokens: ``special_tokens_in_text``, for the texts in conversations; "parse" reads spellings as the tokens.

  Raises:
    UserError: the renderer does not support a conversation; a prompt is empty; an image cannot be used or has no place in its
      text; there are images but the model takes none; a text contains the image token without an image.
  """
  rows, images, names = [], [], [prompt.place for prompt in prompts]
  encoder = None if renderer is None else ChatEncoder(renderer, tokenizer, vision, parse=special_tokens == "parse")
  for prompt in prompts:
    if prompt.images and not vision.use_multimodal:
      raise UserError(
        f"{prompt.place}: has images, but the model has no vision tower (use_multimodal is false)\n"
        "  fix: use a checkpoint with a vision tower, or leave out the images"
      )
    try:
      prompt.text.encode("utf-8")  # bytes on a command line that are not UTF-8 arrive as surrogates
      if prompt.conversation is not None:
        assert renderer is not None
        assert encoder is not None
        ids, found = _answer_to(prompt, prompt.conversation, renderer, encoder, vision)
      else:
        ids, found = _encode_one(prompt, tokenizer, vision)
    except UnicodeEncodeError:
      raise UserError(f"{prompt.place}: not valid Unicode text", fix="save the file, or set the terminal, as UTF-8") from None
    except BadRecordError as error:
      raise UserError(str(error), fix=error.fix or "correct this prompt") from None
    except RenderError as error:
      raise UserError(f"{prompt.place}: {error}", fix=error.fix or "change the conversation, or set chat_template") from None
    if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
      ids = [tokenizer.bos_id, *ids]
    if not ids:
      raise UserError(f"{prompt.place}: empty, and the tokenizer has no token for the beginning of a text\n  fix: write a text")
    if vision.use_multimodal and ids.count(vision.image_token_id or 0) != sum(image.tokens for image in found):
      raise UserError(
        f"{prompt.place}: the text contains the token {vision.image_token_id}, which stands for images\n  fix: remove it"
      )
    rows.append(ids)
    images += found
  if not images:
    return Prompts(rows, names=names)
  types = [[int(token == vision.image_token_id) for token in ids] for ids in rows]
  return Prompts(rows, types, tower_arrays(images, vision), names)


def _answer_to(
  prompt: Prompt, conversation: Conversation, renderer: Renderer, encoder: ChatEncoder, vision: VisionConfig
) -> tuple[list[int], list[TowerImage]]:
  """Returns the ids of a conversation and of the text that asks the model to answer, and the images."""
  if prompt.images:
    require_pillow()
  images = [load_for(path, vision, prompt.place) for path in prompt.images]
  left = iter(images)
  found = encoder.encode(renderer.render(conversation, "prompt"), frozenset(), prompt.place, lambda path: next(left))
  return found.ids, images


def _encode_one(prompt: Prompt, tokenizer: Tokenizer, vision: VisionConfig) -> tuple[list[int], list[TowerImage]]:
  """Returns the ids without the beginning-of-text token, and the images. Without images, a placeholder is text."""
  if not prompt.images:
    return tokenizer.encode_special(prompt.text), []
  require_pillow()
  mark = vision.image_placeholder
  # As in Hugging Face's processors, images without a placeholder in the text come first.
  text = prompt.text if mark in prompt.text else mark * len(prompt.images) + prompt.text
  parts = text.split(mark)
  if len(parts) - 1 != len(prompt.images):
    raise UserError(
      f"{prompt.place}: the text has {len(parts) - 1} '{mark}' for {len(prompt.images)} images\n"
      f"  fix: write {mark} once for each image, or not at all"
    )
  images = [load_for(name, vision, prompt.place) for name in prompt.images]
  ids, _ = interleave(parts, images, vision, tokenizer.encode_special)
  return ids, images


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
  """Returns the text of an answer after its prompt. Decoded alone, sentencepiece would drop its first space."""
  before = [token for token in prompt[-_CONTEXT:] if token < tokenizer.vocab_size]
  start, whole = tokenizer.decode(before), tokenizer.decode([*before, *answer])
  return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(answer)
