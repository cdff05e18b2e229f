"""Every generation option of the installed transformers is honored, or rejected by name. Needs the extra ``parity``."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maxtext_like import generate
from maxtext_like.api.answers import GenerateOptions, translated_options
from maxtext_like.data.tokenization.tokenizer import load_tokenizer
from maxtext_like.errors import UserError
from maxtext_like.generation.stop import stop_tokens
from maxtext_like.generation.transformers_options import NAMES, SAME, ending_tokens
from tests.generation.letters import write_letters

torch = pytest.importorskip("torch", reason="needs the extra parity")
transformers = pytest.importorskip("transformers", reason="needs the extra parity")

pytestmark = pytest.mark.slow
OTHERS = {"self", "kwargs"}
HONORED: dict[str, Any] = {
  "max_new_tokens": 5, "min_new_tokens": 2, "num_return_sequences": 3, "do_sample": False, "suppress_tokens": [3],
  "sequence_bias": {(4,): 1.5}, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5,
  "stop_strings": ["x"], "eos_token_id": [5],
}  # fmt: skip
# All values of these options have the same effect.
NO_EFFECT = {"use_cache": True, "return_dict_in_generate": True, "renormalize_logits": True, "transformers_version": "5"}
NO_EFFECT["_from_model_config"] = True


def names() -> set[str]:
  own = set(inspect.signature(transformers.GenerationMixin.generate).parameters) - OTHERS
  return set(vars(transformers.GenerationConfig())) | own


def test_every_option_is_known():
  assert not names() - NAMES
  assert set(HONORED) <= names()
  assert set(SAME) <= set(GenerateOptions.__annotations__)


@pytest.mark.parametrize("name", sorted(names()))
def test_an_option_is_honored_or_refused_by_name(name: str):
  options, others = translated_options(generate, {}, {name: None})
  greedy = {"temperature": 0.0} if name == "do_sample" else {}  # None is not True, so transformers is greedy
  assert (options, others) == ({name: None} if name == "eos_token_id" else greedy, {})
  if name in HONORED:
    options, others = translated_options(generate, {}, {name: HONORED[name]})
    assert len(options) == 1
    assert not others
  elif name in NO_EFFECT:
    assert translated_options(generate, {}, {name: NO_EFFECT[name]}) == ({}, {})
  else:
    with pytest.raises(UserError, match=f"generate: {name}=5 is an option of transformers\n  why: .*\n  fix: "):
      translated_options(generate, {}, {name: 5})


def test_defaults_of_transformers_change_nothing():
  """Transformers' defaults are accepted and mean greedy decoding. ``GenerationConfig().to_diff_dict()`` sets no option."""
  defaults = transformers.GenerationConfig._get_default_generation_params()
  # Options of speculative decoding, which transformers reads only with an assistant, and lengths that count the prompt.
  refused = {"max_length", *(name for name in defaults if "assistant" in name or "lookbehind" in name)}
  given = {name: value for name, value in defaults.items() if name not in refused} | {"return_dict_in_generate": True}
  options, others = translated_options(generate, {}, given)
  assert others == {}
  assert options == {"temperature": 0.0, "n": 1, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}, "it is greedy"
  assert translated_options(generate, {}, transformers.GenerationConfig().to_diff_dict()) == ({}, {})


@pytest.mark.parametrize("given", [{}, {"eos_token_id": 7}, {"eos_token_id": [7, 9]}, {"eos_token_id": None}])
def test_which_tokens_end_an_answer(given: dict[str, Any], tmp_path: Path):
  """Stop tokens passed to a call replace those of generation_config.json, and None means no stop token."""
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
  stored = transformers.GenerationConfig.from_pretrained(tmp_path)
  model = SimpleNamespace(
    generation_config=stored, config=SimpleNamespace(_get_generation_parameters=dict, is_encoder_decoder=False), device="cpu"
  )
  config, _ = transformers.GenerationMixin._prepare_generation_config(model, None, **given)
  transformers.GenerationMixin._prepare_special_tokens(model, config, True)
  theirs = set() if config._eos_token_tensor is None else set(config._eos_token_tensor.tolist())
  options, _ = translated_options(generate, {}, given)
  tokenizer = load_tokenizer(str(write_letters(tmp_path)))
  ours = set(ending_tokens(options["eos_token_id"])) if given else stop_tokens(tokenizer, tmp_path)
  assert ours == theirs
