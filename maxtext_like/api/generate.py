"""``generate``: loads a model if necessary, and continues prompts. ``pretrained.py`` has the loop over tokens."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, require_function, require_numbers, words
from maxtext_like.api.pretrained import Generation, Pretrained, as_prompts, load
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.generation.prompts import Prompt


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
  """Continue prompts.

  An answer ends at the tokenizer's end-of-text token, at a token that generation_config.json lists, or at ``stop``.

  Args:
    model: the result of ``load``, or an argument for it.
    prompts: texts, or ``Prompt`` with images. Special tokens in a text, as ``<start_of_turn>``, become those tokens.
      ``Prompt.chat`` is a conversation, which is rendered as in training; its messages are plain text.
    overrides: words that override the configuration of a model to load, as ``"dtype=bfloat16"``.
    max_tokens: maximum length of an answer, in tokens.
    temperature: sampling temperature; 0: the most likely token.
    top_k: sample from this number of most likely tokens; 0: all.
    top_p: sample from the most likely tokens with this total probability.
    min_p: sample from tokens with at least this share of the highest probability.
    seed: seed of the sampling.
    stop: tokens that end an answer, as spelled or by role (end_of_turn).
    stop_ids: ids of tokens that end an answer.
    on_text: called with (index of the prompt, new text) while answers are generated; only with complete characters.
    adapters: as for ``load``.
    keys: the same as ``overrides``, as Python values; ``tokenizer="bytes"`` for a checkpoint without a tokenizer.

  Raises:
    UserError: a prompt, an image or an option is invalid.
    NonFiniteError: the logits are not finite; the message has the row and the token.
  """
  # Checked here too, before a model is built.
  require_numbers(generate, max_tokens=max_tokens, top_k=top_k, seed=seed, temperature=temperature, top_p=top_p, min_p=min_p)
  if on_text is not None:
    require_function(generate, "on_text", on_text)
  given, laid_over = as_prompts(prompts), words(overrides, keys, generate)
  if not isinstance(model, Pretrained):
    model = load(model, *laid_over, images=any(prompt.images for prompt in given), adapters=adapters)
  elif laid_over or adapters:
    raise UserError(
      f"generate: {laid_over[0] if laid_over else 'adapters'}: the model is already loaded\n  fix: pass it to load"
    )
  return model.generate(
    given,
    max_tokens=max_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    seed=seed,
    stop=stop,
    stop_ids=stop_ids,
    on_text=on_text,
  )
