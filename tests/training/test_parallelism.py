"""Every model family trains on every kind of mesh as on one device. All meshes of a model run in one process with eight CPU
devices."""

import json
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.processes import ROOT, environment
from tests.tiers import tiers
from tests.training.meshes import MESHES

EXPERTS = ("gemma4-moe-tiny", "deepseek3-tiny", "deepseek3.2-tiny", "qwen3-moe-tiny")
LAYERS = "num_decoder_layers=4"
TWO = [LAYERS, "inhomogeneous_layer_cycle_interval=2"]
MODELS = {
  "gemma3-tiny": TWO,
  "gemma4-tiny": TWO,
  "gemma4-moe-tiny": TWO,
  "gemma4-e2b-tiny": ["num_decoder_layers=8", "num_kv_shared_layers=4", TWO[1], "use_multimodal=true"],
  "deepseek3-tiny": [LAYERS],
  "deepseek3.2-tiny": [LAYERS],
  "qwen3-tiny": [LAYERS],
  "qwen3-moe-tiny": [LAYERS],
}
"""Two rows of a stack. A row has as few layers as contain all layer types of the family, because XLA's compile time grows with
the number of layers in a row."""

GLOBAL = "inhomogeneous_layer_cycle_interval=1"
FEWER = MODELS | {
  "gemma4-moe-tiny": ["num_decoder_layers=3", GLOBAL],
  "gemma4-e2b-tiny": ["num_decoder_layers=4", "num_kv_shared_layers=2", GLOBAL],
}
"""For tests of a family's own layers that do not need the alternation of global and sliding layers. The two models that take
longest to compile have only global layers here: with and without experts, with their own keys and with keys shared from earlier
layers. No model has a vision tower."""

MODEL_AXES = ["fsdp-context-tensor", "two-parts-slices"]
EXPERT_AXES = ["expert-context-tensor", "sharded-slices", "two-parts-data"]
"""The fewest meshes that cover each axis, slices and microbatches. Gemma 3, with global and sliding layers, runs on every mesh
without an expert axis. Gemma 4 with experts also runs on fsdp alone."""
ON_MESHES = FEWER | {"gemma4-e2b-tiny": [*FEWER["gemma4-e2b-tiny"], "use_multimodal=true"]}


def run(module: str, *words: str) -> Any:
  command = [sys.executable, "-m", module, *words]
  done = subprocess.run(command, cwd=ROOT, env=environment(8), capture_output=True, text=True, timeout=1500, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


def assert_equal(found: dict) -> None:
  for name, mesh in found.items():
    assert mesh["one"][2] < mesh["one"][1] < mesh["one"][0]
    np.testing.assert_allclose(mesh["losses"], mesh["one"], rtol=1e-5, err_msg=name)
    assert mesh["gradients"] < 1e-5, name


def test_a_mesh_gives_the_losses_and_gradients_of_one_device():
  assert_equal(run("tests.training.meshes", "qwen3-tiny", "num_decoder_layers=2", "fsdp-context-tensor"))


@pytest.mark.parametrize(
  ("model", "words", "mesh"),
  [
    pytest.param(model, words, mesh, id=case, marks=pytest.mark.nightly if case in ("int8", "fp8_block") else pytest.mark.slow)
    for case, (model, words, mesh) in {
      "experts in nf4": (
        "qwen3-moe-tiny", ["base_weights=nf4", "moe_mlp_dim=128", "lora_modules=[q_proj,experts]"], "expert-context-tensor",
      ),
      "DoRA over nf4": ("qwen3-tiny", ["base_weights=nf4", "lora_dora=true", "lora_modules=[q_proj,down_proj]"], "fsdp"),
      "int8": ("qwen3-tiny", ["base_weights=int8", "lora_dropout=0.3"], "data-fsdp-tensor"),
      "fp8_block": ("qwen3-tiny", ["base_weights=fp8_block", "lora_dropout=0.3"], "two-parts-data"),
    }.items()
  ],
)  # fmt: skip
def test_an_adapter_on_quantized_weights(model, words, mesh):
  """An adapter on quantized weights trains as on one device, with DoRA's norms and dropout masks too. With fsdp=8 the weights
  have two blocks of 64 along the split axis, so each block is split between devices."""
  sizes = ["num_decoder_layers=2", "head_dim=128", "mlp_dim=512", "lora_rank=3"]
  assert_equal(run("tests.training.meshes", model, *sizes, *words, mesh))


@pytest.mark.parametrize("model", tiers(MODELS, slow=("gemma3-tiny", "gemma4-e2b-tiny", "deepseek3.2-tiny")))
def test_every_family_on_every_kind_of_mesh(model):
  meshes = EXPERT_AXES if model in EXPERTS else MODEL_AXES
  if model == "gemma3-tiny":
    meshes = [mesh for mesh in MESHES if "expert" not in mesh]  # without experts, the expert axis is another data axis
  if model == "gemma4-moe-tiny":
    meshes = [*meshes, "fsdp"]
  if model == "deepseek3.2-tiny":
    meshes = ["expert-context-tensor", "fsdp-expert-context", "two-parts-data"]
  assert_equal(run("tests.training.meshes", model, *ON_MESHES[model], *meshes))


AXES = {"qwen3-tiny": {"fsdp", "context"}, "qwen3-moe-tiny": {"data", "expert", "tensor"}}
"""The axes that cross the processes, each in its own mesh. The communication between processes depends on the axis, not on the
family, so the families that compile fastest are used."""


@pytest.mark.slow
def test_families_on_meshes_of_two_processes(tmp_path):
  """Each process has four devices. Every mesh axis crosses the processes once."""
  keys = {model: [key.replace(LAYERS, "num_decoder_layers=2") for key in MODELS[model]] for model in AXES}
  words = [",".join((model, *keys[model], *sorted(axes))) for model, axes in AXES.items()]
  command = [sys.executable, "-m", "tests.training.meshes_across", *words]
  with socket.create_server(("", 0)) as free:
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
  both = []
  for rank in range(2):
    with open(tmp_path / f"{rank}.out", "w") as out, open(tmp_path / f"{rank}.err", "w") as err:
      own = environment(4) | place | {"JAX_PROCESS_ID": str(rank)}
      both.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=out, stderr=err))
  try:
    codes = [process.wait(timeout=900) for process in both]
  finally:
    for process in both:
      process.kill()
      process.wait()
  assert codes == [0, 0], [(tmp_path / f"{rank}.err").read_text()[-3000:] for rank in range(2)]
  for rank in range(2):
    found = json.loads((tmp_path / f"{rank}.out").read_text().splitlines()[-1])
    assert {model: set(meshes) for model, meshes in found.items()} == AXES
    for meshes in found.values():
      assert_equal(meshes)


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_other_meshes_with_the_same_losses(tmp_path):
  """Two steps on fsdp, resumed for two steps on tensor and data, give the losses of four steps without a stop. This includes
  AdamW's moments.

  test_stored_moments.py restores the checkpoint of a single device on a mesh.
  """
  legs = [(2, 8, ["ici_fsdp_parallelism=8"]), (4, 8, ["ici_tensor_parallelism=4"])]
  for name, wanted in (("parts", legs), ("whole", [(4, 8, ["ici_fsdp_parallelism=8"])])):
    for steps, devices, mesh in wanted:
      words = [
        f"output_dir={tmp_path}", f"run_name={name}", f"steps={steps}", "lr_schedule_steps=4", "num_decoder_layers=2",
        f"per_device_batch_size={8 // devices}", "dtype=float32", "max_target_length=32", "dataset=synthetic", *mesh,
        "compilation_cache_dir=null",
      ]  # fmt: skip
      command = [sys.executable, "-m", "maxtext_like", "train", "qwen3-tiny", *words]
      done = subprocess.run(
        command, cwd=ROOT, env=environment(devices), capture_output=True, text=True, timeout=900, check=False
      )
      assert done.returncode == 0, done.stderr[-3000:]
  rows = (map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()) for name in ("parts", "whole"))
  parts, whole = ({row["step"]: row["loss"] for row in found} for found in rows)
  assert list(parts) == [1, 2, 3, 4]
  np.testing.assert_allclose(list(parts.values()), list(whole.values()), rtol=1e-5)
