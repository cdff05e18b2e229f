"""FLOPs of a step compared with sums by hand, and the table of peak FLOP/s."""

import math

import numpy as np
import pytest

from maxtext_like.capacity.flops import forward_flops, peak_tflops, train_flops, visible_pairs
from maxtext_like.config.load import load_config
from maxtext_like.layers.param import count
from maxtext_like.training.step.program import make_program


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_visible_pairs(window):
  length = 7
  query, key = np.ogrid[:length, :length]
  visible = (key <= query) & (key > query - (window or length))
  assert visible_pairs(length, window) == visible.sum()


def flops(model: str, *words: str) -> float:
  program = make_program(load_config(model, list(words)).config)
  return train_flops(program.model.decoder, program.spec, program.selection, 1, program.config.training.max_target_length)


def test_gemma3_4b_as_the_measured_table_counts():
  # docs/results/gpu-training.md: 2 x 4096 tokens take 0.579 s, an MFU of 34.6 % of 989 TFLOP/s.
  assert 2 * flops("gemma3-4b", "max_target_length=4096") == pytest.approx(0.579 * 0.346 * 989e12, rel=0.01)


def test_experts_count_by_their_share():
  program = make_program(load_config("deepseek3-671b", ["max_target_length=2048"]).config)
  products = 6 * 2048 * count(program.spec)
  assert flops("deepseek3-671b", "max_target_length=2048") < products / 10  # 37 of 671 billion parameters are active


def test_frozen_parameters_cost_no_weight_gradient():
  everything = flops("gemma4-tiny")
  one_array = flops("gemma4-tiny", "trainable_parameters_mask=['final_norm']")
  assert 0.6 < one_array / everything < 0.8


@pytest.mark.parametrize(
  ("model", "words", "share"),
  [
    ("qwen3-tiny", (), 3),
    ("gemma3-tiny", (), 3),
    ("gemma4-moe-tiny", (), 3),
    ("deepseek3-tiny", (), 3),
    ("gemma3-tiny", ("trainable_parameters_mask=['embedding']",), 2),
  ],
)
def test_the_forward_pass_of_layers_is_a_third_of_training_or_half_where_they_are_frozen(model, words, share):
  config = load_config(model, ["max_target_length=64", *words]).config
  program = make_program(config)
  products, pairs = forward_flops(program.model.decoder, program.spec, 2, 64)
  head = 2 * 64 * 6 * math.prod(program.spec["embedding"]["table"].shape)
  whole = train_flops(program.model.decoder, program.spec, program.selection, 2, 64)
  assert whole == pytest.approx(share * products + 3 * pairs + head)


def test_a_table_that_is_trained_whole_counts_in_the_place_of_the_models_own():
  lora = ("lora_rank=2", "lora_modules=[q_proj]", "max_target_length=16")
  table = make_program(load_config("gemma4-tiny").config).spec["embedding"]["table"]
  without, beside = (flops("gemma4-tiny", *lora, *words) for words in ((), ("modules_to_save=[embed_tokens]",)))
  assert beside - without == 2 * 16 * math.prod(table.shape)  # the product that computes the table's gradient


def test_the_dense_warm_up_has_a_backward_pass_in_the_indexer_only():
  full = flops("deepseek3.2-tiny")
  assert flops("deepseek3.2-tiny", "indexer_sparse_training=false") < 0.6 * full


@pytest.mark.parametrize(
  ("kind", "peak"),
  [("NVIDIA H200", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 80GB HBM3", 989.0), ("TPU v6 lite", 918.0),
   ("TPU v5 lite", 197.0), ("TPU v5p", 459.0), ("cpu", None)],
)  # fmt: skip
def test_peaks(kind, peak):
  assert peak_tflops(kind) == peak


def test_the_peak_of_float16_is_that_of_its_units():
  assert [peak_tflops("Tesla T4", dtype) for dtype in ("bfloat16", "float16")] == [8.1, 65.0]
  assert peak_tflops("NVIDIA H200", "float32") == 989.0
