"""GPU memory in the phases of a step that updates layers in the backward pass, for tiny models with layers of unequal sizes."""

import functools
import math

import jax
import pytest

from maxtext_like.capacity import gpu_memory, memory
from maxtext_like.config.load import load_config
from maxtext_like.sharding.mesh import abstract_mesh
from maxtext_like.training.optimizers import moments
from maxtext_like.training.step.program import TrainProgram, make_program

KEPT, AGAIN = 1009, 2003
ROWS, LENGTH, CHUNKS = 3, 28, 4
WORDS = ("optimizer_in_backward=true", "remat_policy=full", "opt_type=adafactor", "dtype=bfloat16", "grad_dtype=bfloat16")
SIZES = (f"per_device_batch_size={ROWS}", f"max_target_length={LENGTH}", f"num_vocab_tiling={CHUNKS}")


@functools.cache
def program(model: str, *words: str) -> TrainProgram:
  config = load_config(model, [*WORDS, *SIZES, "weight_dtype=bfloat16", *words]).config
  return make_program(config, mesh=abstract_mesh(config.mesh, 1), platform="gpu")


def in_use(p: TrainProgram, kept: int = KEPT, again: int = AGAIN) -> gpu_memory.InUse:
  return gpu_memory.in_backward(p, trained(p), kept, again, p.objective.logit_bytes(ROWS, LENGTH))


def trained(p: TrainProgram) -> dict:
  return p.selection.split(p.abstract_state["params"])[0]


def table(p: TrainProgram) -> int:
  return math.prod(p.spec["embedding"]["table"].shape)


@pytest.mark.parametrize(("weights", "stored_otherwise"), [("bfloat16", 0), ("float32", 2), ("float16", 2)])
def test_a_loss_in_chunks_has_logits_or_what_they_make_of_the_head(weights, stored_otherwise):
  """The loss needs the float32 sum of the head's gradients, the bfloat16 gradient of a chunk, and the head in bfloat16 unless
  it is stored in bfloat16."""
  p = program("gemma3-tiny", f"weight_dtype={weights}", "vocab_size=40009")
  numbers = ROWS * LENGTH // CHUNKS * 40009
  assert table(p) > 4 * numbers  # the head's gradient of a chunk is larger than the chunk's logits
  expected = KEPT + 4 * table(p) + 2 * table(p) + stored_otherwise * table(p) + 2 * numbers
  found = gpu_memory.in_loss(p, trained(p), KEPT, p.objective.logit_bytes(ROWS, LENGTH))
  assert sum(found) == expected
  assert found.logits == (4 + 2) * numbers
  assert in_use(p, 10**9, 0) == found._replace(activations=10**9)


def test_a_layer_at_work_has_its_gradients_and_its_weights_taken_out_of_the_stack():
  """The largest layer in a group of three counts. Its updated values are written in place and need no further memory."""
  p = program("gemma4-tiny", "vocab_size=64")
  layers = [trained(p)["stack_0"][f"layer_{j}"] for j in range(3)]
  assert {x.shape[0] for layer in layers for x in jax.tree.leaves(layer)} == {2}
  numbers = [sum(math.prod(x.shape) for x in jax.tree.leaves(layer)) // 2 for layer in layers]
  assert len(set(numbers)) > 1  # the global layer and the local layers have different sizes
  found = in_use(p)
  assert found == (2 * table(p) + 2 * max(numbers), 2 * max(numbers), KEPT + AGAIN, 0)
  # With momentum of low rank and small activations, the update is the peak: the layer's updates and the changes that momentum
  # adds, both in bfloat16.
  p = program("gemma4-tiny", "vocab_size=64", "adafactor_momentum_rank=2")
  assert in_use(p, again=0) == (2 * table(p) + 2 * max(numbers), 2 * max(numbers) + 2 * 2 * max(numbers), KEPT, 0)
  more = in_use(p, KEPT, AGAIN + 10**6)
  assert sum(more) - sum(found) == 10**6


def test_behind_the_layers_a_table_that_is_read_by_rows_has_its_gradient_in_float32():
  p = program("qwen3-tiny", "vocab_size=200003", "num_vocab_tiling=28")
  outside = sum(math.prod(x.shape) for name in ("embedding", "final_norm") for x in jax.tree.leaves(trained(p)[name]))
  found = in_use(p, 0, 0)
  assert found.activations == found.logits == 0
  assert (found.gradients, found.copies) == (2 * table(p) + 4 * outside, 2 * outside)


def test_the_estimate_is_the_fullest_instant_on_a_gpu_alone():
  p = program("gemma4-tiny", "vocab_size=64")
  saved = memory.activation_bytes(p)
  need = memory.estimate(p, saved=saved)
  again = saved.everything // p.config.model.num_decoder_layers
  assert need.total - need.parameters - need.optimizer == sum(in_use(p, saved.kept, again))
  cpu = make_program(p.config, mesh=p.model.mesh, platform="cpu")
  assert memory.estimate(cpu).copies == 0


EIGHT_BITS = ("opt_type=adamw", "mu_dtype=dynamic8", "nu_dtype=dynamic8")


def test_tables_that_are_updated_at_once_have_their_steps_in_float32():
  """The update of everything outside the stacks holds the float32 updates and the new moments of all its arrays, and one
  float32 gradient at a time."""
  p = program("qwen3-tiny", "vocab_size=4096", *EIGHT_BITS)
  own = [x for name, tree in trained(p).items() if not name.startswith("stack_") for x in jax.tree.leaves(tree)]
  numbers = [math.prod(x.shape) for x in own]
  state = sum(
    math.prod(x.shape) * x.dtype.itemsize
    for path, x in jax.tree_util.tree_leaves_with_path(p.abstract_state["opt_state"])
    if "stack_" not in jax.tree_util.keystr(path)
  )
  assert gpu_memory._in_last_update(p, own_tree(p)) == (4 * max(numbers), 4 * sum(numbers) + state, 0, 0)
  assert in_use(p) == gpu_memory._in_last_update(p, own_tree(p))
  assert sum(gpu_memory._in_last_update(program("qwen3-tiny", "vocab_size=4096"), own_tree(p))) == 0  # fused: nothing is stored


def test_of_a_table_that_is_updated_piece_by_piece_nothing_is_there_but_its_gradient(monkeypatch):
  p = program("qwen3-tiny", "vocab_size=4096", *EIGHT_BITS)
  monkeypatch.setattr(moments, "PIECE", 10_000)
  (norm,) = jax.tree.leaves(p.spec["final_norm"])
  found = gpu_memory._in_last_update(p, own_tree(p))
  numbers = math.prod(norm.shape)
  counters = 4 * sum(x.ndim == 0 for x in jax.tree.leaves(p.abstract_state["opt_state"]))
  assert found == (4 * numbers, 4 * numbers + 2 * 4 * numbers + counters, 0, 0)


def test_cards_that_share_an_update_make_all_of_their_part_at_once(monkeypatch):
  monkeypatch.setattr(moments, "PIECE", 10_000)
  words = [*WORDS, *SIZES, *EIGHT_BITS, "weight_dtype=bfloat16", "vocab_size=4096", "per_device_batch_size=1"]
  config = load_config("qwen3-tiny", words).config
  p = make_program(config, mesh=abstract_mesh(config.mesh, 8), platform="gpu")
  numbers = lambda tree: sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
  table = trained(p)["embedding"]
  found = gpu_memory._in_last_update(p, own_tree(p))
  assert numbers(table) == math.prod(p.spec["embedding"]["table"].shape) // 8
  assert found.gradients == 4 * numbers(table)
  assert found.copies > 4 * numbers(own_tree(p))
  layers = [numbers(layer) // p.config.model.num_decoder_layers for layer in trained(p)["stack_0"].values()]
  assert gpu_memory._steps_of_a_layer(p, trained(p)) == 4 * max(layers)


def own_tree(p: TrainProgram) -> dict:
  return {name: tree for name, tree in trained(p).items() if not name.startswith("stack_")}


def test_a_layers_moments_come_and_go_beside_it():
  words = ("vocab_size=64", *EIGHT_BITS)
  here, there = (program("gemma4-tiny", *words, *more) for more in ((), ("optimizer_memory_host_offload=true",)))
  layer = lambda j: [
    x
    for path, x in jax.tree_util.tree_leaves_with_path(there.abstract_state["opt_state"])
    if f"layer_{j}" in str(path) and x.ndim
  ]
  most = max(sum(math.prod(x.shape) * x.dtype.itemsize for x in layer(j)) // 2 for j in range(3))
  assert sum(in_use(there)) - sum(in_use(here)) == 2 * most
