"""``maxtext-like replay``: the step that ended a run, looked through again."""

import argparse

from maxtext_like.cli import local_processes
from maxtext_like.cli.arguments import parse_words
from maxtext_like.config.paths import local_path
from maxtext_like.errors import UserError

DESCRIPTION = """Looks again through the step that ended a run with exit code 3, from the state and the batch that the run kept:
on this machine, on as many devices as it has, with other values where key=value says so. dtype=float32 shows whether the
step is finite there; module_api, scan_layers and remat_policy may change too.

RUN is the run's directory, or its URL."""
EXAMPLES = """examples:
  maxtext-like replay runs/gemma4-tiny
  maxtext-like replay gs://bucket/runs/gemma4-tiny dtype=float32
  maxtext-like replay runs/gemma4-tiny float32_gate_product=auto module_api=linen
  maxtext-like replay runs/gemma4-tiny --processes 2    a step that takes several hosts: the same command on each, as with train

exit codes: 0 finite; 2 wrong usage or input; 3 not finite; 4 does not fit the machine"""


def run(argv: list[str]) -> int:
  """Runs the verb; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(
    prog="maxtext-like replay",
    usage="maxtext-like replay RUN [--out DIR] [--all] [key=value ...]",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument(
    "--out",
    type=local_path,
    metavar="DIR",
    help="where xray.json and xray.html go; default: RUN/failed_step/replay; of a URL runs/NAME-replay",
  )
  parser.add_argument("--all", action="store_true", help="measure every tensor, not only the key ones; compiles far longer")
  argv, count, devices = local_processes.take_options(argv)
  options, words = parse_words(parser, argv, {})
  if not words or "=" in words[0] or words[0].startswith("-"):
    raise UserError("replay: no run named\n  fix: maxtext-like replay runs/NAME [key=value ...]")
  if count is not None:
    return local_processes.run(["replay", *argv], count, devices)
  from maxtext_like import replay
  from maxtext_like.cli.xray import show
  from maxtext_like.sharding import processes

  look = replay(words[0], *words[1:], everything=options.all)
  if processes.primary():
    print(look.ended)
  return show(look, options.out)
