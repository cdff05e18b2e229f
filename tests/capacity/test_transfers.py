"""Transfers between devices by arithmetic, compared with those of libtpu's programs."""

import dataclasses

import pytest
from test_plan import planned

from maxtext_like.capacity.plan import plan
from maxtext_like.capacity.topologies import find_topology
from maxtext_like.config.load import load_config

# gemma4-26b: as in tpu/v6e-32-experts.yml. gemma3-4b: on v6e-8 with max_target_length=8192; four devices along an axis, and in
# GROUPS one row for each group of four.
LONG = ("gemma3-4b", "v6e-8", "max_target_length=8192")
GROUPS = (*LONG, "per_device_batch_size=0.25")
EXPERTS = ("gemma4-26b", "v6e-32", "ici_fsdp_parallelism=4", "ici_expert_parallelism=8")


@pytest.mark.parametrize(
  ("words", "gb"),
  [
    # GB through a chip, reported by `maxtext-like compile ... machine_code=false` on 2026-11-23 (docs/results/memory.md). For
    # experts and dense weights only the sum of gathers and scatters is compared: the compiler chooses how often it gathers.
    (EXPERTS, {"all-to-all": 36.43, "all-gather reduce-scatter": 47.09}),
    ((*GROUPS, "ici_context_parallelism=4", "weight_dtype=bfloat16"), {"all-reduce": 13.66, "reduce-scatter": 10.81}),
    ((*GROUPS, "ici_tensor_parallelism=4"), {"all-reduce": 38.76, "reduce-scatter": 2.622}),
    ((*LONG, "ici_fsdp_parallelism=4", "ici_data_parallelism=2"), {"all-reduce": 9.924, "reduce-scatter": 27.75}),
  ],
)
@pytest.mark.slow
def test_what_libtpus_programs_move(words, gb):
  moved = planned(*words).transfers
  for kinds, wanted in gb.items():
    assert sum(t.bytes for t in moved if t.kind in kinds.split()) / 1e9 == pytest.approx(wanted, rel=0.02), kinds


@pytest.mark.slow
def test_an_axis_of_experts_gathers_what_is_no_expert():
  """With only an expert axis, the dense weights are sharded over it too, and each device gathers them."""
  alone = planned("gemma4-moe-tiny", "h200-8", "ici_fsdp_parallelism=1", "ici_expert_parallelism=8")
  assert {t.kind for t in alone.transfers} == {"all-gather", "reduce-scatter", "all-to-all", "all-reduce"}


def test_what_cannot_be_split_is_added_up_whole():
  """No width is a multiple of 3, so every device holds all weights and gathers nothing."""
  p = planned("gemma3-tiny", "cpu-3")
  assert {t.kind for t in p.transfers} == {"all-reduce"}
  twice = 2 * 4 * p.parameters * 2 / 3
  assert sum(t.bytes for t in p.transfers) == pytest.approx(twice, rel=0.3)  # the table's gradient is summed in several parts


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_a_table_that_is_trained_whole_is_added_up_like_the_models_own(axis):
  """The gradient is summed for each chunk of the logits, sharded or not as the table is."""
  mesh = ("num_vocab_tiling=4", "ici_fsdp_parallelism=1", f"ici_{axis}_parallelism=8")
  lora = ("lora_rank=2", "lora_modules=[q_proj]")
  moved = lambda *words: sum(
    t.bytes for t in planned("gemma3-tiny", "v6e-8", *mesh, *words).transfers if t.kind in ("all-reduce", "reduce-scatter")
  )
  added = moved(*lora, "modules_to_save=[embed_tokens]") - moved(*lora)
  of_its_own = moved("trainable_parameters_mask=[embedding,final_norm]") - moved("trainable_parameters_mask=[final_norm]")
  assert added == pytest.approx(of_its_own, rel=1e-3)
  assert added > 0


@pytest.mark.slow
def test_layers_that_borrow_keys_fetch_them_again():
  own, borrowed = (
    planned("gemma4-e2b-tiny", "cpu-2", "ici_context_parallelism=2", "per_device_batch_size=0.5", *words)
    for words in (("num_kv_shared_layers=0", "use_double_wide_mlp=false"), ())
  )
  of_keys = lambda p: [(t.kind, t.bytes) for t in p.transfers if t.kind in ("all-gather", "collective-permute")]
  assert of_keys(own) == of_keys(borrowed)


@pytest.mark.parametrize("axis", ["fsdp", "tensor", "context"])
def test_an_axis_over_slices_uses_their_network(axis):
  two = dataclasses.replace(find_topology("v6e-4"), slices=2)
  config = load_config("gemma3-tiny", [f"dcn_{axis}_parallelism=2", "dcn_data_parallelism=1"]).config
  assert any(t.between_slices for t in plan(config, two).transfers)


def test_a_load_of_the_complete_batch_takes_one_more_forward_pass():
  """Experts receive tokens in each pass of each of the two microbatches. With full recomputation there are 3 passes, and the
  load of the complete batch adds a fourth."""

  def sent(definition):
    words = ("gradient_accumulation_steps=2", "remat_policy=full", "load_balance_loss_weight=0.1")
    found = planned("qwen3-moe-tiny", "h200-8", "ici_fsdp_parallelism=1", "ici_expert_parallelism=8", *words, definition)
    return sum(t.bytes for t in found.transfers if t.kind == "all-to-all"), found.flops

  (batch, flops), (rows, fewer) = sent("load_balance_loss=huggingface"), sent("load_balance_loss=maxtext")
  assert batch / rows == pytest.approx(4 / 3)
  assert 1.1 < flops / fewer < 1.34
