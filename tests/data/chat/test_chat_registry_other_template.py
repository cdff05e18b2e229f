"""A warning is given if and only if a checkpoint's own template differs from the one published for its family."""

import logging
import re

import pytest

from maxtext_like.data.chat.registry import RENDERERS, choose
from maxtext_like.data.tokenization.tokenizer import load_tokenizer
from tests.generation.letters import write_letters

GEMMA3 = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set before = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- (before if loop.first else '') + m.content + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


@pytest.mark.parametrize(
  ("template", "told"),
  [
    (None, None),
    (GEMMA3, None),
    (GEMMA3.replace("bos_token", "eos_token"), r"chat_template.jinja has '<eos>.* where gemma3 has '<start_of_turn>user"),
    (GEMMA3.replace("'model'", "'assistant'"), r"has '.*assistant.*' where gemma3 has '.*model"),
    (GEMMA3.replace("before + ", "").replace("+ '\n\n'", "+ ' '"), r"Count\. One\?"),
    (
      GEMMA3.replace(
        "{% if messages[0].role == 'system' %}", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}"
      ),
      None,
    ),
    ("{% for", "cannot be compared with it: .*chat_template.jinja"),
  ],
)
def test_it_is_told(template, told, tmp_path, caplog):
  write_letters(tmp_path)
  if template is not None:
    (tmp_path / "chat_template.jinja").write_text(template)
  tokenizer = load_tokenizer(str(tmp_path))
  with caplog.at_level(logging.WARNING):
    assert choose("auto", "gemma3", tokenizer) is RENDERERS["gemma3"]
    assert choose("auto", "gemma3", tokenizer) is RENDERERS["gemma3"]
    assert choose("gemma3", "gemma3", tokenizer) is RENDERERS["gemma3"]
  if told is None:
    assert not caplog.records
    return
  (record,) = caplog.records
  assert re.search(told, record.getMessage(), re.DOTALL), record.getMessage()
