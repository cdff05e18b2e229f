"""Microbatches: router losses are those of one large batch, and over mesh axes that only split rows, gradients are summed once
a step. test_parallelism.py compares losses on meshes."""

import jax
import numpy as np
import pytest

from maxtext_like.training.step.program import make_program
from tests.training.small import batches, small_config
from tests.training.test_parallelism import run

TINY = ["emb_dim=16", "num_decoder_layers=2", "num_query_heads=2", "vocab_size=300", "moe_mlp_dim=8", "module_api=linen"]
BATCH = [*TINY, "num_decoder_layers=1", "num_kv_heads=1", "head_dim=8", "load_balance_loss_weight=0.1"]
SEQUENCE = [*TINY, "num_kv_heads=2", "mlp_dim=8", "q_lora_rank=8", "kv_lora_rank=8", "load_balance_loss_weight=0.1"]


@pytest.mark.slow  # tests/layers/moe/test_load_balance.py compares losses and gradients of parts
@pytest.mark.parametrize(
  ("model", "words"), [("qwen3-moe-tiny", BATCH), ("deepseek3-tiny", SEQUENCE)]
)  # load_balance_loss: huggingface and by sequence
def test_losses_of_the_router_are_those_of_one_large_batch(model, words):
  """The load-balancing loss is a mean over the batch for Qwen3, and a mean over its rows for DeepSeek. Rows have unequal
  numbers of tokens, and one row has none."""
  batch = batches(4)[0]
  empty = np.arange(16) >= np.array([[16], [9], [3], [0]])
  batch["segments"], batch["targets"] = np.where(empty, 0, batch["segments"]), np.where(empty, -100, batch["targets"])

  placed = jax.tree.map(jax.numpy.asarray, batch)

  def terms_and_gradients(rows, parts):
    config = small_config(model, *words, f"per_device_batch_size={rows}", f"gradient_accumulation_steps={parts}",
                          "router_z_loss_weight=0.01")  # fmt: skip
    program = make_program(config)
    params = program.lower_init().compile()(np.uint32(1))["params"]
    run = jax.jit(lambda params: program.step.gradients(*program.selection.split(params), placed, None))
    grads, out = run(params)
    return out["loss"], out["moe_load"], grads

  (terms, load, grads), (other_terms, other_load, other) = terms_and_gradients(4, 1), terms_and_gradients(1, 4)
  assert {"cross_entropy", "load_balance_loss", "router_z_loss"} <= set(terms)
  for name in terms:
    np.testing.assert_allclose(other_terms[name], terms[name], rtol=2e-6)
  np.testing.assert_allclose(other_load, load, atol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), other, grads)


@pytest.mark.slow
def test_devices_add_up_once_a_step_where_no_parameter_is_split():
  slices, three = run("tests.training.accumulation", "dcn_data_parallelism=2 ici_fsdp_parallelism=4",
                      "ici_data_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2")  # fmt: skip
  assert slices["data"].keys() == {"1"}
  assert slices["data"]["1"] > 400_000  # a quarter of the gradients
  # Devices that hold a part of a parameter have no room for the sum of the complete gradient. They reduce it in each of the two
  # microbatches, and within the loop over two layers in each layer.
  assert slices["other"].keys() >= {"2", "4"}
  # If two other axes split arrays (see _summed_once in program.py), gradients are summed over "data" in both microbatches too.
  assert three["data"]["4"] > 200_000
