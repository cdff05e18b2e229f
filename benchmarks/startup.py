"""Measures how long a user waits: for the import of the command line, and for the first step with cold and warm caches.

  python benchmarks/startup.py [MODEL] [key=value ...]

Each number is the wall-clock time of a separate process from the command to the event, in seconds. On Linux it is followed by
the CPU seconds on all cores, which other work on the machine affects less. For comparison, MaxText 0.2.5 takes 31 s to import
and about 50 s to the first step of the same tiny Gemma 4 (2 cores).
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"import": 3.0, "first step, cold caches": 10.0, "first step, warm caches": 3.0}


def import_seconds(module: str) -> float:
  """Returns the seconds of a Python process that imports a module and ends."""
  begin = time.perf_counter()
  subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=True)
  return time.perf_counter() - begin


def cpu_seconds(pid: int) -> float | None:
  """Returns the CPU seconds of a running process and its threads, or None if the system does not report them."""
  try:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError:
    return None
  return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def first_step_seconds(model: str, words: list[str], place: Path, name: str) -> tuple[float, float | None]:
  """Returns seconds and CPU seconds from the command to the line of step 1, printed when the device has finished."""
  settings = [f"output_dir={place}", f"run_name={name}", f"compilation_cache_dir={place}/cache", "steps=2"]
  command = [sys.executable, str(ROOT / "train.py"), model, *settings, *words]
  begin = time.perf_counter()
  with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
    assert process.stdout is not None
    seconds = cpu = None
    for line in process.stdout:
      if seconds is None and line.startswith("step 1 "):
        seconds, cpu = time.perf_counter() - begin, cpu_seconds(process.pid)
  if process.returncode or seconds is None:
    raise SystemExit(f"training ended with {process.returncode} and no first step")
  return seconds, cpu


def main() -> None:
  words = sys.argv[1:]
  model = words.pop(0) if words and "=" not in words[0] else "gemma4-tiny"
  found: dict[str, tuple[float, float | None]] = {
    "import": (import_seconds("maxtext_like.cli.train"), None),
    "import, with JAX": (import_seconds("maxtext_like.training.run.run"), None),
  }
  with tempfile.TemporaryDirectory() as folder:
    found["first step, cold caches"] = first_step_seconds(model, words, Path(folder), "cold")
    found["first step, warm caches"] = first_step_seconds(model, words, Path(folder), "warm")
  load = os.getloadavg()[0]
  print(f"{model} on {os.cpu_count()} cores, load average {load:.1f}")
  for name, (seconds, cpu) in found.items():
    of_cores = "" if cpu is None else f" {cpu:6.2f} s of CPU"
    limit = f"  (at most {TARGETS[name]:.0f} s)" if name in TARGETS else ""
    print(f"  {name:<24} {seconds:6.2f} s{of_cores}{limit}")


if __name__ == "__main__":
  main()
