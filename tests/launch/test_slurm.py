"""gpu/train.sbatch on a real Slurm with two virtual nodes: a job is stopped, requeued and resumed; a wrong key is rejected."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_like.config.files import configs_folder

ROOT = configs_folder().parent
TINY = "gemma3-tiny num_decoder_layers=2 inhomogeneous_layer_cycle_interval=2 emb_dim=16 mlp_dim=24 head_dim=8 "
TINY += "dataset=synthetic max_target_length=32 per_device_batch_size=2 steps=100000 checkpoint_interval=100000 log_interval=1 "
TINY += "enable_tensorboard=false module_api=linen"
SCRIPT = r"""
await() { # await WORDS: until the job has said so
  for _ in {1..480}; do
    ! grep -Eqs "$1" "$OUT/job" || return 0
    sleep 0.5
  done
  cat "$OUT/job"; echo "no $1"; exit 1
}
job() { sbatch --parsable --nodes=2 --gpus-per-node=4 "$@" output_dir="$OUT" compilation_cache_dir="$OUT/compiled"; }
refused="$(job --wait --output="$OUT/refused" gpu/train.sbatch $TINY nosuch=1 run_name=b)" || [ $? = 2 ]
scontrol show job "$refused" > "$OUT/refused.state"
id="$(job --output="$OUT/job" gpu/train.sbatch $TINY run_name=a)"
await "step +3 of"
scancel --signal=TERM "$id"
await "stopped by SIGTERM after step [0-9]+, saved"
saved="$(sed -n 's/.*stopped by SIGTERM after step \([0-9]*\), saved.*/\1/p' "$OUT/job" | head -n 1)"
await "step +$((saved + 3)) of"
scancel --signal=TERM "$id"
await "not requeued"
until scontrol show job "$id" | grep -q "JobState=FAILED"; do sleep 0.5; done
scontrol show job "$id" > "$OUT/job.state"
"""


@pytest.mark.slow
def test_a_job_on_two_nodes_is_stopped_queued_again_and_goes_on(tmp_path):
  environment = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "MAX_RESTARTS": "1",
    "OUT": str(tmp_path),
    "TINY": TINY,
  }
  environment.pop("JAX_COMPILATION_CACHE_DIR", None)
  command = [str(ROOT / "tests" / "launch" / "in_slurm.sh"), "bash", "-euc", SCRIPT]
  done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580)
  if done.returncode == 77:
    pytest.skip(done.stderr.strip())
  assert done.returncode == 0, done.stdout + done.stderr
  said, state = (tmp_path / "job").read_text(), (tmp_path / "job.state").read_text()
  assert "exit code 42: requeued, restart 1" in said
  assert "exit code 42 after 1 restarts (MAX_RESTARTS): not requeued" in said
  assert "Restarts=1" in state
  assert "ExitCode=42:0" in state
  first, last = (int(step) for step in dict.fromkeys(re.findall(r"stopped by SIGTERM after step (\d+), saved", said)))
  assert f"from step {first} in" in said
  rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [*range(1, last + 1)]
  assert json.loads((tmp_path / "a" / "env.json").read_text())["processes"] == 2
  refused = (tmp_path / "refused.state").read_text()
  assert "Restarts=0" in refused
  assert "ExitCode=2:0" in refused
  assert "unknown key 'nosuch'" in (tmp_path / "refused").read_text()
