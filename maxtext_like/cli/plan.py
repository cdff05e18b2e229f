"""``maxtext-like plan``: estimates memory and time of a train step on other machines from shapes."""

import os

from maxtext_like import load_config
from maxtext_like.capacity.topologies import find_machine, machines
from maxtext_like.cli.arguments import parse_words, print_notes, split_configuration, verb_parser, write_json
from maxtext_like.cli.compile import split_own
from maxtext_like.config.paths import new_file
from maxtext_like.errors import DoesNotFitError, UserError

LIST = "\n                    ".join(machines(cpus=True).split("; "))

DESCRIPTION = f"""Prints the table of maxtext-like compile from arithmetic on shapes, in seconds and without a compiler: memory
of a device by use, matrix products, transfers between devices, and a lower bound for the time of a step. docs/results/memory.md
compares the results of both commands.

  topology=NAME     {LIST}
  memory=SIZE       memory of one GPU or CPU device, such as 24GB, replacing the table's; without topology: any GPU
  num_slices=N      TPU: number of slices (mesh: dcn_data_parallelism=N)
  --search          also try meshes, batch sizes and remat policies, and print those that fit, fastest bound first
  --json FILE       also write the result as JSON

exit codes: 0 fits; 2 wrong usage; 4 does not fit"""
EXAMPLES = """examples:
  maxtext-like plan gemma4-31b topology=v6e-32
  maxtext-like plan gemma3-27b topology=h200-8 --search
  maxtext-like plan gemma3-4b recipes/qlora.yml topology=rtx4090
  maxtext-like plan gemma3-4b recipes/lora.yml memory=16GB
  maxtext-like plan gemma4-31b topology=v6e-256 num_slices=2 dcn_data_parallelism=2"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  parser = verb_parser("plan")
  parser.add_argument("--search", action="store_true")
  parser.add_argument("--json", type=new_file)
  options, argv = parse_words(parser, argv)
  config, words = split_configuration("plan", DESCRIPTION, argv, EXAMPLES)
  compiles, words = split_own(words, "plan", ("xla_flags", "machine_code"))
  if compiles:
    raise UserError(
      f"plan: {' and '.join(compiles)} has no effect, because plan compiles nothing\n  fix: leave it out, or use maxtext-like "
      "compile; plan assumes that all-gathers of layers overlap with computation, as xla_flags=all does on a TPU"
    )
  own, overrides = split_own(words, "plan", ("topology", "num_slices", "memory"))
  find_machine(own.get("topology"), own.get("memory"), cpus=True)  # errors here are reported before JAX is imported
  loaded = load_config(config, *overrides)
  print_notes(loaded.notes)
  os.environ["JAX_PLATFORMS"] = "cpu"
  from maxtext_like import plan

  found = plan(loaded, **own, search=options.search)
  print(found)
  write_json(found, options.json)
  return 0 if found.fits else DoesNotFitError.exit_code
