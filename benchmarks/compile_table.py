"""Compiles train steps for TPU slices with ``maxtext-like compile`` and prints the Markdown table of docs/results/tpu.md.

  python benchmarks/compile_table.py gemma4-tiny:v6e-8 "gemma4-31b:v6e-32:per_device_batch_size=2 machine_code=false"

Each argument is MODEL:TOPOLOGY[:key=value ...]. Every compilation runs in a separate process, one after the other.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLUMNS = ("model", "topology", "values", "memory", "products", "links", "step", "MFU", "bound by", "CPU s", "verdict")
GIB = 1 << 30


def main(cases: list[str]) -> int:
  """Prints the table row by row. Returns 0 if every case compiled, even if it does not fit."""
  print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
  failed = 0
  for case in cases:
    model, topology, *rest = case.split(":", 2)
    values = rest[0].split() if rest else []
    with tempfile.TemporaryDirectory() as folder:
      file = Path(folder) / "compiled.json"
      words = [sys.executable, "-m", "maxtext_like", "compile", model, f"topology={topology}", *values, "--json", str(file)]
      before, start = _cpu_seconds(), time.monotonic()
      done = subprocess.run(words, capture_output=True, text=True)
      if done.returncode not in (0, 4):
        failed += 1
        print(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}", file=sys.stderr)
        continue
      told = json.loads(file.read_text())
    shown = [v for v in values if v != "machine_code=false"]
    row = [model, topology, " ".join(shown), *_numbers(told), f"{_cpu_seconds() - before:.0f}", _verdict(told)]
    print("| " + " | ".join(row) + " |", flush=True)
    print(f"{case}: {time.monotonic() - start:.0f} s in all", file=sys.stderr)
  return 1 if failed else 0


def _numbers(told: dict) -> list[str]:
  memory = "not compiled" if told["peak_bytes"] is None else f"{told['peak_bytes'] / GIB:.2f} GiB"
  work = told["work"]
  if work is None:
    return [f"> {memory}" if told["peak_bytes"] else memory, "", "", "", "", ""]
  bounds = work["roofline"]
  moved = sum(t["bytes"] for t in work["transfers"])
  waited = sum(t["bytes"] for t in work["transfers"] if not t["asynchronous"])
  return [
    memory,
    f"{work['flops'] / 1e12:.4g} TFLOP ({work['flops'] / work['model_flops']:.2f} x)",
    f"{moved / 1e9:.3g} GB, {waited / 1e9:.3g} waited for",
    f"{bounds['step']:.3g} s",
    f"{bounds['mfu']:.1%}",
    bounds["binds"],
  ]


def _verdict(told: dict) -> str:
  if told["fits"]:
    return "fits"
  fitting = [" ".join(change["values"]) for change in told["tried"] if change["fits"]]
  return "does not fit" + "".join(f"; does with {values}" for values in fitting)


def _cpu_seconds() -> float:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
