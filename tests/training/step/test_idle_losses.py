"""Auxiliary losses that change no trained parameter: compared with the gradients of the losses, and reported by the banner."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.capacity import memory
from maxtext_like.config.load import load_config
from maxtext_like.layers.moe.router_losses import LOSS, Z_LOSS
from maxtext_like.layers.param import path_keys
from maxtext_like.models.naming import row_names
from maxtext_like.training.run import banner
from maxtext_like.training.step.idle_losses import idle_losses, reaches_router
from maxtext_like.training.step.program import make_program

WEIGHTS = ["load_balance_loss_weight=0.3", "router_z_loss_weight=0.05"]


@functools.cache
def program(model: str, *words: str):
  return make_program(load_config(model, words).config)


@pytest.mark.parametrize(
  "words",
  [
    pytest.param(("qwen3-moe-tiny", "num_decoder_layers=2"), marks=pytest.mark.slow),
    pytest.param(("deepseek3.2-tiny", "num_decoder_layers=2", "first_num_dense_layers=1"), marks=pytest.mark.slow),
    ("gemma4-moe-tiny", "num_decoder_layers=3"),
  ],
)
def test_a_parameter_reaches_a_router_where_its_losses_have_a_gradient(words):
  made = program(*words, *WEIGHTS)
  decoder, rng = made.model.decoder, np.random.default_rng(0)
  params = jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 0.3, p.shape), p.dtype), decoder.params())
  batch = {"tokens": jnp.asarray(rng.integers(3, 90, (1, 12)), jnp.int32)}

  def losses(params):
    aux = decoder.hidden(params, batch)[1]
    return aux[LOSS] + aux[Z_LOSS]

  quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
  gradients = jax.jit(jax.grad(losses), compiler_options=quickly)(params)
  found = {}
  for (path, g), p in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(decoder.params()), strict=True):
    names = row_names(decoder, path_keys(path))
    for name, row in zip(names, np.asarray(g).reshape(len(names), -1), strict=True):
      if p.trainable:
        found[name] = bool(np.any(row))
  assert {name: reaches_router(name, decoder) for name in found} == found
  assert set(found.values()) == {True, False}


@pytest.mark.parametrize(
  ("model", "words", "idle"),
  [
    ("qwen3-moe-tiny", ["trainable_parameters_mask=['final_norm']"], True),
    ("qwen3-moe-tiny", ["trainable_parameters_mask=['head', 'layers.3.moe.experts']"], True),
    ("qwen3-moe-tiny", ["trainable_parameters_mask=['layers.2.moe.experts']"], False),
    ("qwen3-moe-tiny", ["trainable_parameters_mask=['router']"], False),
    ("qwen3-moe-tiny", ["trainable_parameters_mask=['embedding']"], False),
    ("qwen3-moe-tiny", ["lora_rank=2", "lora_modules=[lm_head]"], True),
    ("qwen3-moe-tiny", ["lora_rank=2", "lora_modules=[layers.3.mlp.experts]"], True),
    ("qwen3-moe-tiny", ["lora_rank=2"], False),
    ("gemma4-moe-tiny", ["trainable_parameters_mask=['layers.5.pre_mlp_norm']"], True),
    ("deepseek3.2-tiny", ["indexer_sparse_training=false"], True),
  ],
)
def test_router_losses_without_a_trained_parameter_before_them_are_reported(model, words, idle):
  made = program(model, *WEIGHTS, *words)
  said = {key: why for key, why in idle_losses(made).items() if "indexer" not in key}
  keys = ("load_balance_loss_weight", "router_z_loss_weight") if idle else ()
  assert said == dict.fromkeys(keys, "no router depends on a trained parameter")


def test_the_loss_of_an_indexer_that_is_not_trained_is_reported():
  found = idle_losses(program("deepseek3.2-tiny", "lora_rank=2"))
  assert found == {"indexer_loss_scaling_factor": "no parameter of an indexer is trained"}
  assert not idle_losses(program("deepseek3.2-tiny", "lora_rank=2", "indexer_loss_scaling_factor=0"))
  assert not idle_losses(program("deepseek3.2-tiny", "lora_rank=2", "lora_modules=[attention.q_b, indexer.q]"))
  assert not idle_losses(program("deepseek3.2-tiny"))


def test_the_banner_does_not_announce_an_idle_loss_as_active():
  final = ("trainable_parameters_mask=['final_norm']", *WEIGHTS)
  lines = banner.banner(program("qwen3-moe-tiny", *final), "runs/x", memory.estimate(program("qwen3-moe-tiny", *final)), None)
  assert [line for line in lines.splitlines() if line.startswith("note")] == [
    "note    load_balance_loss_weight = 0.3 has no effect: no router depends on a trained parameter",
    "note    router_z_loss_weight = 0.05 has no effect: no router depends on a trained parameter",
  ]
  # A definition that needs the load of the batch is computed nevertheless.
  parts = program("qwen3-moe-tiny", *final, "gradient_accumulation_steps=2")
  told = banner.load_balance(parts, idle=True)
  assert told
  assert told.startswith("load_balance_loss=huggingface has a cost without an effect; each step needs one more forward pass")
  assert (
    banner.load_balance(program("qwen3-moe-tiny", *final)) == "load_balance_loss=huggingface with load_balance_loss_weight=0.3"
  )
