"""``generate``: loads a model if necessary, and continues prompts. ``answers.py`` has the options and results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.answers import DRAFT_TOKENS, Generation, as_prompts, require_options, translated_options
from maxtext_like.api.arguments import Saved, after_loading, require_function, words
from maxtext_like.api.pretrained import Pretrained, load
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
  min_tokens: int = 0,
  repetition_penalty: float = 1.0,
  presence_penalty: float = 0.0,
  frequency_penalty: float = 0.0,
  logit_bias: Mapping[int, float] | None = None,
  seed: int = 0,
  seeds: Sequence[int] | None = None,
  n: int = 1,
  stop: str | Sequence[str] = (),
  stop_ids: Iterable[int] = (),
  stop_strings: str | Sequence[str] = (),
  logprobs: bool = False,
  slots: int = 64,
  int8_cache: bool = False,
  draft: str | Path | Saved | Pretrained | None = None,
  draft_tokens: int = DRAFT_TOKENS,
  on_text: Callable[[int, str], None] | None = None,
  adapters: str | Path | Saved | Sequence[str | Path | Saved] = (),
  **keys: Any,
) -> Generation:
  """Continue prompts.

  An answer ends at the tokenizer's end-of-text token, at a token that generation_config.json lists, or at ``stop``.

  Args:
    model: the result of ``load``, or an argument for it.
    prompts: texts, or ``Prompt`` with images. Special tokens in a text, such as ``<start_of_turn>``, become those tokens.
      ``Prompt.chat`` is a conversation, which is rendered as in training; its messages are plain text.
    overrides: words that override the configuration of a model to load, such as ``"dtype=bfloat16"``.
    max_tokens: maximum length of an answer, in tokens.
    temperature: sampling temperature; 0: the most likely token.
    top_k: sample from this number of most likely tokens; 0: all.
    top_p: sample from the most likely tokens with this total probability.
    min_p: sample from tokens with at least this share of the highest probability.
    min_tokens: minimum length of an answer: tokens that would end it are not drawn before.
    repetition_penalty: divides positive logits of tokens of the prompt and the answer, and multiplies negative ones.
    presence_penalty: subtracted from the logits of tokens of the answer.
    frequency_penalty: subtracted from the logits of tokens of the answer, for every occurrence.
    logit_bias: numbers added to logits, by token id.
    seed: seed of the sampling.
    seeds: a seed for each prompt instead; its answer then does not depend on its place among the prompts.
    n: number of answers to each prompt.
    stop: tokens that end an answer, as spelled or by role (end_of_turn).
    stop_ids: ids of tokens that end an answer.
    stop_strings: texts that end an answer, which ends before them.
    logprobs: also return log-probabilities of the tokens.
    slots: largest number of answers that are generated at the same time, a power of two. Other answers wait.
    int8_cache: store keys and values in 8 bits: about half of the memory of the caches, and less accurate.
    draft: a smaller model with the same tokenizer, or an argument of ``load`` for it. It proposes tokens, which one pass of the
      model checks: the answers have the same distribution and may need less time. A model that is loaded here gets the same
      ``overrides`` and ``keys``.
    draft_tokens: number of tokens that it proposes before each pass.
    on_text: called with (index of the answer, new text) while answers are generated; only with complete characters.
    adapters: as for ``load``.
    keys: the same as ``overrides``, as Python values; ``tokenizer="bytes"`` for a checkpoint without a tokenizer. Options of
      transformers' GenerationConfig are accepted too, or refused with the reason; ``eos_token_id`` replaces the model's tokens
      that end an answer.

  Raises:
    UserError: a prompt, an image or an option is invalid.
    NonFiniteError: the logits are not finite; the message has the prompt and the token.
    DoesNotFitError: the weights or the caches do not fit the memory of the device.
  """
  options: dict[str, Any] = {
    "max_tokens": max_tokens,
    "temperature": temperature,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "min_tokens": min_tokens,
    "repetition_penalty": repetition_penalty,
    "presence_penalty": presence_penalty,
    "frequency_penalty": frequency_penalty,
    "logit_bias": logit_bias,
    "seed": seed,
    "seeds": seeds,
    "n": n,
    "stop": stop,
    "stop_ids": stop_ids,
    "stop_strings": stop_strings,
    "logprobs": logprobs,
    "slots": slots,
    "int8_cache": int8_cache,
    "draft": draft,
    "draft_tokens": draft_tokens,
  }
  # Options that are not set can be set by their names in transformers.
  defaults = generate.__kwdefaults__ or {}
  options = {name: value for name, value in options.items() if value is not defaults[name]}
  options, keys = translated_options(generate, options, keys)
  # Checked here too, before a model is built.
  require_options(generate, options)
  if on_text is not None:
    require_function(generate, "on_text", on_text)
  given, laid_over = as_prompts(prompts), words(overrides, keys, generate)
  images = any(prompt.images for prompt in given)
  if draft is not None and not isinstance(draft, Pretrained):
    if isinstance(model, Pretrained):
      what = f"generate: the model is a loaded object, but draft={draft!r:.60} is not"
      raise UserError(what, fix="pass draft=maxtext_like.load(DIR)")
    options["draft"] = load(draft, *laid_over, images=images)
  if not isinstance(model, Pretrained):
    model = load(model, *laid_over, images=images, adapters=adapters)
  elif laid_over or adapters:
    raise after_loading(generate, laid_over[0] if laid_over else "adapters")
  return model.generate(given, on_text=on_text, **options)
