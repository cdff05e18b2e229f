"""``maxtext-like xray``: measures every tensor of one training step, and finds the first cause of a NaN."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from maxtext_like import load_config
from maxtext_like.cli import local_processes
from maxtext_like.cli.arguments import parse_words, print_notes, split_configuration, verb_parser
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import local_path
from maxtext_like.errors import NonFiniteError

if TYPE_CHECKING:
  from maxtext_like.api.xray import StepReport

DESCRIPTION = """Runs one training step on the first batch of the configured data, and measures its tensors: activations of
every layer, their gradients, gradients of the parameters and updates. For each it prints the largest, smallest and mean
magnitude and the headroom in bits to the limits of float16, bfloat16 and float8. If a number is not finite, it names the
operation, source line and layer where it first appears.

Writes xray.json and xray.html. The model is not trained. Without --checkpoint, the weights are those that a run starts with."""
EXAMPLES = """examples:
  maxtext-like xray gemma4-tiny
  maxtext-like xray gemma4-tiny dtype=float16 --checkpoint runs/gemma4-tiny
  maxtext-like xray gemma3-4b --checkpoint /models/gemma-3-4b-pt dtype=float16 per_device_batch_size=1

exit codes: 0 finite; 2 wrong usage, configuration or input; 3 not finite; 4 not enough memory"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  usage = "CONFIG [--checkpoint DIR] [--out DIR] [--all] [key=value ...]"
  parser = verb_parser("xray", usage, DESCRIPTION, EXAMPLES)
  what = "a run, one of its checkpoints (with optimizer state), or a Hugging Face checkpoint"
  parser.add_argument("--checkpoint", type=checkpoint_path, metavar="DIR", help=what)
  add_report_options(parser, "runs/RUN_NAME-xray")
  argv, count, devices = local_processes.take_options(argv)
  options, words = parse_words(parser, argv)
  model, overrides = split_configuration("xray", DESCRIPTION, words, EXAMPLES)
  loaded = load_config(model, *overrides)
  if count is not None:
    return local_processes.run(["xray", *argv], count, devices)
  notes = loaded.notes
  if options.checkpoint is None and (Path(model) / "config.yml").is_file():
    state = f"maxtext-like xray {Path(model) / 'config.yml'} --checkpoint {model}"
    notes += (f"the optimizer state of {model} is not used; the next step of that run: {state}",)
  print_notes(notes)
  from maxtext_like import xray_step

  return show(xray_step(loaded, checkpoint=options.checkpoint, everything=options.all), options.out)


def add_report_options(parser: argparse.ArgumentParser, folder: str) -> None:
  """Add the options of a report on a step: where it is written, ``folder`` by default, and which tensors are measured."""
  what = f"directory for xray.json and xray.html (default: {folder})"
  parser.add_argument("--out", type=local_path, metavar="DIR", help=what)
  what = "measure every tensor instead of the most important ones; compilation takes much longer"
  parser.add_argument("--all", action="store_true", help=what)


def show(look: "StepReport", out: str | None) -> int:
  """Print the table, write the files, and return 0.

  Raises:
    NonFiniteError: a result of the step is not finite; the message contains the cause.
    UserError: the directory cannot be written.
  """
  from maxtext_like.sharding import processes

  page = look.write(out)
  if processes.primary():
    print(f"{look}\n{page}")
  if look.cause is not None:
    raise NonFiniteError(look.cause)
  return 0
