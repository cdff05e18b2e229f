"""Prints known numerical failures of training in low precision: results of the failing policy and of this project's code.

python benchmarks/known_failures.py [--only PATTERN]

Runs on the default device of JAX. tests/benchmarks/test_known_failures.py checks both results of every row.
"""

import argparse
import platform
import re
import sys
import time
from importlib.metadata import version

import jax
from failures import float16, hidden, masks, rounding, ties

ROWS = (*float16.ROWS, *masks.ROWS, *ties.ROWS, *hidden.ROWS, *rounding.ROWS)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression over the rows' function names")
  options = parser.parse_args()
  chosen = [row for row in ROWS if re.search(options.only, row.__name__)]
  if not chosen:
    print(f"no row matches {options.only!r}; there are {', '.join(row.__name__ for row in ROWS)}", file=sys.stderr)
    return 2
  device = jax.devices()[0]
  versions = f"Python {platform.python_version()}, jax {jax.__version__}, optax {version('optax')}"
  print(f"{device.device_kind}, {platform.machine()}, {versions}\n")
  print("| failure | failing policy | here |\n|---|---|---|")
  begin = time.monotonic()
  for function in chosen:
    row = function()
    print(f"| {row.failure} | {row.theirs} | {row.ours} |", flush=True)
  print(f"\n{len(chosen)} rows in {time.monotonic() - begin:.0f} s")
  return 0


if __name__ == "__main__":
  sys.exit(main())
