"""Options of transformers' GenerationConfig: translated, or refused by name."""

import pytest

from maxtext_like.errors import UserError
from maxtext_like.generation.transformers_options import translated


def test_options_with_an_equivalent():
  given = {"max_new_tokens": 5, "do_sample": False, "num_return_sequences": 2, "eos_token_id": 7, "suppress_tokens": [3]}
  options, others = translated(
    given | {"use_cache": True, "num_beams": 1, "dtype": "bfloat16", "typical_p": 1.0, "force_words_ids": []}
  )
  assert options == {"max_tokens": 5, "temperature": 0.0, "n": 2, "stop_ids": [7], "logit_bias": {3: -1e9}}
  assert others == {"dtype": "bfloat16"}
  assert translated({"sequence_bias": {(4,): 2}, "do_sample": True})[0] == {"logit_bias": {4: 2.0}}


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
    ({"suppress_tokens": [1], "sequence_bias": {(4,): 2.0}}, "logit_bias is set twice"),
  ],
)
def test_options_that_would_change_the_result(given, match):
  with pytest.raises(UserError, match=match):
    translated(given)
