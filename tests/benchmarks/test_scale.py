"""benchmarks/scale.py prints its table for single devices, meshes and two processes."""

import subprocess
import sys

import pytest

from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent
TINY = ["qwen3-tiny", "num_decoder_layers=2", "emb_dim=32", "mlp_dim=32", "max_target_length=16"]


@pytest.mark.nightly  # tests/training/test_parallelism.py trains on meshes and in two processes
def test_the_table_of_cpu_devices_and_of_two_processes():
  command = [
    sys.executable,
    str(ROOT / "benchmarks" / "scale.py"),
    *TINY,
    "--groups=2",
    "--steps=1",
    "--only",
    "one",
    "fsdp2",
    "slices",
  ]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  one, two, processes = (row for line in done.stdout.splitlines() if (row := line.split(" | "))[0] in ("| 1", "| 2", "| 8"))
  assert (one[5], one[6]) == ("1.000", "- |")
  assert two[1:3] == ["data 1 x fsdp 2", "2 x 16"]
  assert processes[1:3] == ["data 2 x fsdp 4", "8 x 16"]
  for row in (two, processes):
    assert "all-gather" in row[6]
    assert "all-reduce" in row[6]
