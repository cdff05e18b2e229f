"""Tests every precision key in every family: it changes the program exactly in the families that the table lists.

The table also defines which keys have no effect in a family. The rules of the configuration must agree with it.
"""

import dataclasses

import jax
import pytest

from maxtext_like.config.precision_keys import foreign_keys
from maxtext_like.layers.precision import Precision
from tests.layers.test_decoder import QUICK
from tests.tiers import tiers

LAYERS = {
  "gemma3": {"num_decoder_layers": 2},
  "gemma4": {"num_decoder_layers": 2},
  "gemma4-moe": {"num_decoder_layers": 2, "inhomogeneous_layer_cycle_interval": 2},
}
"""Changes that leave one layer of each kind. Families that are not listed have no repeated kind of layer."""
MOE = ("gemma4-moe", "deepseek3", "deepseek3.2")
EVERY = ("gemma3", "gemma4", "gemma4-moe", "gemma4-e2b", "deepseek3", "deepseek3.2")

# key -> (a value other than the default, the dtype to test it in, the families whose program it changes)
KEYS = {
  "dtype": ("float32", "bfloat16", EVERY),
  "weight_dtype": ("bfloat16", "bfloat16", EVERY),
  "residual_dtype": ("float32", "bfloat16", EVERY),
  "float32_qk_product": (False, "bfloat16", EVERY),
  "float32_logits": (False, "bfloat16", EVERY),
  "float32_gate_product": (True, "bfloat16", EVERY),
  "float16_clamp": (False, "float16", EVERY),
  "cast_logits_to_fp32": (False, "bfloat16", EVERY),
  "logits_dot_in_fp32": (True, "bfloat16", EVERY),
  "matmul_precision": ("highest", "bfloat16", EVERY),
  "matmul_dtype": ("float8", "bfloat16", EVERY),
  "float32_gate_logits": (False, "bfloat16", MOE),
  "float32_weight_sum": (False, "bfloat16", MOE),
  "indexer_float32_logits": (False, "bfloat16", ("deepseek3.2",)),
}
# Keys without effect on the forward pass of a text decoder on one device. The train step uses the dtype of gradients, the
# vision tower uses the pool (tests/layers/test_vision*.py), and only a mesh shares sums (tests/layers/test_precision.py).
ELSEWHERE = {"grad_dtype", "float32_vision_pool", "reduction_dtype"}


def test_the_table_names_every_key():
  assert set(KEYS) | ELSEWHERE == {f.name for f in dataclasses.fields(Precision)}


@pytest.fixture(params=tiers(EVERY, quick=QUICK, rest="slow"))
def family(request):
  return request.param


@pytest.fixture(scope="module")
def program(tiny_decoder, batch):
  """Return the function program(family, **flags) -> text of the traced forward pass of a text batch. Models have few layers,
  because more layers would add no other operation."""

  def trace(family, **flags):
    decoder = tiny_decoder(family, precision=flags, changes=LAYERS.get(family))
    p = jax.tree.map(lambda q: jax.ShapeDtypeStruct(q.shape, q.dtype), decoder.params())
    return str(jax.make_jaxpr(lambda p, b: decoder(p, b))(p, batch))

  return trace


@pytest.fixture(scope="module")
def defaults(program):
  known = {}

  def of(family, dtype):
    if (family, dtype) not in known:
      known[family, dtype] = program(family, dtype=dtype)
    return known[family, dtype]

  return of


@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_the_program_where_it_acts_and_nowhere_else(key, family, program, defaults):
  value, dtype, families = KEYS[key]
  changed = program(family, **{"dtype": dtype, key: value}) != defaults(family, dtype)
  assert changed == (family in families)


@pytest.mark.parametrize("key", sorted(ELSEWHERE))
def test_a_key_of_something_else_leaves_the_text_decoder_alone(key, family, program, defaults):
  value = {"grad_dtype": "bfloat16", "float32_vision_pool": False, "reduction_dtype": "dtype"}[key]
  assert program(family, **{"dtype": "bfloat16", key: value}) == defaults(family, "bfloat16")


def test_the_configuration_tells_the_same_of_keys_that_do_nothing(family, tiny_model):
  """All DeepSeek configurations accept ``indexer_float32_logits``, and all Gemma 4 configurations accept the key of the vision
  pool."""
  silent = set(foreign_keys(tiny_model(family)))
  nothing = {key for key, (_, _, families) in KEYS.items() if family not in families}
  if family == "deepseek3":
    nothing -= {"indexer_float32_logits"}
  assert silent - ELSEWHERE == nothing


@pytest.mark.parametrize(("flag", "expected"), [("auto", True), (True, True), (False, False)])
@pytest.mark.slow
def test_float32_gate_product_in_float16(flag, expected, family, program):
  """ "auto" switches the key on in float16 and off in bfloat16."""
  automatic = program(family, dtype="float16", float32_gate_product="auto")
  assert (program(family, dtype="float16", float32_gate_product=flag) == automatic) == expected


def test_float32_knows_no_float32_flags(family, program, defaults):
  """If dtype is float32, these flags have no effect. float32_gate_logits, float32_weight_sum and indexer_float32_logits still
  have an effect, because they request products without TF32."""
  flags = ["float32_qk_product", "float32_logits", "float32_gate_product", "cast_logits_to_fp32", "float16_clamp"]
  assert program(family, dtype="float32", **dict.fromkeys(flags, False)) == defaults(family, "float32")
