"""Dimensions that do not divide over the mesh are refused with name, size and remedy. Few key-value heads are copied."""

import pytest
from jax.sharding import PartitionSpec

from maxtext_like.checkpoint.adapters.adapted_weights import with_base
from maxtext_like.config.load import load_config
from maxtext_like.errors import UserError
from maxtext_like.models.model import Model, make_model
from maxtext_like.sharding.mesh import abstract_mesh


def model_on(devices: int, model: str, *words: str) -> Model:
  config = load_config(model, list(words)).config
  return make_model(config, mesh=abstract_mesh(config.mesh, devices), platform="cpu")


TENSOR = "ici_tensor_parallelism"


@pytest.mark.parametrize(
  ("model", "words", "told"),
  [
    (
      "gemma4-tiny",
      [f"{TENSOR}=8"],
      r"heads of 4 \(stack_0/layer_\d/attention/[qo]\).* 8 .* axis tensor\n  fix: .*1 or 2 or 4 d",
    ),
    ("gemma4-tiny", [f"{TENSOR}=8"], r"\(ici_tensor_parallelism\), or sharding_rules='{heads: null}'"),
    ("gemma4-tiny", [f"{TENSOR}=4", "vocab_size=514"], r"vocab of 514 \(embedding/table\).*\n  fix: .*1 or 2 devices"),
    ("gemma4-tiny", [f"{TENSOR}=4", "mlp_dim=386"], r"mlp of 386 \(stack_0/layer_\d/mlp/"),
    ("gemma4-tiny", [f"{TENSOR}=2", "sharding_rules={mlp: [fsdp, tensor]}", "mlp_dim=386"], "8 .* axis fsdp x tensor"),
    ("deepseek3.2-tiny", [f"{TENSOR}=4", "indexer_n_heads=2"], r"index_heads of 2 \(stack"),
    ("qwen3-moe-tiny", ["ici_expert_parallelism=4", "num_experts=6"], r"expert of 6 .* 4 devices of the mesh axis expert"),
    ("gemma4-tiny", [f"{TENSOR}=4", "mlp_dim=102"], r"mlp of 102 .*\n  fix: .*1 or 2 devices"),  # 3 divides 102, but not 8
    (
      "qwen3-moe-tiny",
      ["ici_expert_parallelism=2", f"{TENSOR}=2", "sharding_rules={expert: [expert, tensor]}"],
      r"experts .* expert x tensor, .* over expert only\n  fix: sharding_rules='{expert: \[expert\]}'",
    ),
    (
      "gemma4-tiny",
      ["ici_context_parallelism=4", "max_target_length=66"],
      r"66 positions \(max_target_length\).*axis context\n",
    ),
    (
      "qwen3-tiny",
      ["ici_fsdp_parallelism=8", "sharding_rules={sequence: fsdp}"],
      r"batch and sequence are both split over the mesh axis fsdp; .*\n  fix: .*'{batch: \[\], sequence: \[fsdp\]}' to split",
    ),
    (
      "qwen3-tiny",
      ["ici_fsdp_parallelism=2", "ici_context_parallelism=4", "sharding_rules={batch: [fsdp, context]}"],
      r"axis context; .*\n.*'{batch: \[fsdp\], sequence: \[context\]}' .*'{batch: \[fsdp, context\], sequence: \[\]}'",
    ),
    ("gemma3-tiny", [f"{TENSOR}=4", "use_multimodal=true", "num_attention_heads_for_vit=2"], "vision_heads of 2"),
    ("gemma4-tiny", [f"{TENSOR}=2", "num_query_heads=6", "num_kv_heads=3"], "kv_heads of 3"),
  ],
)
def test_what_does_not_divide_is_refused(model, words, told):
  with pytest.raises(UserError, match=told):
    model_on(8, model, *words)


def test_few_key_value_heads_are_copied_and_told():
  told = model_on(8, "gemma4-tiny", f"{TENSOR}=4").copied_heads
  assert told is not None
  assert "copied: 1 on 4 devices (tensor) and 2 on 4 devices (tensor)" in told
  assert model_on(8, "gemma4-tiny").copied_heads is None
  assert model_on(8, "gemma4-tiny", f"{TENSOR}=4", "sharding_rules={kv_heads: null}").copied_heads is None


def test_a_mesh_that_parts_the_blocks_of_a_quantized_weight():
  """Blocks may not be split if a device multiplies by its own part only. A weight that is gathered may be split anywhere."""
  words = ["lora_rank=2", "base_weights=nf4", "head_dim=48", f"{TENSOR}=2"]
  told = r"attention/o: 192 inputs in blocks of 64 over 2 devices of the mesh axis tensor\n  fix: .*'{heads: null}' .*=int8"
  with pytest.raises(UserError, match=told):
    quantized_on(8, *words)
  quantized_on(8, *words, "sharding_rules={heads: null}")
  codes = quantized_on(8, *words[:2], "emb_dim=192").abstract_params["stack_0"]["layer_0"]["attention"]["q"]["codes"]
  assert codes.shape[1:] == (96, 192)  # 192 inputs are three blocks of 32 bytes
  assert codes.sharding.spec == PartitionSpec(None, "fsdp")


def quantized_on(devices: int, *words: str) -> Model:
  model = model_on(devices, "qwen3-tiny", *words)
  return with_base(model, model.config.adapter)


def test_a_rule_of_null_takes_the_dimension_whole():
  model = model_on(8, "gemma4-tiny", f"{TENSOR}=8", "sharding_rules={heads: null, kv_heads: null}")
  layer = model.abstract_params["stack_0"]["layer_0"]
  assert layer["attention"]["q"].sharding.spec == PartitionSpec()
  assert layer["mlp"]["up"].sharding.spec == PartitionSpec(None, None, "tensor")
