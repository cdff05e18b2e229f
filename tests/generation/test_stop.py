"""The tokens that end an answer: the tokenizer's eos, the lists in a model's files, and names."""

import json
from pathlib import Path

import pytest

from maxtext_like.data.tokenization.tokenizer import load_tokenizer
from maxtext_like.errors import UserError
from maxtext_like.generation.stop import named_tokens, stop_tokens, suggested_sampling
from tests.generation.letters import write_letters


def test_the_files_of_the_model_and_names(tmp_path: Path):
  tokenizer = load_tokenizer(str(write_letters(tmp_path)))
  assert stop_tokens(tokenizer, None) == {1}
  assert stop_tokens(tokenizer, tmp_path) == {1}
  assert named_tokens(tokenizer, ["end_of_turn", "<start_of_turn>", "?"]) == {3, 4, tokenizer.encode("?")[0]}
  config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
  config.write_text('{"text_config": {"eos_token_id": 9}}')
  assert stop_tokens(tokenizer, tmp_path) == {1, 9}
  config.write_text('{"eos_token_id": [1, 106]}')
  assert stop_tokens(tokenizer, tmp_path) == {1, 106}
  generation.write_text('{"temperature": 1.0}')
  assert stop_tokens(tokenizer, tmp_path) == {1, 106}, "a file that does not say leaves it to the other"
  generation.write_text('{"eos_token_id": 7}')
  assert stop_tokens(tokenizer, tmp_path) == {1, 7}


def test_a_name_that_is_no_token_lists_those_that_are(tmp_path: Path):
  tokenizer = load_tokenizer(str(write_letters(tmp_path)))
  with pytest.raises(UserError, match=r"stop token 'user': .*\n.*one of: bos, eos, pad, start_of_turn, end_of_turn$"):
    named_tokens(tokenizer, ["user"])


@pytest.mark.parametrize("value", ["x", -1, True, [1, "x"], [1.5], {"a": 1}])
def test_malformed_lists_are_refused(value: object, tmp_path: Path):
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
  with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is .*, expected a token id or a list of them"):
    stop_tokens(load_tokenizer("bytes"), tmp_path)


def test_files_that_are_no_objects(tmp_path: Path):
  (tmp_path / "generation_config.json").write_text("[1]")
  with pytest.raises(UserError, match="not a JSON object"):
    stop_tokens(load_tokenizer("bytes"), tmp_path)


def test_options_of_sampling_that_transformers_would_use(tmp_path: Path):
  assert suggested_sampling(None) == suggested_sampling(tmp_path) == {}
  file = tmp_path / "generation_config.json"
  file.write_text('{"do_sample": true, "top_k": 64, "top_p": 0.95, "temperature": null, "eos_token_id": 1}')
  assert suggested_sampling(tmp_path) == {"top_k": 64, "top_p": 0.95}
  file.write_text('{"top_k": 64}')
  assert suggested_sampling(tmp_path) == {}, "transformers is greedy without do_sample"
