"""Generation on several devices gives the same answers as on one device, and shards the caches."""

import subprocess
import sys

import pytest

from tests.processes import ROOT, environment


@pytest.mark.slow
@pytest.mark.parametrize(
  ("words", "split"),
  [
    (
      [
        "gemma4-e2b-tiny",
        "ici_tensor_parallelism=2",
        "num_decoder_layers=4",
        "num_kv_shared_layers=2",
        "inhomogeneous_layer_cycle_interval=2",
      ],
      "fsdp",
    ),
    (["gemma4-tiny", "--draft", "ici_tensor_parallelism=2", "num_decoder_layers=2", "layer_types=[sliding,global]"], "fsdp"),
    (["deepseek3.2-tiny", "ici_tensor_parallelism=2", "ici_expert_parallelism=2", "num_decoder_layers=2"], "expert"),
  ],
)
def test_answers_are_those_of_one_device(words: list[str], split: str):
  command = [sys.executable, "-m", "tests.generation.meshes", *words]
  done = subprocess.run(command, cwd=ROOT, env=environment(4), capture_output=True, text=True, timeout=600, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  assert split in done.stdout
