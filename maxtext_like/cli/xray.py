"""``maxtext-like xray``: one training step, looked through."""

import argparse
from typing import TYPE_CHECKING

from maxtext_like import load_config
from maxtext_like.cli import local_processes
from maxtext_like.cli.arguments import parse_words, print_notes, split_configuration
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import local_path
from maxtext_like.errors import NonFiniteError

if TYPE_CHECKING:
  from maxtext_like.api.xray import StepReport

DESCRIPTION = """Runs one training step on the first batch of the configured data and looks through it: for the tensors of every
layer, forward and backward, for gradients and updates, the largest, the smallest and the mean magnitude, and the bits of
headroom to float16, bfloat16 and float8. When a number is not finite: the operation, line and layer it comes from.

Writes xray.json and xray.html. Nothing is trained; without --checkpoint the weights are those that a run would start with."""
EXAMPLES = """examples:
  maxtext-like xray gemma4-tiny
  maxtext-like xray gemma4-tiny dtype=float16 --checkpoint runs/gemma4-tiny
  maxtext-like xray gemma3-4b --checkpoint /models/gemma-3-4b-pt dtype=float16 per_device_batch_size=1

exit codes: 0 finite; 2 wrong usage, configuration or input; 3 not finite; 4 does not fit the machine"""


def run(argv: list[str]) -> int:
  """Runs the verb; see ``DESCRIPTION``."""
  parser = argparse.ArgumentParser(
    prog="maxtext-like xray",
    usage="maxtext-like xray CONFIG [--checkpoint DIR] [--out DIR] [--all] [key=value ...]",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument(
    "--checkpoint",
    type=checkpoint_path,
    metavar="DIR",
    help="a run, one of its checkpoints (whole state), or a Hugging Face one",
  )
  parser.add_argument(
    "--out", type=local_path, metavar="DIR", help="where xray.json and xray.html go; default: runs/RUN_NAME-xray"
  )
  parser.add_argument("--all", action="store_true", help="measure every tensor, not only the key ones; compiles far longer")
  argv, count, devices = local_processes.take_options(argv)
  options, words = parse_words(parser, argv, {})
  model, overrides = split_configuration("xray", DESCRIPTION, words, EXAMPLES)
  loaded = load_config(model, *overrides)
  if count is not None:
    return local_processes.run(["xray", *argv], count, devices)
  print_notes(loaded.notes)
  from maxtext_like import xray_step

  return show(xray_step(loaded, checkpoint=options.checkpoint, everything=options.all), options.out)


def show(look: "StepReport", out: str | None) -> int:
  """Prints the table, writes the files, and returns 0.

  Raises:
    NonFiniteError: a number of the step's results is not finite; the message is the cause.
    UserError: the directory cannot be written.
  """
  from maxtext_like.sharding import processes

  page = look.write(out)
  if processes.primary():
    print(f"{look}\n{page}")
  if look.cause is not None:
    raise NonFiniteError(look.cause)
  return 0
