#!/usr/bin/env python3
"""Compares random configurations with transformers: python tests/parity/fuzz.py --seeds 100-200 --family gemma4

Prints one line per case. For a failure it prints the seed, config.json, the first layer that differs, and the smallest case
that still fails. Exits with 1 if a case failed. Needs the extra parity.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

import tests.conftest  # noqa: F401  (XLA's flags of the tests, before JAX)
from tests.parity.check import Failure, Outcome, check
from tests.parity.draw import FAMILIES, Case, draw
from tests.parity.shrink import shrink


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--seeds", default="0-9", help="7, 100-200 or 1,5,9 (default: %(default)s)")
  parser.add_argument("--family", action="append", choices=list(FAMILIES), help="several may be named (default: all)")
  parser.add_argument("--no-export", action="store_true", help="do not import and export")
  parser.add_argument("--no-shrink", action="store_true", help="do not look for a smaller case that fails")
  parser.add_argument("--keep", type=Path, help="folder for checkpoints and inputs of failures")
  options = parser.parse_args()
  failed = undecided = count = 0
  for seed in _numbers(options.seeds):
    for family in options.family or FAMILIES:
      case, begin = draw(family, seed), time.monotonic()
      outcome = check(case, exports=not options.no_export, keep=options.keep)
      count, failed, undecided = count + 1, failed + (outcome.failure is not None), undecided + outcome.undecided
      print(_line(outcome, time.monotonic() - begin), flush=True)
      if outcome.failure:
        smaller = outcome.case if options.no_shrink else shrink(outcome.case, at_the_same_stage(outcome.failure))
        print(report(outcome.case, outcome.failure, smaller), flush=True)
      jax.clear_caches()
  print(f"{count} cases: {failed} failed, {undecided} undecided (every draw of their weights hung on rounding)")
  return 1 if failed else 0


def _numbers(text: str) -> list[int]:
  found: list[int] = []
  for part in text.split(","):
    first, _, last = part.partition("-")
    found += range(int(first), int(last or first) + 1)
  return found


def describe(case: Case) -> str:
  """Describes a case in one line."""
  kind = f"{case.form} form, {case.stored}, [{case.rows}, {case.length}] {case.tokens}"
  return kind + (f", {case.images} images" if case.images else "") + (f", {' '.join(case.words)}" if case.words else "")


def _line(outcome: Outcome, seconds: float) -> str:
  verdict = f"FAILED ({outcome.failure.stage})" if outcome.failure else "undecided" if outcome.undecided else "ok"
  worst = " ".join(f"{kind} {part:.2f}" for kind, part in outcome.worst.items())
  again = f", drawn {outcome.redrawn + 1} times" if outcome.redrawn else ""
  case = outcome.case
  return f"{case.family} {case.seed}: {verdict}; {describe(case)}; of the tolerance: {worst or '-'}{again} ({seconds:.0f} s)"


def at_the_same_stage(failure: Failure) -> Callable[[Case], bool]:
  """Returns a function that returns True if another case fails at the same stage."""

  def fails(case: Case) -> bool:
    found = check(case, exports=failure.stage == "export").failure
    jax.clear_caches()
    return found is not None and found.stage == failure.stage

  return fails


def report(case: Case, failure: Failure, smaller: Case) -> str:
  """Returns the text from which a person can reproduce a failure."""
  lines = [f"  {failure.stage}: {failure.where}", *(f"    {line}" for line in failure.lines)]
  lines.append(f"  again: python tests/parity/fuzz.py --family {case.family} --seeds {case.seed}")
  for title, shown in (("this case", case), ("smallest that fails", smaller)):
    lines += [f"  {title}: {describe(shown)}", f"  config.json: {json.dumps(shown.config)}"]
  return "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main())
