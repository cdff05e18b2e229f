"""The memory estimate: its parts, settings that reduce it, and the refusal of runs that do not fit."""

import functools
import math

import jax
import pytest

from maxtext_like.capacity import memory, memory_limits
from maxtext_like.capacity.topologies import assumed_gpu, find_gpus
from maxtext_like.config.load import load_config
from maxtext_like.errors import DoesNotFitError
from maxtext_like.layers.attention.mla import MLA
from maxtext_like.layers.param import abstract, count
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.objectives.language_modeling import LanguageModeling
from maxtext_like.training.step.program import make_program
from tests.tiers import slow


@functools.cache
def estimate(*words: str) -> memory.MemoryEstimate:
  return memory.estimate(make_program(load_config("gemma4-tiny", list(words)).config))


def test_state_is_counted_exactly():
  program = make_program(load_config("gemma4-tiny").config)
  need, total = memory.estimate(program), count(program.spec)
  trained = count(program.selection.split(program.spec)[0])
  assert need.parameters == 4 * total
  assert need.gradients == 4 * trained
  assert need.optimizer == 8 * trained + 4 + 4  # two moments and two counters


@pytest.mark.slow
def test_a_gpu_holds_a_loss_in_chunks_beside_gradients_where_a_loop_has_several_layers():
  """gemma4-tiny is a loop of two iterations over three layers; unrolled, it has no loop. Only a loss in chunks holds a separate
  float32 sum of the head's gradients."""

  def need(*words, platform="gpu"):
    config = load_config("gemma4-tiny", ["per_device_batch_size=1", "max_target_length=64", *words]).config
    program = make_program(config, mesh=abstract_mesh(config.mesh, 1), platform=platform)
    return memory.estimate(program), math.prod(program.spec["embedding"]["table"].shape)

  chunks, one_row = "num_vocab_tiling=4", "scan_layers=false"
  looped, table = need(chunks)
  assert looped.copies == 4 * table
  for words, platform in (([], "gpu"), ([chunks], "cpu"), ([chunks, "gradient_accumulation_steps=2"], "gpu")):
    other, _ = need(*words, platform=platform)
    assert other.copies == 0
    assert "copies" not in memory.table(other, None)
  # Unrolled, gradients reuse the memory of the loss, so only the larger of the two counts.
  unrolled, _ = need(chunks, one_row)
  assert unrolled.gradients == looped.gradients
  # The head's gradient of a chunk is computed when the chunk's logits are no longer needed.
  at_loss = looped.activations + looped.logits + 4 * table + max(0, 4 * table - looped.logits // 2)
  assert unrolled.total == unrolled.parameters + unrolled.optimizer + max(unrolled.gradients, at_loss)


def on_gpus(model: str, *words: str, topology: str = "h200") -> memory.MemoryEstimate:
  host = find_gpus(topology)
  assert host is not None
  return memory.for_gpus(load_config(model, ["max_target_length=64", "per_device_batch_size=1", *words]).config, host)[1]


@pytest.mark.slow
def test_a_loop_of_single_layers_has_the_loss_or_the_gradients():
  """deepseek3-tiny has loops over single layers. Without chunks, activations count in addition to the gradients. With a large
  head in chunks, the loss needs more memory than the gradients."""
  words = ("remat_policy=none", "weight_dtype=float32", "dtype=bfloat16")
  plain = on_gpus("deepseek3-tiny", *words)
  assert (plain.copies, plain.logits) == (0, 0)
  assert plain.activations > 0
  large = on_gpus("deepseek3-tiny", *words, "num_vocab_tiling=4", "vocab_size=200000")
  table = 4 * 200000 * load_config("deepseek3-tiny", []).config.model.emb_dim
  assert large.total - large.parameters - large.optimizer > 2 * table + large.logits


@pytest.mark.parametrize("scan", ["true", "false"])
def test_weights_that_have_no_gradient_take_nothing_away(scan):
  """JAX keeps no 16-bit copies of frozen weights, so the estimate must not subtract them."""
  words = ("remat_policy=none", "dtype=bfloat16", "num_vocab_tiling=4", "trainable_parameters_mask=[final_norm]")
  need = on_gpus("gemma4-tiny", *words, f"scan_layers={scan}")
  assert min(need.activations, need.logits, need.copies) >= 0
  assert need.total > need.parameters + need.optimizer + need.gradients + 64 * 512 * 2


@pytest.mark.slow
def test_sparse_attention_has_the_scores_of_a_tile_of_queries(monkeypatch):
  """Sparse training counts a tile of 256 queries with 32 gathered keys each: the scores of 4 heads, and the gathered latents.
  The dense warm-up counts the scores of all keys."""
  words = ("max_target_length=512", "per_device_batch_size=2")
  dense = (*words, "indexer_sparse_training=false")
  whole, warm = on_gpus("deepseek3.2-tiny", *words).total, on_gpus("deepseek3.2-tiny", *dense).total
  monkeypatch.setattr(MLA, "tile_bytes", lambda *_: 0)
  assert whole - on_gpus("deepseek3.2-tiny", *words).total == 2 * 4 * 256 * 32 * (2 * 4 + 32 + 16)
  pairs = 256 * (4 + 2 * 4) + 4 * (16 + 16 + 24)
  assert warm - on_gpus("deepseek3.2-tiny", *dense).total == 2 * 4 * 512 * pairs
  short = on_gpus("deepseek3.2-tiny", "max_target_length=128")
  monkeypatch.undo()
  assert on_gpus("deepseek3.2-tiny", "max_target_length=128") == short


@pytest.mark.parametrize(
  ("words", "gathers"),
  [
    ((), True),
    (("dtype=bfloat16", "lora_rank=2", "lora_modules=[mlp.down]"), True),
    (("dtype=float16",), False),
    (("lora_rank=2", "lora_modules=[kv_b]"), False),
    (("lora_rank=2", "lora_modules=[mlp.down]", "base_weights=int8"), False),
    (("indexer_sparse_training=false",), False),
  ],
)
def test_tiles_are_counted_in_the_form_that_the_layer_takes(words, gathers, monkeypatch):
  """The estimate and the layer call the same function: keys are gathered only if the weight that expands the latents is plain
  and the dtype is not float16."""
  words = ["num_decoder_layers=2", "max_target_length=512", "per_device_batch_size=1", *words]
  program = make_program(load_config("deepseek3.2-tiny", words).config)
  gathered = 4 * 256 * 32 * (2 * 4 + 32 + 16)
  masked = 4 * 512 * (256 * (4 + 2 * 4) + 4 * (16 + 16 + 24))
  assert memory._in_tiles(program) == (gathered if gathers else masked)
  taken, gather = [], MLA._gathered
  monkeypatch.setattr(MLA, "_gathered", lambda *given: taken.append(given) or gather(*given))
  jax.eval_shape(program.objective, abstract(program.spec), program.batch_of(1))
  assert bool(taken) == gathers


def test_a_gpu_keeps_gate_and_up_and_makes_the_gate_s_activation_again():
  """The GPU's kernel computes both gradients of the gated product and recomputes the gate's activation, so each layer keeps one
  array less than on a CPU."""
  words = ("remat_policy=none", "dtype=bfloat16", "attention=dot_product", "num_vocab_tiling=4")
  config = load_config("qwen3-tiny", [*words, "per_device_batch_size=3", "max_target_length=28"]).config
  program = lambda platform: make_program(config, mesh=abstract_mesh(config.mesh, 1), platform=platform)
  cpu, gpu = (memory.activation_bytes(program(platform)).kept for platform in ("cpu", "gpu"))
  assert cpu - gpu == config.model.num_decoder_layers * 3 * 28 * config.model.mlp_dim * 2


def test_weights_that_are_rounded_while_unstacked_are_there_in_the_loss():
  """During a loss without chunks, the kept activations, which include the weights in bfloat16, are in memory together with the
  float32 logits and their bfloat16 gradient."""
  words = ("remat_policy=none", "dtype=bfloat16", "weight_dtype=float32", "num_vocab_tiling=1", "vocab_size=4001")
  need = on_gpus("qwen3-tiny", *words, "scan_layers=false", "opt_type=sgd", "sgd_momentum=0")
  config = load_config("qwen3-tiny", [*words, "max_target_length=64", "per_device_batch_size=1"]).config
  program = make_program(config, mesh=abstract_mesh(config.mesh, 1), platform="gpu", capability="9.0")
  with assumed_gpu():
    kept = memory.activation_bytes(program).kept  # includes the weights of all layers in bfloat16
  assert need.total - need.parameters - need.optimizer == kept + 64 * 4001 * (4 + 2)


@pytest.mark.slow
def test_a_rule_that_looks_at_whole_arrays_makes_their_steps_at_once():
  wide = ("emb_dim=512", "mlp_dim=2048", "max_target_length=8")
  words = ("gemma4-tiny", *wide, "weight_dtype=bfloat16", "grad_dtype=bfloat16", "opt_type=adafactor")
  need = on_gpus(*words, "gradient_clipping_threshold=0")
  assert need.activations + need.logits + need.copies >= 2 * need.gradients
  assert on_gpus(*words).total < need.total  # no updates are held if the update is proved finite
  layer_by_layer = on_gpus("gemma4-tiny", "weight_dtype=bfloat16", "opt_type=adafactor", "optimizer_in_backward=true")
  assert layer_by_layer.gradients + layer_by_layer.copies < need.gradients


def test_gpus_that_share_out_weights_have_a_part_of_a_layer_whole():
  assert on_gpus("gemma4-tiny").fetched == 0
  layer = on_gpus("gemma4-tiny", "ici_fsdp_parallelism=2", "dtype=bfloat16", topology="h200-2").fetched
  c = load_config("gemma4-tiny").config.model
  assert layer == 3 * c.emb_dim * c.mlp_dim * (2 + 4)
  assert on_gpus("gemma4-tiny", "ici_fsdp_parallelism=1", "ici_data_parallelism=2", topology="h200-2").fetched == 0


@pytest.mark.slow
def test_beside_an_adapter_a_row_of_layers_has_its_weights_apart_from_their_stacks():
  words = ("lora_rank=4", "lora_modules=[all-linear]", "dtype=bfloat16", "weight_dtype=bfloat16", "num_decoder_layers=12")
  need = on_gpus("gemma3-tiny", *words)
  program = make_program(load_config("gemma3-tiny", list(words)).config)
  (stack,) = program.model.decoder.stacks
  weights = count(program.spec["stack_0"]) // 4
  assert (len(stack.layers), stack.repeats) == (3, 4)
  assert need.copies == 2 * weights * 2 // 3
  assert on_gpus("gemma3-tiny", *words, "scan_layers=false").copies == 0
  assert on_gpus("gemma3-tiny", *words, "base_weights=nf4").copies == 0
  assert on_gpus("gemma3-tiny", *words, "num_decoder_layers=3").copies == 0  # a single group of three layers is not a loop


@pytest.mark.slow
def test_slices_of_weights_are_not_counted_as_kept():
  """Layers outside a loop read slices of their weights in place, so a layer keeps only its input there, as in a loop."""

  def kept(layers: int, scan: str) -> int:
    words = [f"num_decoder_layers={layers}", f"scan_layers={scan}", "remat_policy=full", "per_device_batch_size=2"]
    return memory.activation_bytes(make_program(load_config("gemma4-tiny", [*words, "max_target_length=64"]).config))[0]

  assert kept(6, "false") == kept(6, "true")
  assert kept(6, "true") - kept(3, "true") == 3 * (2 * 64 * 128 * 4)  # three layers are a loop of two and one alone


@pytest.mark.slow
def test_the_layer_that_is_computed_again_may_be_one_of_a_tower():
  """A larger tower keeps more activations between its layers, but one layer's recomputed activations are as large as before."""

  def again(layers: int, tower: str) -> int:
    words = ["use_multimodal=true", f"num_hidden_layers_for_vit={layers}", f"vision_tower={tower}", "remat_policy=full"]
    program = make_program(load_config("gemma4-tiny", words).config)
    kept = memory.activation_bytes(program)
    return memory.estimate(program, saved=kept).activations - kept[0]

  assert again(40, "trained") == pytest.approx(again(20, "trained"), rel=0.2)
  assert again(40, "frozen") == again(20, "frozen")


def test_the_gradient_of_a_head_in_chunks_is_counted_once(monkeypatch):
  """The loss keeps the head's gradient for the backward pass. It already counts as a gradient and must not count as an
  activation too."""
  program = make_program(load_config("gemma4-tiny", ["num_vocab_tiling=4", "remat_policy=none"]).config)
  once = memory.estimate(program).activations
  monkeypatch.setattr(LanguageModeling, "made_in_forward", lambda *_: None)
  assert memory.estimate(program).activations == once + 4 * math.prod(program.spec["embedding"]["table"].shape)


def test_so_is_that_of_a_table_that_is_trained_whole_beside_an_adapter(monkeypatch):
  words = ["lora_rank=2", "lora_modules=[q_proj]", "modules_to_save=[embed_tokens]", "num_vocab_tiling=4", "remat_policy=none"]
  program = make_program(load_config("gemma4-tiny", words).config)
  once = memory.estimate(program).activations
  monkeypatch.setattr(LanguageModeling, "made_in_forward", lambda *_: None)
  assert memory.estimate(program).activations == once + 4 * math.prod(program.spec["embedding"]["table"].shape)


@pytest.mark.parametrize("axis", ["context", "tensor"])
@pytest.mark.slow
def test_nor_does_it_count_where_devices_share_rows(monkeypatch, axis):
  """Kept activations are divided among the devices that share rows. The head's gradient is removed before this division."""
  words = ["num_vocab_tiling=4", "remat_policy=full", f"ici_{axis}_parallelism=2", "ici_fsdp_parallelism=1"]
  config = load_config("deepseek3-tiny", words).config
  program = make_program(config, mesh=abstract_mesh(config.mesh, 2), platform="cpu")
  once = memory.activation_bytes(program)[0]
  monkeypatch.setattr(LanguageModeling, "made_in_forward", lambda *_: None)
  kept = memory.activation_bytes(program)[0]
  assert kept - once == 4 * math.prod(program.spec["head"]["kernel"].shape) // 2


@pytest.mark.slow
def test_an_adapter_s_run_has_logits_and_gradients_of_layers_one_after_the_other(monkeypatch):
  """Logits use memory before the layers' gradients do, so only their excess counts: most of a large vocabulary's logits, none
  of a small one's. The gradient of a completely trained table is in memory together with the logits."""
  words = ["lora_rank=2", "per_device_batch_size=1", "max_target_length=64"]
  host = find_gpus("h100")
  assert host is not None

  def on_a_gpu(*more: str) -> memory.MemoryEstimate:
    return memory.for_gpus(load_config("gemma4-tiny", [*words, *more]).config, host)[1]

  def later(need: memory.MemoryEstimate, *more: str) -> int:
    kept = memory.activation_bytes(make_program(load_config("gemma4-tiny", [*words, *more]).config, platform="gpu"))[0]
    return need.gradients + need.copies + need.activations - kept

  raw = 1 << 30
  monkeypatch.setattr(LanguageModeling, "logit_bytes", lambda *_: raw)
  need = on_a_gpu()
  assert need.logits == raw - later(need)
  table = ["modules_to_save=[embed_tokens]", "lora_modules=[q_proj]"]
  need = on_a_gpu(*table)
  program = make_program(load_config("gemma4-tiny", [*words, *table]).config)
  assert need.logits == raw - later(need, *table) + 4 * math.prod(program.spec["embedding"]["table"].shape)
  monkeypatch.setattr(LanguageModeling, "logit_bytes", lambda *_: 1000)
  assert on_a_gpu().logits == 0


@pytest.mark.parametrize(
  ("smaller", "larger", "part"),
  [
    (["per_device_batch_size=4"], ["per_device_batch_size=8"], "activations"),
    slow(["max_target_length=64"], ["max_target_length=128"], "activations"),
    slow(["gradient_accumulation_steps=4", "per_device_batch_size=2"], [], "activations"),
    (["remat_policy=full"], ["remat_policy=minimal"], "activations"),
    slow(["remat_policy=minimal"], ["remat_policy=none"], "activations"),
    slow(["num_vocab_tiling=4"], [], "logits"),
    (["opt_type=sgd", "sgd_momentum=0"], ["opt_type=lion"], "optimizer"),
    slow(["opt_type=lion"], ["opt_type=adamw"], "optimizer"),
    (["weight_dtype=bfloat16", "dtype=bfloat16"], [], "parameters"),
    slow(["trainable_parameters_mask=['mlp']"], [], "gradients"),
    ([], ["gradient_accumulation_steps=2"], "gradients"),
  ],
)
def test_monotonic(smaller, larger, part):
  assert getattr(estimate(*smaller), part) < getattr(estimate(*larger), part)


@pytest.mark.slow  # test_run.py covers a run that ends with this error
def test_a_31b_is_refused_with_a_table_and_remedies(monkeypatch):
  monkeypatch.setattr(memory_limits, "host_limit", lambda: memory_limits.Limit(24 * 10**9, "a test"))
  with pytest.raises(DoesNotFitError) as caught:
    memory.require_fit(make_program(load_config("gemma4-31b").config))
  text = str(caught.value)
  assert caught.value.exit_code == 4
  assert "gemma4-31b does not fit" in text
  for word in ("parameters", "optimizer", "gradients", "activations", "available", "24.00 GB  (a test)"):
    assert word in text
  assert "shard over more devices: about " in text
  assert len(text.splitlines()) < 20


@pytest.mark.parametrize(
  ("words", "tried"),
  [
    (["remat_policy=minimal", "remat_offload=kept"], "remat_policy=full remat_offload=layer_inputs (now minimal)"),
    (["remat_policy=save_mlp", "remat_offload=all"], "in_backward=true remat_policy=full remat_offload=layer_inputs:"),
    (["remat_policy=minimal", "remat_offload=layer_inputs"], "remat_policy=full (now minimal)"),
  ],
)
def test_a_remedy_is_not_refused_with_the_offload_that_is_there(words, tried):
  program = make_program(load_config("qwen3-tiny", ["num_decoder_layers=2", *words]).config)
  assert tried in memory.remedies(program, memory.estimate(program), None)


@pytest.mark.parametrize(
  ("words", "tried", "not_tried"),
  [
    ([], ["gradient_accumulation_steps=4 keeps the update", "mu_dtype=dynamic8 nu_dtype=dynamic8: ", "rank=32: moments"], []),
    (["optimizer_in_backward=true"], ["per_device_batch_size=1 (now 4)\n"], ["gradient_accumulation"]),
    (["mu_dtype=dynamic8"], ["  - nu_dtype=dynamic8: ", "rank=32 mu_dtype=null nu_dtype=float32: moments"], []),
    (["opt_type=lion"], ["  - mu_dtype=dynamic8: "], ["nu_dtype", "adafactor"]),
    (["opt_type=adafactor"], [], ["dynamic8"]),
    (["numerics_every=5"], [], ["optimizer_in_backward"]),
    (["lora_rank=2"], ["weights that are not quantized"], ["mask=", "optimizer_in_backward"]),
  ],
)
def test_remedies_are_those_that_this_run_can_have(words, tried, not_tried):
  program = make_program(load_config("qwen3-tiny", ["num_decoder_layers=2", "per_device_batch_size=4", *words]).config)
  said = memory.remedies(program, memory.estimate(program), None)
  assert all(word in said for word in tried), said
  assert not any(word in said for word in not_tried), said


def test_what_fits_is_not_refused(monkeypatch):
  monkeypatch.setattr(memory_limits, "host_limit", lambda: memory_limits.Limit(24 * 10**9, "a test"))
  need, limit = memory.require_fit(make_program(load_config("gemma4-tiny").config))
  assert limit is not None
  assert need.total < 1e9
