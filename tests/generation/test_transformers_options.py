"""Options of transformers' GenerationConfig: translated, or refused by name."""

import pytest

from maxtext_like import generate
from maxtext_like.api.answers import require_options, translated_options
from maxtext_like.config.overrides import is_key
from maxtext_like.errors import UserError
from maxtext_like.generation.transformers_options import NAMES, ending_tokens, translated, typed


def test_options_with_an_equivalent():
  given = {"max_new_tokens": 5, "do_sample": False, "num_return_sequences": 2, "eos_token_id": 7, "suppress_tokens": [3]}
  never = float("-inf")
  options, others = translated(
    given | {"use_cache": True, "num_beams": 1, "dtype": "bfloat16", "typical_p": 1.0, "force_words_ids": []}
  )
  assert options == {"max_tokens": 5, "temperature": 0.0, "n": 2, "eos_token_id": 7, "logit_bias": {3: never}}
  assert others == {"dtype": "bfloat16"}
  assert translated({"sequence_bias": {(4,): 2}, "do_sample": True})[0] == {"logit_bias": {4: 2.0}}
  both = {"suppress_tokens": [1, 4], "sequence_bias": [[[4], 2.0], [[5], -1]]}
  assert translated(both)[0] == {"logit_bias": {1: never, 4: never, 5: -1.0}}


def test_options_of_a_command_line():
  options, others = typed(["eos_token_id=[1, 106]", "dtype=bfloat16", "min_p=1e-6", "eos_token_id=null", "use_cache=true", "x"])
  assert options == {"eos_token_id": None, "min_p": 1e-6, "use_cache": True}
  assert others == ["dtype=bfloat16", "x"]
  both = {name for name in NAMES if is_key(name)}
  assert both == {"eos_token_id", "pad_token_id", "bos_token_id"}, "another word with two meanings"
  with pytest.raises(UserError, match="not YAML"):
    typed(["eos_token_id=[1"])


def test_an_option_that_is_none_has_its_default():
  options, others = translated_options(
    generate, {"temperature": None, "top_k": 3}, {"eos_token_id": None, "max_new_tokens": None}
  )
  assert (options, others) == ({"top_k": 3, "eos_token_id": None}, {})
  assert [ending_tokens(value) for value in (None, [], 5, (5, 6))] == [[], [], [5], [5, 6]]


@pytest.mark.parametrize(
  ("given", "match"),
  [
    ({"num_beams": 4}, "num_beams=4 is an option of transformers\n  why: beam search"),
    ({"max_length": 20}, "use max_tokens"),
    ({"output_scores": True}, "use logprobs=True"),
    ({"no_repeat_ngram_size": 1}, "not implemented"),
    ({"forced_bos_token_id": 0}, "write the token into the prompt"),
    ({"use_cache": False}, "always used"),
    ({"sequence_bias": {(4, 5): 2.0}}, "only single tokens"),
    ({"use_mtp": True}, "speculative decoding"),
    ({"stopping_criteria": [len]}, "stop_strings"),
    ({"suppress_tokens": 3}, "suppress_tokens: 3 is not a list of token ids"),
    ({"suppress_tokens": [1.5]}, "not a list of token ids"),
    ({"sequence_bias": 5}, "not pairs of a list of token ids and a number"),
    ({"sequence_bias": [[4, 2.0]]}, "sequence_bias: 4 is not a list of token ids"),
    ({"sequence_bias": {(4,): "x"}}, "not pairs"),
  ],
)
def test_options_that_would_change_the_result(given, match):
  with pytest.raises(UserError, match=match):
    translated(given)


@pytest.mark.parametrize(
  "given",
  [
    {"stop_strings": 5}, {"stop_strings": ["a", 5]}, {"stop": 5}, {"seeds": 5}, {"seeds": [True]}, {"logprobs": "yes"},
    {"int8_cache": 2}, {"logit_bias": {5: "x"}}, {"logit_bias": {True: 1.0}}, {"logit_bias": [5]},
  ],
)  # fmt: skip
def test_options_of_another_type(given):
  """This includes values of a command line, such as stop_strings=5."""
  with pytest.raises(UserError, match=rf"^generate: {next(iter(given))}=.*: not (a|whole) "):
    require_options(generate, given)


def test_a_temperature_of_greedy_answers():
  with pytest.raises(UserError, match=r"temperature=0.7 has no effect with do_sample=False"):
    translated_options(generate, {"temperature": 0.7}, {"do_sample": False})
