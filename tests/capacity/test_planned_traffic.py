"""Memory traffic by arithmetic: parts compared with sums by hand, totals with compiled programs (docs/results/memory.md)."""

import dataclasses
import functools

import pytest

from maxtext_like.capacity import memory, planned_traffic
from maxtext_like.capacity.gathered_weights import TABLE, gathered_weights
from maxtext_like.capacity.plan import plan
from maxtext_like.capacity.topologies import find_topology
from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config
from maxtext_like.layers.param import count
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.step.program import TrainProgram, make_program
from tests.tiers import nightly, slow

TPU = configs_folder().parent / "tpu"
NF4 = ("base_weights=nf4", "lora_rank=16", "lora_alpha=32", "weight_dtype=bfloat16", "max_target_length=2048")


@functools.cache
def program(model: str, *words: str, chips: int = 1) -> TrainProgram:
  config = load_config(model, list(words)).config
  return make_program(config, mesh=abstract_mesh(config.mesh, chips), platform="tpu")


def on_gpu(*words: str) -> TrainProgram:
  return make_program(load_config("deepseek3.2-tiny", ["num_decoder_layers=2", *words]).config, platform="gpu")


def update(*words: str, chips: int = 1) -> float:
  return planned_traffic._of_update(program("qwen3-tiny", *words, chips=chips))


def test_scores_of_tiles_of_queries_go_through_memory():
  """There are two layers of 4 heads. 1024 queries are processed in four tiles, which see 256, 512, 768 and 1024 keys."""
  of = lambda *words: planned_traffic._of_scores(program("deepseek3.2-tiny", "num_decoder_layers=2", *words))
  pairs = 256 * (256 + 512 + 768 + 1024)
  assert of("max_target_length=1024", "per_device_batch_size=3") == 2 * planned_traffic.SCORES * 4 * 2 * 4 * 3 * pairs
  assert of("max_target_length=256") == 0
  # Devices that share a row compute scores for all of its keys.
  shared = program("deepseek3.2-tiny", "num_decoder_layers=2", "max_target_length=1024", "ici_context_parallelism=2", chips=2)
  rows = shared.model.rows
  assert planned_traffic._of_scores(shared) == 2 * planned_traffic.SCORES * 4 * 2 * 4 * rows * 1024**2 / 2
  gathered = lambda *words: planned_traffic._of_scores(on_gpu("max_target_length=1024", "per_device_batch_size=3", *words))
  keys = 1024 * 32
  assert gathered() == 2 * planned_traffic.SCORES * 4 * 2 * 4 * 3 * keys
  assert gathered("dtype=float16") == gathered("lora_rank=2", "lora_modules=[kv_b]") == gathered() * pairs / keys
  assert planned_traffic._of_scores(program("deepseek3-tiny", "max_target_length=1024")) == 0


def test_an_update_moves_what_the_state_holds():
  numbers = count(program("qwen3-tiny").model.spec)
  # The parameter and two moments are read and written. The gradient is written, and read for its norm and for the update. A few
  # counters are added.
  assert update() == pytest.approx(4 * numbers * (3 * 2 + 3), rel=1e-4)
  assert update("opt_type=sgd", "sgd_momentum=0") == pytest.approx(4 * numbers * (2 + 3), rel=1e-4)
  assert update("weight_dtype=bfloat16", "mu_dtype=float32", "nu_dtype=float32") == pytest.approx(
    numbers * (2 * 2 + 2 * 8 + 3 * 2), rel=1e-4
  )
  assert update("optimizer_in_backward=true") == pytest.approx(4 * numbers * (3 * 2 + 2), rel=1e-4)
  assert update("gradient_accumulation_steps=3") == pytest.approx(4 * numbers * (3 * 2 + 3 + 3 * 2), rel=1e-4)
  assert update(chips=8) == pytest.approx(update() / 8, rel=0.05)
  assert update("lora_rank=2", "lora_alpha=4") < update() / 20


def test_weights_on_the_device_itself_are_read_in_every_pass():
  sizes = lambda p: sum(count(spec) for name, spec in p.model.spec.items() if name.startswith("stack_"))
  of = lambda *words, **chips: planned_traffic._of_layers(program("qwen3-tiny", *words, **chips))
  numbers = sizes(program("qwen3-tiny"))
  assert of("remat_policy=full") == 3 * 4 * numbers
  assert of("remat_policy=none") == 2 * 4 * numbers
  assert of("remat_policy=full", "weight_dtype=bfloat16") == 3 * 2 * numbers
  assert of("remat_policy=none") < of("remat_policy=save_mlp") < of("remat_policy=save_outputs") < of("remat_policy=full")
  split = program("qwen3-tiny", "remat_policy=full", chips=8)
  weights = gathered_weights(split)
  own = [w for w in weights if w.part != TABLE]
  # Gathered weights are written once and read once in each pass. Their float32 gradients are written and read before the
  # reduce-scatter.
  assert planned_traffic._of_gathered(split, weights) == 2 * 3 * sum(w.bytes for w in own) + 8 * sum(w.numbers for w in own)
  assert planned_traffic._of_gathered(program("qwen3-tiny"), []) == 0


def test_quantized_weights_are_read_as_they_are_stored(monkeypatch):
  words = ("lora_rank=2", "lora_alpha=4", "weight_dtype=bfloat16", "remat_policy=full")
  bfloat16, nf4, int8 = (program("gemma3-tiny", *words, *more) for more in ((), ("base_weights=nf4",), ("base_weights=int8",)))
  of_layers, made = planned_traffic._of_layers, planned_traffic._of_dequantized
  assert of_layers(nf4) < 0.5 * of_layers(bfloat16)
  assert of_layers(nf4) < of_layers(int8) < of_layers(bfloat16)
  base = nf4.model.base
  assert base is not None
  numbers, unpacked = sum(map(count, base.weights.values())), planned_traffic.UNPACKED[False]
  assert [made(p) for p in (bfloat16, nf4, int8)] == [0, 3 * unpacked * numbers, 0]
  monkeypatch.setattr(planned_traffic, "ON_CHIP", 0)
  # A code of one byte and a float32 value are each written and read.
  assert [made(p) for p in (bfloat16, nf4, int8)] == [0, 3 * (unpacked + 10) * numbers, 0]


def test_logits_and_their_table():
  p = program("qwen3-tiny", "num_vocab_tiling=4", "max_target_length=64", "per_device_batch_size=2")
  V, D = p.config.model.vocab_size, p.config.model.emb_dim
  table, logits = 4 * V * D, 4 * 2 * 64 * V
  # Each of the four chunks reads the table twice and adds to its gradient. The embedding's rows have a gradient as well.
  assert planned_traffic._of_head(p, []) == 3 * logits + 2 * 4 * table + 7 * table + 2 * table
  frozen = program("qwen3-tiny", "num_vocab_tiling=4", "max_target_length=64", "per_device_batch_size=2", "lora_rank=2")
  assert planned_traffic._of_head(frozen, []) == 2 * logits + 2 * 4 * 4 * V * D


def test_an_outline_of_quantized_weights_is_kept_as_they_are(monkeypatch):
  p = program("qwen3-tiny", "lora_rank=2", "base_weights=nf4", "remat_policy=none", "num_decoder_layers=1")
  outlined = memory.activation_bytes(p)
  monkeypatch.setattr(memory, "ShapesOnly", lambda form: form)
  assert outlined == pytest.approx(memory.activation_bytes(p), abs=1000)


def test_more_rows_a_chip_share_an_update():
  topology = find_topology("v6e-1")
  assert topology is not None
  config = load_config("qwen3-0.6b", ["max_target_length=128"]).config
  bounds = []
  for rows in (4, 8):
    training = dataclasses.replace(config.training, per_device_batch_size=rows)
    bounds.append(plan(dataclasses.replace(config, training=training), topology).roofline)
  assert bounds[0].binds == bounds[1].binds == "HBM"
  assert 1.5 * bounds[0].mfu < bounds[1].mfu < 2 * bounds[0].mfu


@pytest.mark.parametrize(
  ("model", "topology", "words", "gb"),
  [
    # Reported by `compile ... machine_code=false` on 2026-11-25 (docs/results/memory.md).
    ("qwen3-0.6b", "v6e-1", ["max_target_length=128"], 31.2),
    nightly("qwen3-0.6b", "v6e-1", ["max_target_length=2048", "remat_policy=none"], 47.8),
    slow("qwen3-8b", "v6e-8", ["max_target_length=2048"], 253.9),
    nightly("gemma4-31b", "v6e-32", ["max_target_length=2048"], 905.5),
    slow("gemma4-e2b", "v6e-4", [], 227.5),
    slow("gemma4-26b", "v6e-16", [], 1171.2),
    nightly("gemma4-26b", "v6e-32", [f"{TPU}/v6e-32-experts.yml"], 825.7),
    slow("deepseek3-671b", "v6e-256", [f"{TPU}/v6e-256-deepseek.yml"], 2892.2),
    slow("gemma3-4b", "v6e-1", [*NF4], 115.8),
    nightly("gemma3-12b", "v6e-1", [*NF4], 361.3),
    nightly("gemma4-31b", "v6e-1", [*NF4], 1093.2),
    nightly("gemma4-26b", "v6e-1", [*NF4], 1269.5),
  ],
)
def test_what_libtpus_programs_move(model, topology, words, gb):
  target = find_topology(topology)
  assert target is not None
  assert plan(load_config(model, words).config, target).memory_bytes / 1e9 == pytest.approx(gb, rel=0.2)
