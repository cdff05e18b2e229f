"""Runs the finiteness check of every tiny model on this machine's device, in each dtype and module API, and prints a table.

python benchmarks/finiteness_table.py [--models gemma4-tiny ...] [--dtypes bfloat16 float32] [--workers 6]
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = sorted(path.stem for path in (ROOT / "configs/models").glob("*-tiny.yml"))


def check(model: str, dtype: str, face: str, steps: int, runs: str) -> tuple[int, str, list[float], str]:
  """Trains for a few steps; returns the exit code, the four verdicts, the losses, and the last line of an error."""
  name = f"{model}-{dtype}-{face}"
  words = [f"steps={steps}", "finite_check_steps=2", f"dtype={dtype}", f"module_api={face}", f"run_name={name}"]
  words += [f"output_dir={runs}", "enable_checkpointing=false", "enable_tensorboard=false"]
  # Several runs share the device: none may take all of its memory at the start.
  env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  done = subprocess.run(
    [sys.executable, str(ROOT / "train.py"), model, *words], capture_output=True, text=True, env=env, cwd=ROOT, check=False
  )
  folder = Path(runs) / name
  report, verdicts, losses = folder / "finiteness.json", "-", []
  if report.exists():
    verdicts = " ".join(word for word in _verdicts(json.loads(report.read_text())))
  if (folder / "metrics.jsonl").exists():
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
  return done.returncode, verdicts, losses, (done.stderr.strip().splitlines() or [""])[-1]


def _verdicts(report: dict) -> list[str]:
  """Returns one word for each of loss0, gradients, parameters and loss1."""
  return [f"{name}:{report[name]['result']}" for name in ("loss0", "gradients", "parameters", "loss1")]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--models", nargs="+", default=TINY)
  parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
  parser.add_argument("--faces", nargs="+", default=["linen", "nnx"])
  parser.add_argument("--steps", type=int, default=2)
  parser.add_argument("--workers", type=int, default=6, help="runs at the same time")
  args = parser.parse_args()
  cases = list(itertools.product(args.models, args.dtypes, args.faces))
  failed = 0
  print(f"{'model':18} {'dtype':9} {'face':6} {'exit':>4} {'loss 0':>10} {'last loss':>10}  checks")
  with tempfile.TemporaryDirectory() as runs, concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
    results = pool.map(lambda case: check(case[0], case[1], case[2], args.steps, runs), cases)
    for (model, dtype, face), (code, verdicts, losses, error) in zip(cases, results, strict=True):
      failed += code != 0
      ends = (losses[0], losses[-1]) if losses else (float("nan"), float("nan"))
      row = f"{model:18} {dtype:9} {face:6} {code:4} {ends[0]:10.6f} {ends[1]:10.6f}"
      print(f"{row}  {verdicts if code == 0 else error}", flush=True)
  print(f"{len(cases) - failed} of {len(cases)} finite")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
