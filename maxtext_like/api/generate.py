"""Continuing prompts from Python."""

import numbers
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, require_function, require_number, words
from maxtext_like.api.pretrained import Pretrained, load
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.generation.prompts import Prompt


@dataclass(frozen=True)
class Answer:
  """What follows a prompt.

  Attributes:
    prompt: its text.
    text: the continuation alone.
    tokens: its ids.
  """

  prompt: str
  text: str
  tokens: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
  """Answers in the order of the prompts, and how they came about.

  Attributes:
    answers: one for each prompt.
    rescued: values that float16 could not hold, and that were clipped or zeroed; None: the model does not run in float16.
    first_tokens: that the first call made, over all prompts.
    first_seconds: until they were there, compilation included.
    seconds: of everything after them.
  """

  answers: tuple[Answer, ...]
  rescued: int | None
  first_tokens: int
  first_seconds: float
  seconds: float

  @property
  def text(self) -> str:
    """The only answer's. Raises ValueError where there are several."""
    if len(self.answers) != 1:
      raise ValueError(f"{len(self.answers)} answers: their texts are [answer.text for answer in generation.answers]")
    return self.answers[0].text


def generate(
  model: str | Path | Saved | Pretrained,
  prompts: "str | Prompt | Sequence[str | Prompt]",
  *overrides: str,
  max_tokens: int = 128,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  seed: int = 0,
  stop: str | Sequence[str] = (),
  stop_ids: Iterable[int] = (),
  on_text: Callable[[int, str], None] | None = None,
  adapters: str | Path | Saved | Sequence[str | Path | Saved] = (),
  **keys: Any,
) -> Generation:
  """Continues prompts. An answer ends at the tokenizer's end of text, at what generation_config.json lists, and at ``stop``.

  Args:
    model: what ``load`` returned, or what it takes.
    prompts: texts, or ``Prompt`` with images. The name of a special token, as ``<start_of_turn>``, is that token.
      ``Prompt.chat`` is a conversation to answer, rendered as for training; what is said in it is text.
    overrides: words laid over the configuration of what is loaded, as ``"dtype=bfloat16"``.
    max_tokens: of a longest answer.
    temperature: 0 takes the most likely token.
    top_k: the so many most likely tokens only; 0: all.
    top_p: the most likely tokens that make up this share.
    min_p: tokens this many times as likely as the top one.
    seed: of the draws.
    stop: tokens that end an answer, by spelling or as end_of_turn.
    stop_ids: the same by id.
    on_text: told (number of the prompt, what is new of its text) while answers grow; whole characters only.
    adapters: as ``load`` takes them.
    keys: the same as ``overrides`` as Python values; ``tokenizer="bytes"`` where the checkpoint has none.

  Raises:
    UserError: a prompt, an image or an option that cannot be used.
    NonFiniteError: the logits are not finite; says of which row and token.
  """
  from maxtext_like.generation import engine
  from maxtext_like.generation.prompts import Prompt, chat_renderer, continuation, encode
  from maxtext_like.generation.sampling import Sampling
  from maxtext_like.generation.stop import stop_tokens

  for name, value in {"max_tokens": max_tokens, "top_k": top_k, "seed": seed}.items():
    require_number(generate, name, value, whole=True)
  for name, value in {"temperature": temperature, "top_p": top_p, "min_p": min_p}.items():
    require_number(generate, name, value)
  if on_text is not None:
    require_function(generate, "on_text", on_text)
  asked = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else [prompts]
  given = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in asked]
  if not given or not all(isinstance(prompt, Prompt) for prompt in given):
    raise UserError(f"prompts: {prompts!r:.60}: neither texts nor Prompts\n  fix: a text, a Prompt, or a list of them")
  laid_over = words(overrides, keys, generate)
  if not isinstance(model, Pretrained):
    model = load(model, *laid_over, images=any(prompt.images for prompt in given), adapters=adapters)
  elif laid_over or adapters:
    raise UserError(
      f"generate: {laid_over[0] if laid_over else 'adapters'}: the model is loaded already\n  fix: give it to load"
    )
  tokenizer, decoder = model.tokenizer, model.model.decoder
  sampling = Sampling(
    temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, vocabulary=tokenizer.vocab_size, seed=seed
  )
  ends = stop_tokens(tokenizer, model.files, [stop] if isinstance(stop, str) else stop, model.config.model)
  ends |= _require_ids(stop_ids, model.config.model.vocab_size)
  renderer = None
  if any(prompt.conversation is not None for prompt in given):
    renderer, of_answers = chat_renderer(model.config, tokenizer)
    ends |= of_answers
  spelt = model.config.data.special_tokens_in_text
  encoded = encode(given, tokenizer, model.config.vision, renderer, special_tokens=spelt)
  engine.check(encoded, decoder, max_tokens)
  params = model.params
  grown = [_Growing(lambda ids, row=row: continuation(tokenizer, row, ids)) for row in encoded.tokens]
  rescued: list[int] = []
  begin = first = time.monotonic()
  first_tokens = None
  for rows in engine.generate(
    decoder, params, encoded, max_tokens=max_tokens, stop=frozenset(ends), sampling=sampling, on_clamped=rescued.append
  ):
    for number, (answer, new) in enumerate(zip(grown, rows, strict=True)):
      answer.ids.extend(new)
      if on_text is not None and (text := answer.new_text()):
        on_text(number, text)
    if first_tokens is None:
      first, first_tokens = time.monotonic(), sum(len(answer.ids) for answer in grown)
  end = time.monotonic()
  for number, answer in enumerate(grown):
    if on_text is not None and (text := answer.new_text(last=True)):
      on_text(number, text)
  answers = tuple(
    Answer(prompt.text, answer.decode(answer.ids), tuple(answer.ids)) for prompt, answer in zip(given, grown, strict=True)
  )
  counted = sum(rescued) if decoder.uses_float16 else None
  return Generation(answers, counted, first_tokens or 0, first - begin, end - first)


def _require_ids(ids: Iterable[int], vocabulary: int) -> set[int]:
  given = list(ids) if isinstance(ids, Iterable) else [ids]
  for token in given:
    if not isinstance(token, numbers.Integral) or not 0 <= token < vocabulary:
      raise UserError(f"generate: stop_ids: {token!r:.60}: the vocabulary has ids 0 to {vocabulary - 1}")
  return {int(token) for token in given}


class _Growing:
  """An answer while it grows, decoded as a whole each time: a character may be spread over several tokens."""

  def __init__(self, decode: Callable[[list[int]], str]):
    self.ids: list[int] = []
    self.decode = decode
    self._shown = ""

  def new_text(self, *, last: bool = False) -> str:
    """What was not shown yet, without a character that is not whole unless it is the last that comes."""
    text = self.decode(self.ids)
    stable = text if last else text.removesuffix("\N{REPLACEMENT CHARACTER}")
    if not stable.startswith(self._shown):
      stable = text if last else self._shown
    new, self._shown = stable[len(self._shown) :], stable
    return new
