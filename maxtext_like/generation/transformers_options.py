"""Options of transformers' ``GenerationConfig`` as keywords of ``generate``: translated, or refused with the reason."""

from typing import Any

from maxtext_like.errors import UserError

_SUPPRESSED = -1e9  # added to the logit of a token that is never drawn
_ONES = ("typical_p", "num_beams", "num_beam_groups", "length_penalty", "guidance_scale", "encoder_repetition_penalty")
"""Options that have no effect if they are 1. Other options have no effect if they are None, False, 0 or an empty list."""
_IDS = ("pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
"""Options that are token ids, so that 0 is a value like any other."""

_RENAMED = {
  "max_new_tokens": "max_tokens",
  "min_new_tokens": "min_tokens",
  "num_return_sequences": "n",
  "eos_token_id": "stop_ids",
}
_BEAMS = "beam search is not implemented; answers are sampled, or greedy with temperature=0"
_REFUSED = {
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
  "force_words_ids": _BEAMS,
  "constraints": _BEAMS,
  "num_beams": _BEAMS,
  "num_beam_groups": _BEAMS,
  "diversity_penalty": _BEAMS,
  "length_penalty": _BEAMS,
  "early_stopping": _BEAMS,
  "penalty_alpha": "contrastive search is not implemented",
  "dola_layers": "it is not implemented",
  "guidance_scale": "classifier-free guidance is not implemented",
  "watermarking_config": "watermarks are not implemented",
  "exponential_decay_length_penalty": "it is not implemented; use logit_bias for the token that ends an answer",
  "forced_bos_token_id": "write the token into the prompt",
  "forced_eos_token_id": "answers of the largest length end without a token",
  "begin_suppress_tokens": "it is not implemented; suppress_tokens applies to all positions",
  "token_healing": "it is not implemented",
  "prompt_lookup_num_tokens": "speculative decoding is not implemented",
  "assistant_early_exit": "speculative decoding is not implemented",
  "assistant_model": "speculative decoding is not implemented",
  "output_attentions": "use `maxtext-like xray` or forward with captures",
  "output_hidden_states": "use `maxtext-like xray` or forward with captures",
  "output_scores": "use logprobs=True, which returns log-probabilities of the drawn tokens",
  "output_logits": "use logprobs=True, which returns log-probabilities of the drawn tokens",
  "cache_implementation": "the caches are chosen by the layers: rings of the window, and full rows",
  "pad_token_id": "prompts are not padded with a token",
  "bos_token_id": "the tokenizer decides it",
}
_IGNORED_WHEN_TRUE = {
  "use_cache": "caches are always used",
  "renormalize_logits": "probabilities are always normalized after the filters",
  "return_dict_in_generate": "the result is always an object",
}


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

  def add(name: str, option: str, value: Any) -> None:
    if option in options:
      raise UserError(f"generate: {name}: {option} is set twice\n  fix: remove one of the two")
    options[option] = value

  for name, value in keys.items():
    if name in _RENAMED:
      if value is not None:
        add(name, _RENAMED[name], [value] if name == "eos_token_id" and isinstance(value, int) else value)
    elif name == "do_sample":
      if not value:
        add(name, "temperature", 0.0)
    elif name == "suppress_tokens":
      if value:
        add(name, "logit_bias", dict.fromkeys(value, _SUPPRESSED))
    elif name == "sequence_bias":
      add(name, "logit_bias", _single_tokens(value))
    elif name in _IGNORED_WHEN_TRUE:
      if value is False:
        raise UserError(f"generate: {name}=False: {_IGNORED_WHEN_TRUE[name]}\n  fix: remove it")
    elif name in _REFUSED:
      if not _changes_nothing(name, value):
        raise UserError(
          f"generate: {name}={value!r:.60} is an option of transformers\n  why: {_REFUSED[name]}\n  fix: remove it"
        )
    else:
      others[name] = value
  return options, others


def _changes_nothing(name: str, value: Any) -> bool:
  if value is None or value is False:
    return True
  if isinstance(value, int | float) and not isinstance(value, bool):
    return name not in _IDS and value == (1 if name in _ONES else 0)
  return isinstance(value, list | tuple | dict) and not value


def _single_tokens(bias: Any) -> dict[int, float]:
  """Return ``sequence_bias`` as biases of tokens. Raises UserError if a sequence has several tokens."""
  pairs = bias.items() if isinstance(bias, dict) else bias or ()
  found = {}
  for sequence, number in pairs:
    if len(sequence) != 1:
      raise UserError(
        f"generate: sequence_bias has the sequence {list(sequence)!r:.60}\n  why: only single tokens can have a bias\n"
        "  fix: logit_bias={token: number}"
      )
    found[int(sequence[0])] = float(number)
  return found
