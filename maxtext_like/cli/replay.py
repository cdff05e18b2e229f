"""``maxtext-like replay``: repeats the step that ended a run, with statistics of every tensor."""

from maxtext_like.cli import local_processes
from maxtext_like.cli.arguments import parse_words, verb_parser
from maxtext_like.cli.xray import add_report_options, show
from maxtext_like.errors import UserError

DESCRIPTION = """Repeats the step that ended a run with exit code 3, from the state and the batch that the run saved, and
measures its tensors as xray does. It uses the devices of this machine. key=value changes settings: dtype=float32 shows whether
the step is finite in float32; module_api, scan_layers and remat_policy may change too.

RUN is the directory of the run, or its URL."""
EXAMPLES = """examples:
  maxtext-like replay runs/gemma4-tiny
  maxtext-like replay gs://bucket/runs/gemma4-tiny dtype=float32
  maxtext-like replay runs/gemma4-tiny float32_gate_product=auto module_api=linen
  maxtext-like replay runs/gemma4-tiny --processes 2    two processes; on several hosts, start the same command on each

exit codes: 0 finite; 2 wrong usage or input; 3 not finite; 4 not enough memory"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  usage = "RUN [--out DIR] [--all] [key=value ...]"
  parser = verb_parser("replay", usage, DESCRIPTION, EXAMPLES)
  add_report_options(parser, "RUN/failed_step/replay; for a URL runs/NAME-replay")
  argv, count, devices = local_processes.take_options(argv)
  options, words = parse_words(parser, argv)
  if not words or "=" in words[0] or words[0].startswith("-"):
    raise UserError("replay: the run is missing\n  fix: maxtext-like replay runs/NAME [key=value ...]")
  if count is not None:
    return local_processes.run(["replay", *argv], count, devices)
  from maxtext_like import replay
  from maxtext_like.sharding import processes

  look = replay(words[0], *words[1:], everything=options.all)
  if processes.primary():
    print(look.ended)
  return show(look, options.out)
