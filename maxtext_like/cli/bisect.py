"""``maxtext-like bisect``: finds the smallest set of precision keys that repairs a step, with the effect and cost of each."""

import argparse
from pathlib import Path

from maxtext_like.cli.arguments import names_model, parse_words, verb_parser
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.storage import is_remote

DESCRIPTION = """Compares one training step with the same step in float32 (same weights, same batch). If the step is not finite,
or its error exceeds the tolerance, searches for the smallest set of precision keys that repairs the step, first for the
complete model and then for single layers, and prints the keys as YAML."""
EPILOG = """examples:
  maxtext-like bisect gemma4-tiny dtype=float16 float32_gate_product=false
  maxtext-like bisect --checkpoint gemma-3-4b-pt dtype=float16
  maxtext-like bisect gemma4-31b --checkpoint runs/mine gpu/h200.yml max_target_length=512 --tolerance 0.05

exit codes: 0 nothing to repair, or repaired; 2 wrong usage; 3 no key repairs it, or float32 is not finite; 4 does not fit"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  options, words = _parse(argv)
  checkpoint = options.checkpoint
  if checkpoint and not is_remote(checkpoint) and not Path(checkpoint).expanduser().is_dir():
    raise UserError(
      f"--checkpoint {checkpoint}: not a directory", fix="name a run, one of its checkpoints/N, or a directory with config.json"
    )
  from maxtext_like import bisect

  say = lambda line: print(line, flush=True)
  found = bisect(options.config, *words, checkpoint=checkpoint, tolerance=options.tolerance, progress=say)
  print(found)
  return NonFiniteError.exit_code if found.no_fix_found else 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  usage = "[CONFIG] [--checkpoint DIR] [--tolerance X] [overlay.yml ...] [key=value ...]"
  parser = verb_parser("bisect", usage, DESCRIPTION, EPILOG)
  model = "a model's name, such as gemma4-tiny, or the path of a .yml file; not needed with a Hugging Face checkpoint"
  parser.add_argument("config", metavar="CONFIG", nargs="?", help=model)
  weights = "weights to use: a run, one of its checkpoints, or a Hugging Face checkpoint"
  parser.add_argument("--checkpoint", type=checkpoint_path, metavar="DIR", help=weights)
  what = (
    "maximum relative error of loss, gradients (also of each array) and update (default: chosen by model and dtype, 0.5 to 3)"
  )
  parser.add_argument("--tolerance", metavar="X", type=float, help=what)
  options, words = parse_words(parser, argv)
  if options.config is not None and "=" in options.config:
    options.config, words = None, [options.config, *words]
  elif options.config is None and words and "=" not in words[0] and not words[0].startswith("-"):
    options.config, words = words[0], words[1:]  # Python 3.11's argparse misses a positional argument after an option
  if options.config is None and options.checkpoint is None and names_model(words):
    options.config = "base.yml"
  if options.tolerance is not None and not 0 < options.tolerance < float("inf"):
    raise UserError(
      f"--tolerance {options.tolerance:g}: not a relative error above 0\n  fix: write a positive number, as in --tolerance 0.5"
    )
  return options, words
