"""``maxtext-like perplexity``: perplexity of a text file by windows that overlap."""

import sys
from pathlib import Path

from maxtext_like.cli.arguments import add_adapters, add_model, parse_words, print_notes, require_keys, verb_parser
from maxtext_like.cli.counted import Counted
from maxtext_like.config.paths import new_file
from maxtext_like.errors import UserError

DESCRIPTION = """Computes the perplexity of a UTF-8 text file with a run or a Hugging Face checkpoint, as on the page
"Perplexity of fixed-length models" of the documentation of transformers.

Windows of --max-length tokens begin every --stride tokens. The first window counts all its tokens except the first one, later
windows only tokens that no earlier window had. The mean losses of the windows are averaged with the number of new tokens minus
one as weight. "over tokens" is the exponential of the average over all scored tokens. Lengths are padded to few sizes; the
results do not depend on --batch-size. Default values are in parentheses."""
EPILOG = """examples:
  maxtext-like perplexity runs/gemma4-tiny book.txt --stride 128 --max-length 256
  maxtext-like perplexity gemma-3-4b-it book.txt dtype=bfloat16 --output perplexity.json

exit codes: 0 done; 2 wrong usage or input; 3 the logits are not finite; 4 the weights or the KV caches do not fit"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  usage = "RUN_OR_HF_DIR FILE [--stride N] [--max-length N] [options] [key=value ...]"
  parser = verb_parser("perplexity", usage, DESCRIPTION, EPILOG)
  add_model(parser)
  parser.add_argument("--stride", type=int, default=512, metavar="N", help="tokens between the beginnings of two windows (512)")
  parser.add_argument(
    "--max-length", type=int, metavar="N", help="tokens of a window (2048, or the model's longest sequence if that is less)"
  )
  parser.add_argument("--batch-size", type=int, metavar="N", help="windows that are computed together (8192 tokens)")
  add_adapters(parser)
  parser.add_argument("--output", type=new_file, metavar="FILE.json", help="write the numbers as JSON")
  options, rest = parse_words(parser, argv, {"model": "RUN_OR_HF_DIR"})
  # argparse finds a second positional only if no option comes between the two.
  files = [word for word in rest if "=" not in word and not word.startswith("-")]
  if not files:
    raise UserError("maxtext-like perplexity needs FILE\n  fix: see maxtext-like perplexity --help")
  overrides = require_keys(parser, [word for word in rest if word is not files[0]])
  from maxtext_like import perplexity
  from maxtext_like.cli.forward import print_clamped

  with Counted() as count:
    found = perplexity(
      options.model,
      files[0],
      *overrides,
      stride=options.stride,
      max_length=options.max_length,
      batch_size=options.batch_size,
      adapters=options.adapters,
      on_batch=lambda finished, of: count("windows", finished, of),
      on_note=lambda note: print_notes([note], file=sys.stderr),
    )
  print(found)
  print_clamped(found.clamped)
  if options.output is not None:
    found.write(Path(options.output))
  return 0
