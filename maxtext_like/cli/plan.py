"""``maxtext-like plan``: what a train step needs and takes at least on machines that are not here, by arithmetic."""

import argparse
import json
import os
from pathlib import Path

from maxtext_like import load_config
from maxtext_like.capacity.topologies import find_machine, machines
from maxtext_like.cli.arguments import parse_words, print_notes, split_configuration
from maxtext_like.cli.compile import split_own
from maxtext_like.config.paths import new_file
from maxtext_like.errors import DoesNotFitError, UserError

LIST = "\n                    ".join(machines(cpus=True).split("; "))

DESCRIPTION = f"""Prints the table of maxtext-like compile from arithmetic on shapes, in seconds and without libtpu: memory of
a device by class, products, transfers between devices, and the time that a step takes at least. docs/results/memory.md
compares both.

  topology=NAME     {LIST}
  memory=SIZE       of a GPU or CPU device, as 24GB, in the place of what the table has; alone it is one GPU of any kind
  num_slices=N      TPU: so many such slices (the mesh: dcn_data_parallelism=N)
  --search          also tries meshes, rows a device and remat policies, and prints those that fit with the best bounds
  --json FILE       also writes all of it as JSON

Exit code 0: fits, 4: does not fit, 2: wrong usage."""
EXAMPLES = """examples:
  maxtext-like plan gemma4-31b topology=v6e-32
  maxtext-like plan gemma3-27b topology=h200-8 --search
  maxtext-like plan gemma3-4b recipes/qlora.yml topology=rtx4090
  maxtext-like plan gemma3-4b recipes/lora.yml memory=16GB
  maxtext-like plan gemma4-31b topology=v6e-256 num_slices=2 dcn_data_parallelism=2"""


def run(argv: list[str]) -> int:
  """Plans and prints; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(prog="maxtext-like plan", add_help=False, allow_abbrev=False, exit_on_error=False)
  parser.add_argument("--search", action="store_true")
  parser.add_argument("--json", type=new_file)
  options, argv = parse_words(parser, argv, {})
  config, words = split_configuration("plan", DESCRIPTION, argv, EXAMPLES)
  compiles, words = split_own(words, "plan", ("xla_flags", "machine_code"))
  if compiles:
    raise UserError(
      f"plan: nothing is compiled, so {' and '.join(compiles)} is for maxtext-like compile alone\n  fix: leave it out; "
      "transfers of layers count as hidden, which xla_flags=all makes them on a TPU"
    )
  own, overrides = split_own(words, "plan", ("topology", "num_slices", "memory"))
  find_machine(own.get("topology"), own.get("memory"), cpus=True)  # its errors come before JAX, at once
  loaded = load_config(config, *overrides)
  print_notes(loaded.notes)
  os.environ["JAX_PLATFORMS"] = "cpu"
  from maxtext_like import plan

  found = plan(loaded, **own, search=options.search)
  print(found)
  if options.json:
    Path(options.json).write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
  return 0 if found.fits else DoesNotFitError.exit_code
