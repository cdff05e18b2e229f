"""Compiles train steps for TPU slices with ``maxtext-like compile`` and prints the Markdown table of docs/compile.md.

  python benchmarks/compile_table.py gemma4-tiny:v6e-8 "gemma4-31b:v6e-32:per_device_batch_size=2"

Each argument is MODEL:TOPOLOGY[:key=value ...]. Every compilation is a process of its own, one after the other.
"""

import re
import resource
import subprocess
import sys
import time

COLUMNS = ("model", "topology", "values", "arguments", "temporaries", "peak", "collectives", "CPU s", "verdict")


def main(cases: list[str]) -> int:
  """Prints the table as it grows; 0 when every case compiled, whether it fits or not."""
  print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
  failed = 0
  for case in cases:
    model, topology, *rest = case.split(":", 2)
    values = rest[0].split() if rest else []
    words = [sys.executable, "-m", "maxtext_like", "compile", model, f"topology={topology}", *values]
    before = _cpu_seconds()
    start = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in (0, 4):
      failed += 1
      print(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}", file=sys.stderr)
      continue
    lines = dict(re.findall(r"^  (\w+) +(.*)$", done.stdout, flags=re.MULTILINE))
    peak = lines.get("peak") or ("> " + lines["needed"] if "needed" in lines else "not compiled")
    row = [
      model, topology, " ".join(values), _size(lines.get("arguments", "")), _size(lines.get("temporaries", "")), _size(peak),
      lines.get("collectives", "").partition(" in the program text: ")[2] or "none",
      f"{_cpu_seconds() - before:.0f}", lines["verdict"].partition(":")[0],
    ]  # fmt: skip
    print("| " + " | ".join(row) + " |", flush=True)
    print(f"{case}: {lines.get('compiled', '')}, {time.monotonic() - start:.0f} s in all", file=sys.stderr)
  return 1 if failed else 0


def _cpu_seconds() -> float:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def _size(text: str) -> str:
  """The size at the beginning of a line of the report."""
  found = re.match(r"(?:> )?[\d.]+ [GM]iB", text)
  return found[0] if found else text


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
