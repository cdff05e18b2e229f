"""The transfers between chips in the train step of a sharded model, read from the program that libtpu compiles."""

import re

import pytest

from maxtext_like.capacity.topologies import TOPOLOGIES
from maxtext_like.config.files import configs_folder
from maxtext_like.config.load import load_config

LAYERS, D, F, VOCABULARY = 6, 512, 2048, 512
HEADS, KV_HEADS = 192, 96  # heads of qwen3-tiny times their size


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize(("words", "passes"), [([], 1), (["optimizer_in_backward=true"], 2)])
def test_stacked_parameters_are_gathered_a_layer_at_a_time_and_gradients_scattered(words, passes):
  from maxtext_like.capacity.aot_tpu import compile_step, xla_flags

  mesh = str(configs_folder().parent / "tpu" / "v6e-8.yml")
  words = [mesh, f"num_decoder_layers={LAYERS}", "dtype=bfloat16", f"emb_dim={D}", f"mlp_dim={F}", "remat_policy=full", *words]
  step = compile_step(load_config("qwen3-tiny", words).config, TOPOLOGIES["v6e-8"], xla_flags(), machine_code=False)
  gathered = re.findall(r"= \(?\w+\[([\d,]+)\][^=]*? all-gather(?:-start)?\(", step.hlo)
  assert gathered
  assert not [shape for shape in gathered if shape.startswith(f"{LAYERS},") and shape.count(",") > 1]
  assert step.work is not None
  moved = {t.kind: t.bytes for t in step.work.transfers}
  # The gradient of every matrix is reduce-scattered in float32, and seven of its eight parts go to other chips. The table has a
  # gradient from the logits and, in each pass, one from the lookup. Only gradients of norms and scalars are all-reduced, also
  # in the pass that measures the gradients.
  layer = 3 * D * F + 2 * D * HEADS + 2 * D * KV_HEADS
  assert moved["reduce-scatter"] == (passes * LAYERS * layer + (1 + passes) * VOCABULARY * D) * 4 * 7 / 8
  assert moved["all-reduce"] < passes * D * KV_HEADS * 4


@pytest.mark.slow
@pytest.mark.tpu
def test_weights_of_experts_are_turned_a_layer_at_a_time():
  """Expert weights are stored in a layout that fills tiles, and the kernels read another layout. The layout is changed for one
  layer at a time, so that no copy of all layers is made."""
  from maxtext_like.capacity.aot_tpu import compile_step, xla_flags

  mesh = str(configs_folder().parent / "tpu" / "v6e-8.yml")
  words = [mesh, "num_experts=128", "moe_mlp_dim=192", "dtype=bfloat16", "remat_policy=full"]
  step = compile_step(load_config("gemma4-moe-tiny", words).config, TOPOLOGIES["v6e-8"], xla_flags(), machine_code=False)
  stacked = r"f32\[2,128,16,192\]"
  assert re.search(rf"{stacked}{{1,3,2,0", step.hlo)  # 128 experts fill the lanes, 192 would not
  assert not re.findall(rf"= {stacked}\S* copy\(", step.hlo)


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize(
  ("words", "part"),
  [
    (["ici_fsdp_parallelism=8"], r"f32\[65536,160\]"),
    (["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "per_device_batch_size=2"], r"f32\[32768,320\]"),
  ],
)
def test_of_a_table_the_gradient_is_turned_and_no_moment(words, part):
  """A chip's shard of the per-layer table is stored by columns, which fill tiles. Rows are looked up, and their gradients
  added, by rows. Both copies that change the layout are operations on the table and its gradient; no moment is copied."""
  from maxtext_like.capacity.aot_tpu import compile_step, xla_flags

  sizes = ["emb_dim=256", "mlp_dim=256", "vocab_size=4096", "vocab_size_per_layer_input=65536", "max_target_length=1024"]
  layers = ["num_decoder_layers=5", "num_kv_shared_layers=0", "use_double_wide_mlp=false"]
  config = load_config("gemma4-e2b", [*sizes, *layers, *words]).config
  step = compile_step(config, TOPOLOGIES["v6e-8"], xla_flags(), machine_code=False)
  assert len(re.findall(rf"= {part}{{0,1\S* parameter\(\d+\).*op_name=\"state\[", step.hlo)) == 3  # the table and two moments
  turned = re.findall(rf'= {part}\S* copy\(.*?op_name="([^"]*)"', step.hlo)
  assert len(turned) == 2
  assert all("per_layer_input" in name for name in turned)


@pytest.mark.slow
@pytest.mark.tpu
def test_no_chip_has_the_inputs_by_layer_of_all_rows():
  from maxtext_like.capacity.aot_tpu import compile_step, xla_flags

  sizes = ["emb_dim=256", "mlp_dim=256", "vocab_size=4096", "vocab_size_per_layer_input=4096", "max_target_length=8192"]
  layers = ["num_decoder_layers=5", "num_kv_shared_layers=0", "use_double_wide_mlp=false"]
  words = [*sizes, *layers, "ici_fsdp_parallelism=32", "ici_tensor_parallelism=2"]
  step = compile_step(load_config("gemma4-e2b", words).config, TOPOLOGIES["v6e-64"], xla_flags(), machine_code=False)
  assert re.search(r"\w\[2,8192,(5,256|1280)\]", step.hlo)
  assert not re.search(r"\w\[64,8192,", step.hlo)
