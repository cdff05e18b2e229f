"""Fixtures for tests of layers: tiny models of every family, parameters without neutral values, and a batch. All sizes
differ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.config.load import make_section
from maxtext_like.config.model import ModelConfig
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder

_SIZES = {
  "model_name": "tiny",
  "vocab_size": 37,
  "emb_dim": 20,
  "mlp_dim": 23,
  "num_query_heads": 4,
  "num_kv_heads": 2,
  "normalization_layer_epsilon": 1e-6,
}
_GEMMA3 = {
  "decoder_block": "gemma3",
  "num_decoder_layers": 5,
  "head_dim": 6,
  "query_pre_attn_scalar": 11.0,
  "mlp_activation": "gelu",
  "inhomogeneous_layer_cycle_interval": 2,
  "sliding_window_size": 3,
  "use_bidirectional_image_attn": True,
  "rope_type": "linear",
  "rope_linear_scaling_factor": 8.0,
  "rope_max_timescale": 1e6,
  "local_rope_max_timescale": 1e4,
}
_GEMMA4 = {
  **_GEMMA3,
  "decoder_block": "gemma4",
  "query_pre_attn_scalar": None,
  "rope_type": "default",
  "rope_linear_scaling_factor": 1.0,
  "global_head_dim": 8,
  "global_rope_proportion": 0.5,
  "attn_logits_soft_cap": None,
  "final_logits_soft_cap": 5.0,
}
_DEEPSEEK = {
  "decoder_block": "deepseek",
  "num_decoder_layers": 3,
  "first_num_dense_layers": 1,
  "num_kv_heads": 4,
  "mlp_activation": "silu",
  "logits_via_embedding": False,
  "q_lora_rank": 9,
  "kv_lora_rank": 7,
  "qk_nope_head_dim": 5,
  "qk_rope_head_dim": 4,
  "v_head_dim": 3,
  "rope_type": "yarn",
  "rope_max_timescale": 1e4,
  "rope_factor": 40.0,
  "mscale": 1.0,
  "mscale_all_dim": 0.7,
  "num_experts": 6,
  "num_experts_per_tok": 2,
  "moe_mlp_dim": 11,
  "shared_experts": 1,
  "n_routing_groups": 3,
  "topk_routing_group": 2,
  "routed_scaling_factor": 2.5,
  "routed_bias": True,
  "load_balance_loss_weight": 0.01,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
  "gemma3": _GEMMA3,
  "gemma4": {**_GEMMA4, "share_kv_projections": True, "global_num_kv_heads": 1},
  "gemma4-moe": {
    **_GEMMA4,
    "num_decoder_layers": 3,
    "inhomogeneous_layer_cycle_interval": 3,
    "share_kv_projections": True,
    "global_num_kv_heads": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": 11,
    "load_balance_loss_weight": 0.01,
  },
  "gemma4-e2b": {
    **_GEMMA4,
    "num_decoder_layers": 8,
    "num_kv_heads": 1,
    "use_bidirectional_image_attn": False,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 7,
    "vocab_size_per_layer_input": 41,
  },
  "deepseek3": _DEEPSEEK,
  "deepseek3.2": {
    **_DEEPSEEK,
    "use_indexer": True,
    "indexer_n_heads": 3,
    "indexer_head_dim": 7,
    "indexer_topk": 4,
    "indexer_loss_scaling_factor": 0.1,
  },
}
FAMILIES = tuple(_OF_FAMILY)


def _tiny_model(family: str, **changes) -> ModelConfig:
  return make_section("model", {**_SIZES, **_OF_FAMILY[family], **changes})


def _tiny_decoder(family: str, *, precision: dict | None = None, changes: dict | None = None, **build):
  flags: dict[str, Any] = {"dtype": "float32"} | (precision or {})
  return build_decoder(_tiny_model(family, **(changes or {})), Precision(**flags), **build)


def _random_params(spec, seed: int = 0):
  """Return random arrays for a spec, without neutral values: scales are around 0.8, all other arrays around 0."""
  rng = np.random.default_rng(seed)

  def leaf(path, p):
    name = jax.tree_util.keystr(path)
    draw = rng.normal(size=p.shape) * 0.3
    return jnp.asarray(draw + 0.8 if "scale" in name or "scalar" in name else draw, p.dtype)

  return jax.tree_util.tree_map_with_path(leaf, spec)


@pytest.fixture(scope="session", params=FAMILIES)
def family(request) -> str:
  return request.param


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., ModelConfig]:
  """Return the function tiny_model(family, **changes) -> ModelConfig."""
  return _tiny_model


@pytest.fixture(scope="session")
def tiny_decoder():
  """Return the function tiny_decoder(family, precision={...}, changes={...}, **build_decoder arguments) -> Decoder."""
  return _tiny_decoder


@pytest.fixture(scope="session")
def random_params():
  """Return the function random_params(spec, seed=0) -> arrays."""
  return _random_params


@pytest.fixture(scope="session")
def batch() -> dict:
  """Return two rows of 9 tokens. The first has three packed documents and padding, the second has one document and padding. The
  last token of a document has no target."""
  tokens = np.random.default_rng(5).integers(0, 37, (2, 9))
  segments = np.array([[1, 1, 1, 1, 2, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
  positions = np.array([[0, 1, 2, 3, 0, 1, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 0, 0]])
  targets = np.where(segments == np.roll(segments, -1, 1), np.roll(tokens, -1, 1), -100)
  targets = np.where(segments == 0, -100, targets)
  targets[:, -1] = -100
  arrays = {"tokens": tokens, "segments": segments, "positions": positions, "targets": targets}
  return {name: jnp.asarray(a, jnp.int32) for name, a in arrays.items()}
