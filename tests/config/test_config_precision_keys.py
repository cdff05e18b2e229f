"""The registry of precision keys: the files that are generated from it are current, and it agrees with the layers."""

import dataclasses
import typing

import pytest

from maxtext_like.config.document import base_text
from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.config.precision_keys import KEYS, REMEDIES, PrecisionConfig, foreign_keys, governing


def values(**changed):
  return {name: key.default for name, key in KEYS.items()} | changed


def test_base_yml_has_the_keys_as_the_registry_has_them():
  assert (configs_folder() / "base.yml").read_text("utf-8") == base_text(), "run: python -m maxtext_like.config.document"


def test_names_types_and_defaults_are_the_layers():
  from maxtext_like.layers.precision import LAYER_KEYS, Precision

  theirs = {f.name: (f.type, f.default) for f in dataclasses.fields(Precision)}
  types = typing.get_type_hints(PrecisionConfig)
  assert {name: (types[name], key.default) for name, key in KEYS.items()} == theirs
  assert tuple(name for name, key in KEYS.items() if key.per_layer) == LAYER_KEYS
  for dtype in ("float32", "bfloat16", "float16"):
    assert Precision(dtype=dtype).residual == KEYS["residual_dtype"].value(values(dtype=dtype))


def test_scopes_are_names_that_the_layers_give_to_their_parts():
  from maxtext_like.analysis.program_audit import SITES

  for key in KEYS.values():
    assert {*key.scopes, *key.widens, *(sign.scope for sign in key.signs)} <= set(SITES), key.name
    assert bool(key.signs) == bool(key.shown), key.name


def test_a_safer_value_is_safe_and_every_key_but_dtype_is_a_remedy():
  for key in KEYS.values():
    assert key.safe(values(dtype="float16", **{} if key.name == "dtype" else {key.name: key.safer})) or key.name == "dtype"
  assert {key.name for key in REMEDIES} == set(KEYS) - {"dtype"}
  assert [key.order for key in REMEDIES] == sorted(key.order for key in REMEDIES)


@pytest.mark.parametrize(
  ("name", "changed", "safe"),
  [
    ("float32_logits", {"float32_logits": False}, False),
    ("float32_logits", {"float32_logits": False, "dtype": "float32"}, True),
    ("float32_gate_product", {}, False),
    ("float32_gate_product", {"dtype": "float16"}, True),
    ("residual_dtype", {}, False),
    ("residual_dtype", {"dtype": "float16"}, True),
    ("residual_dtype", {"dtype": "float32", "residual_dtype": "bfloat16"}, False),
    ("float16_clamp", {"float16_clamp": False}, True),
    ("float16_clamp", {"float16_clamp": False, "dtype": "float16"}, False),
    ("float32_weight_sum", {"float32_weight_sum": False, "dtype": "float16"}, True),
  ],
)
def test_what_is_safe(name, changed, safe):
  assert KEYS[name].safe(values(**changed)) == safe


def test_scopes_find_their_keys():
  found = lambda *scopes: [key.name for key in governing(scopes)]
  assert found("attention", "softmax") == ["float32_logits"]
  assert found("moe", "experts", "gate_product") == ["float32_gate_product"]
  assert found("indexer", "indexer_sum") == ["indexer_float32_logits"]
  assert found("attention") == []


def test_what_a_model_lacks():
  dense, sparse = load_config("deepseek3-tiny").config, load_config("deepseek3.2-tiny").config
  key = KEYS["indexer_float32_logits"]
  assert (key.lacking(dense.model, dense.vision), key.lacking(sparse.model, sparse.vision)) == ("a sparse indexer", "")
  assert "indexer_float32_logits" not in foreign_keys(dense.model)  # any DeepSeek may set it and add an indexer later
  text, pool = load_config("gemma4-tiny").config, KEYS["float32_vision_pool"]
  assert pool.lacking(text.model, text.vision) == "images (use_multimodal)"
  assert pool.lacking(dense.model, dense.vision) == "the vision pooler of Gemma 4"
