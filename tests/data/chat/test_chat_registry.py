"""The choice of a chat template."""

import json
from pathlib import Path

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.data.chat.registry import RENDERERS, choose
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer, load_tokenizer
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES
from tests.generation.letters import write_letters


@pytest.mark.parametrize(
  ("model", "template"),
  [
    ("gemma3-4b", "gemma3"), ("gemma4-31b", "gemma4"), ("gemma4-26b", "gemma4"), ("gemma4-e2b", "gemma4-small"),
    ("gemma4-e4b", "gemma4-small"), ("deepseek3-671b", "deepseek3"), ("deepseek3.2-671b", "deepseek3.2"), ("qwen3-8b", None),
  ],
)  # fmt: skip
def test_the_published_one(model, template):
  config = load_config(model).config.model
  assert FAMILIES[config.decoder_block].chat_template(config) == template
  if template is not None:
    assert choose("auto", template, BytesTokenizer()) is RENDERERS[template]


def test_else_the_one_beside_the_tokenizer(tmp_path: Path):
  tokenizer = load_tokenizer(str(write_letters(tmp_path)))
  with pytest.raises(UserError, match=r"(?s)chat_template is auto, but no .*fix: use a tokenizer with its chat_template.jinja"):
    choose("auto", None, tokenizer)
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ bos_token }}<start_of_turn>"}))
  assert choose("auto", None, tokenizer).name.startswith("tokenizer_config.json, xxh3 ")
  named = choose(str(tmp_path / "tokenizer_config.json"), "gemma3", tokenizer)
  assert named.name == choose("auto", None, tokenizer).name, "the template in the file, not the file"
  assert choose(str(tmp_path / "tokenizer.json"), "gemma3", tokenizer).name.startswith("tokenizer.json, xxh3 ")
  assert choose("gemma3", None, tokenizer) is RENDERERS["gemma3"]
  with pytest.raises(UserError, match="chat_template is 'gema3', expected auto, gemma3, gemma4"):
    choose("gema3", None, tokenizer)
