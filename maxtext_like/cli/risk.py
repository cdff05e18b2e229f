"""``maxtext-like risk``: estimates from the weights of a checkpoint which of its numbers overflow in a dtype.

With a configuration instead of a checkpoint: the size of attention scores before training.
"""

import argparse
from pathlib import Path

from maxtext_like.cli.arguments import (
  initial_weights,
  on_the_host,
  parse_words,
  print_notes,
  require_keys,
  verb_parser,
  write_json,
)
from maxtext_like.config.files import SUFFIXES, model_names
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import new_file
from maxtext_like.errors import NonFiniteError, UserError

DESCRIPTION = """Reads the weights of a checkpoint, one tensor at a time, and estimates for every layer the expected size and
the upper bound of gate, up, their product, q.k, router and indexer scores, the vision pooler, logits and the residual stream.
Compares them with the limits of float16, bfloat16 and e4m3, worst first, and names the precision key that removes each risk.

DIR is a Hugging Face checkpoint (config.json, safetensors), a run, or one of its checkpoints. The model is not run.

With a configuration instead of DIR (a model's name or a .yml file): prints the standard deviation of the attention scores of
random weights in every layer, and whether the softmax starts nearly one-hot.

  expected  median of the largest magnitude over N tokens (--tokens) with random normed inputs
  at most   upper bound for any input
  float16   headroom in bits below the largest float16 number, for expected/at most; negative: overflow; e4m3 likewise
  bf16 +-   largest rounding error of bfloat16 at the expected size
  verdict   for the dtype of the quantity: overflow (expected), possible (at most) or coarse (rounding changes
            probabilities by 5 % or makes ties) with the key to set; or safe with the key that makes it safe"""
EPILOG = """examples:
  maxtext-like risk gemma-4-31b-it dtype=float16
  maxtext-like risk runs/gemma4-tiny --rows 0 --json risk.json dtype=float16 float32_gate_product=false
  maxtext-like risk gemma4-31b init_scheme=maxtext

exit codes: 0 no expected overflow; 2 wrong usage or input; 3 expected overflow, a weight that is not finite, or attention
that starts saturated"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  usage = "DIR|CONFIG [--rows N] [--json FILE] [--tokens N] [key=value ...]"
  parser = verb_parser("risk", usage, DESCRIPTION, EPILOG)
  parser.add_argument("--checkpoint", type=checkpoint_path, metavar="DIR", help="checkpoint to read; the same as DIR")
  parser.add_argument("--rows", type=int, default=20, metavar="N", help="number of printed rows (20); 0: all")
  parser.add_argument("--json", type=new_file, metavar="FILE", help="write every row as JSON, with unrounded numbers")
  parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="number of tokens for the expected maximum (4096)")
  if argv and _names_configuration(argv[0]):
    return _initial(parser, argv)
  options, rest = parse_words(parser, _with_option(argv), {"checkpoint": "--checkpoint"})
  overrides = require_keys(parser, rest)
  if options.tokens < 100 or options.rows < 0:
    raise UserError(
      f"risk: --tokens {options.tokens} --rows {options.rows}: too small\n  fix: --tokens 100 or more, --rows 0 or more"
    )
  on_the_host()
  from maxtext_like import risk

  found = risk(options.checkpoint, *overrides, tokens=options.tokens)
  print_notes(found.notes)
  print(found.table(options.rows))
  write_json(found, options.json)
  if options.json:
    print(options.json)
  return NonFiniteError.exit_code if found.overflows else 0


def _names_configuration(word: str) -> bool:
  """Return True for a model's name or a configuration file, but not for a directory."""
  return not Path(word).is_dir() and (word in model_names() or Path(word).suffix in SUFFIXES)


def _initial(parser: argparse.ArgumentParser, argv: list[str]) -> int:
  """Print the attention scores of random weights for ``CONFIG [overlay.yml ...] [key=value ...]``."""
  options, overrides = parse_words(parser, argv[1:])
  if options.checkpoint:
    raise UserError(f"risk: {argv[0]} is a configuration and --checkpoint names weights\n  fix: leave one of them out")
  on_the_host()
  from maxtext_like import initial_risk

  found = initial_risk(argv[0], *overrides)
  print(found)
  write_json(found, options.json)
  if options.json:
    print(options.json)
  return NonFiniteError.exit_code if found.note else 0


def _with_option(argv: list[str]) -> list[str]:
  """Insert --checkpoint before a directory that is the first word, or before the value of ``init_from``."""
  if any(word.partition("=")[0] == "--checkpoint" for word in argv):
    return argv
  if argv and not argv[0].startswith("-") and "=" not in argv[0]:
    return ["--checkpoint", *argv]
  sources = initial_weights(argv)
  return ["--checkpoint", sources[-1], *(word for word in argv if word != f"init_from={sources[-1]}")] if sources else argv
