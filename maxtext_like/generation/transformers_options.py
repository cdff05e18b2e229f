"""Options of transformers' ``GenerationConfig`` as keywords of ``generate``: translated, or refused with the reason.

``tests/parity/test_generation_options.py`` compares the names with those of the installed transformers.
"""

import contextlib
import numbers
from collections.abc import Iterable
from typing import Any

import yaml

from maxtext_like.errors import UserError

_ONES = ("typical_p", "num_beams", "num_beam_groups", "length_penalty", "guidance_scale", "encoder_repetition_penalty")
"""Options that have no effect if they are 1. Other options have no effect if they are None, False, 0 or an empty list."""
_IDS = ("pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
"""Options that are token ids, so that 0 is a value like any other."""

SAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop_strings", "eos_token_id")
"""Options with the same name and meaning here. None is the default, except for ``eos_token_id``: no token ends an answer."""
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
_TRANSLATED = ("do_sample", "suppress_tokens", "sequence_bias")
_BEAMS = "beam search is not implemented; answers are sampled, or greedy with temperature=0"
_SPECULATIVE = "speculative decoding takes a draft model and a constant number of tokens: use draft and draft_tokens"
_CACHES = "the caches are chosen by the layers: rings of the window, and full rows"
_COMPILES = "programs are always compiled, for few shapes"
_CAPTURES = "use `maxtext-like xray` or forward with captures"
_LOGPROBS = "use logprobs=True, which returns log-probabilities of the drawn tokens"
_TOKENS = "the prompts are texts, from which the ids are made"
_REFUSED = {
  # Fields of GenerationConfig.
  "max_length": "it counts the prompt too; use max_tokens, the largest length of an answer",
  "min_length": "it counts the prompt too; use min_tokens, the smallest length of an answer",
  "max_time": "answers end by tokens, not by time; use max_tokens",
  "typical_p": "typical sampling is not implemented; use top_p or min_p",
  "top_h": "it is not implemented; use top_p or min_p",
  "epsilon_cutoff": "it is not implemented; use min_p",
  "eta_cutoff": "it is not implemented; use min_p",
  "encoder_repetition_penalty": "it is not implemented; use repetition_penalty",
  "no_repeat_ngram_size": "it is not implemented; use repetition_penalty or frequency_penalty",
  "encoder_no_repeat_ngram_size": "models here have no encoder",
  "decoder_start_token_id": "models here have no encoder",
  "bad_words_ids": "only single tokens can be suppressed; use suppress_tokens",
  "remove_invalid_values": "numbers that are not finite are an error, and are not replaced",
  "force_words_ids": _BEAMS,
  "constraints": _BEAMS,
  "num_beams": _BEAMS,
  "num_beam_groups": _BEAMS,
  "diversity_penalty": _BEAMS,
  "length_penalty": _BEAMS,
  "early_stopping": _BEAMS,
  "penalty_alpha": "contrastive search is not implemented",
  "low_memory": "contrastive search is not implemented",
  "dola_layers": "it is not implemented",
  "guidance_scale": "classifier-free guidance is not implemented",
  "watermarking_config": "watermarks are not implemented",
  "exponential_decay_length_penalty": "it is not implemented; use logit_bias for the token that ends an answer",
  "forced_bos_token_id": "write the token into the prompt",
  "forced_eos_token_id": "answers of the largest length end without a token",
  "begin_suppress_tokens": "it is not implemented; suppress_tokens applies to all positions",
  "token_healing": "it is not implemented",
  "use_mtp": _SPECULATIVE,
  "is_assistant": _SPECULATIVE,
  "num_assistant_tokens": _SPECULATIVE,
  "num_assistant_tokens_schedule": _SPECULATIVE,
  "assistant_confidence_threshold": _SPECULATIVE,
  "assistant_lookbehind": _SPECULATIVE,
  "target_lookbehind": _SPECULATIVE,
  "assistant_ensemble_weight": _SPECULATIVE,
  "speculation_type": _SPECULATIVE,
  "prompt_lookup_num_tokens": _SPECULATIVE,
  "max_matching_ngram_size": _SPECULATIVE,
  "assistant_early_exit": _SPECULATIVE,
  "output_attentions": _CAPTURES,
  "output_hidden_states": _CAPTURES,
  "output_scores": _LOGPROBS,
  "output_logits": _LOGPROBS,
  "cache_implementation": _CACHES,
  "cache_config": f"{_CACHES}; int8_cache=True stores them in 8 bits",
  "max_cache_len": "the caches have the length of the longest prompt with its answer",
  "prefill_chunk_size": "prompts are always processed in chunks of at most 512 tokens",
  "compile_config": _COMPILES,
  "disable_compile": _COMPILES,
  "continuous_batching_config": "batching is always continuous; slots sets the number of answers at the same time",
  "pad_token_id": "prompts are not padded with a token",
  "bos_token_id": "the tokenizer decides it",
  # Other arguments of transformers' generate.
  "generation_config": "pass its fields as keywords; fields that are not set have the defaults of this function, "
  "which samples from all tokens: transformers' defaults are do_sample=False, and top_k=50 with do_sample=True",
  "use_model_defaults": "options of generation_config.json are used only if they are passed",
  "custom_generate": "code of a model repository is not run",
  "assistant_model": _SPECULATIVE,
  "assistant_tokenizer": _SPECULATIVE,
  "logits_processor": "functions on logits are not supported; use logit_bias or the penalties",
  "prefix_allowed_tokens_fn": "functions on logits are not supported; use logit_bias or the penalties",
  "stopping_criteria": "answers end by tokens or texts; use stop, stop_ids or stop_strings",
  "streamer": "use on_text, or model.stream",
  "negative_prompt_ids": "classifier-free guidance is not implemented",
  "negative_prompt_attention_mask": "classifier-free guidance is not implemented",
  "synced_gpus": "the processes of a run always generate together",
  "inputs": _TOKENS,
  "input_ids": _TOKENS,
  "attention_mask": _TOKENS,
}
_IGNORED_WHEN_TRUE = {
  "use_cache": "caches are always used",
  "return_dict_in_generate": "the result is always an object",
}
_IGNORED = ("renormalize_logits", "transformers_version", "_from_model_config")
"""Options that change no answer: probabilities are always normalized after the filters, and the others describe a file."""

NAMES = frozenset({*SAME, *_RENAMED, *_TRANSLATED, *_REFUSED, *_IGNORED_WHEN_TRUE, *_IGNORED})


def translated(keys: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Divide keywords into options of ``generate`` and other keywords.

  Args:
    keys: keywords that are not options of ``generate`` by their own names.

  Returns:
    Options of ``generate`` from keywords with names of transformers, and the other keywords.

  Raises:
    UserError: an option of transformers that has no equivalent here, with a value that would change the result.
  """
  options: dict[str, Any] = {}
  others: dict[str, Any] = {}
  bias: dict[int, float] = {}
  for name, value in keys.items():
    if name in SAME:
      options[name] = value
    elif name in _RENAMED:
      if value is not None:
        options[_RENAMED[name]] = value
    elif name == "suppress_tokens":
      bias |= dict.fromkeys(_ids(name, () if value is None else value), float("-inf"))
    elif name == "sequence_bias":
      for token, number in _single_tokens(value).items():
        bias[token] = bias.get(token, 0.0) + number  # both apply, as in transformers
    elif name in _IGNORED_WHEN_TRUE:
      if value is False:
        raise UserError(f"generate: {name}=False: {_IGNORED_WHEN_TRUE[name]}\n  fix: remove it")
    elif name in _REFUSED:
      if not _changes_nothing(name, value):
        raise UserError(
          f"generate: {name}={value!r:.60} is an option of transformers\n  why: {_REFUSED[name]}\n  fix: remove it"
        )
    elif name not in _IGNORED and name != "do_sample":
      others[name] = value
  if not keys.get("do_sample", True):
    options["temperature"] = 0.0  # greedy, whatever the temperature
  return options | ({"logit_bias": bias} if bias else {}), others


def typed(words: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
  """Divide words of a command line into options of transformers, such as ``eos_token_id=[1,106]``, and other words.

  Raises:
    UserError: a value is not YAML.
  """
  options: dict[str, Any] = {}
  others = []
  for word in words:
    name, _, text = word.partition("=")
    if name not in NAMES:
      others.append(word)
      continue
    try:
      value = yaml.safe_load(text)
    except yaml.YAMLError:
      raise UserError(f"generate: {word}: the value is not YAML", fix=f"write {name}=5, {name}=[5, 6] or {name}=true") from None
    if isinstance(value, str):
      with contextlib.suppress(ValueError):
        value = float(value)  # PyYAML reads 1e-6 as a text
    options[name] = value
  return options, others


def ending_tokens(value: Any) -> list[Any]:
  """Return ``eos_token_id`` as a list. None is an empty list, because no token then ends an answer."""
  if value is None:
    return []
  return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]


def _changes_nothing(name: str, value: Any) -> bool:
  if value is None or value is False:
    return True
  if isinstance(value, int | float) and not isinstance(value, bool):
    return name not in _IDS and value == (1 if name in _ONES else 0)
  return isinstance(value, list | tuple | dict) and not value


def _ids(name: str, value: Any) -> list[int]:
  """Return token ids as a list. Raises UserError if the value is not a list of whole numbers."""
  listed = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [None]
  found = [int(token) for token in listed if isinstance(token, numbers.Integral) and not isinstance(token, bool)]
  if len(found) != len(listed):
    raise UserError(
      f"generate: {name}: {value!r:.60} is not a list of token ids", fix=f"pass {name} with lists of ids, such as [106]"
    )
  return found


def _single_tokens(bias: Any) -> dict[int, float]:
  """Return ``sequence_bias`` as biases of tokens. Raises UserError if a sequence has several tokens."""
  given = bias.items() if isinstance(bias, dict) else () if bias is None else bias
  pairs = list(given) if isinstance(given, Iterable) else [given]
  if not all(isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], numbers.Real) for pair in pairs):
    raise UserError(
      f"generate: sequence_bias={bias!r:.60}: not pairs of a list of token ids and a number", fix="pass logit_bias={106: -2.5}"
    )
  found = {}
  for tokens, number in pairs:
    sequence = _ids("sequence_bias", tokens)
    if len(sequence) != 1:
      raise UserError(
        f"generate: sequence_bias has the sequence {list(sequence)!r:.60}\n  why: only single tokens can have a bias\n"
        "  fix: pass logit_bias={token: number}"
      )
    found[sequence[0]] = float(number)
  return found
