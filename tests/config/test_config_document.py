"""docs/reference/configuration.md agrees with the schema and base.yml, and every key has a description."""

import pytest

from maxtext_like.config import maxtext
from maxtext_like.config.document import keys, page, page_path
from maxtext_like.config.schema import LEAVES


def test_the_page_is_current():
  assert page_path().read_text("utf-8") == page(), "run: python -m maxtext_like.config.document"


def test_every_key_is_told_with_type_default_and_meaning():
  assert sorted(k.name for k in keys()) == sorted(LEAVES)
  assert all(k.kind and k.default and len(k.meaning) > 10 for k in keys())


@pytest.mark.parametrize(
  ("name", "kind", "default"),
  [
    ("steps", "int or null", "100"),
    ("learning_rate", "float", "0.0003"),
    ("emb_dim", "int", "set by the model"),
    ("run_name", "str or null", "null"),
    ("float32_gate_product", "auto | true | false", "auto"),
    ("trainable_parameters_mask", "list of str", "[]"),
  ],
)
def test_samples(name, kind, default):
  (key,) = [k for k in keys() if k.name == name]
  assert (key.kind, key.default) == (kind, default)


def test_the_page_names_every_maxtext_key():
  text = page()
  assert [name for name in maxtext.KNOWN if f"`{name}`" not in text and f"`{name}:" not in text] == []
