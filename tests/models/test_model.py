"""Tests the kernel that a model on a mesh chooses for its experts, and its report about it."""

import jax
import pytest

from maxtext_like.config.load import load_config
from maxtext_like.models.model import make_model
from maxtext_like.sharding.mesh import abstract_mesh


@pytest.mark.parametrize(
  ("name", "platform", "said"),
  [
    ("deepseek3-tiny", "cpu", "tiles for experts in 3 of 4 layers"),
    ("deepseek3-tiny", "tpu", "pallas_tpu for experts in 3 of 4 layers, not self-tested: there is no device"),
    ("gemma3-tiny", "cpu", None),
  ],
)
def test_what_multiplies_tokens_with_experts(name, platform, said):
  """``grouped_product`` describes the kernel of the experts. It is None if the model has no experts."""
  config = load_config(name, ["attention=dot_product"]).config
  model = make_model(config, mesh=abstract_mesh(config.mesh, 1), platform=platform)
  assert model.grouped_product == said
  asked = load_config(name, ["attention=dot_product", "grouped_product=ragged_dot"]).config
  assert make_model(asked, mesh=abstract_mesh(config.mesh, 1), platform=platform).decoder.cfg.grouped == "ragged_dot"


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["layer_precision=[1 dtype=float32]"], "rounds"),
    (["dtype=float16"], "pallas_triton"),
    (["float32_gate_product=true"], "pallas_triton"),
    (["layer_precision=[1 float32_gate_product=true]"], "pallas_triton"),
    ([], "pallas_gpu"),
  ],
)
def test_experts_of_which_one_layer_has_float32_products_or_sums_get_a_kernel_for_them(words, said):
  """The Hopper kernel supports neither float32 products nor float32 sums, the Triton kernel supports sums. All layers use one
  kernel."""
  config = load_config("gemma4-moe-tiny", ["attention=dot_product", "dtype=bfloat16", *words]).config
  model = make_model(config, mesh=abstract_mesh(config.mesh, 1), platform="gpu", capability="9.0")
  old = jax.__version_info__ < (0, 11, 1)
  assert model.decoder.cfg.grouped == ("pallas_triton" if old and said == "pallas_gpu" else said)
