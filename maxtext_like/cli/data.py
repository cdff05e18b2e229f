"""``maxtext-like data``: shows records as a run tokenizes them, with the trained tokens marked, and counts of one pass."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from maxtext_like.cli.arguments import configuration_parser, parse_words, split_configuration, verb_parser

if TYPE_CHECKING:
  from maxtext_like.data.preview import ShownRecord, SourceCounts

DESCRIPTION = """Shows the first records as a run renders and tokenizes them. Learned tokens (those with a loss) are green on a
terminal, otherwise between ⟦ and ⟧. Also prints counts for one pass over the data: tokens, learned tokens, truncated and
skipped documents, and bad records with file, line and reason. Run this first if a loss looks wrong."""
EXAMPLES = """examples:
  maxtext-like data --sft gemma3-4b init_from=gemma-3-4b-it dataset_path=chats.jsonl --show 3
  maxtext-like data gemma4-tiny --show 1

exit codes: 0 done; 2 wrong usage, configuration or input, including bad records and a source without trained tokens"""
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  if "-h" in argv or "--help" in argv:
    _options(configuration_parser("data", DESCRIPTION, EXAMPLES)).parse_args(["--help"])
  options, rest = parse_words(_options(verb_parser("data")), argv)
  config, overrides = split_configuration("data", DESCRIPTION, rest, EXAMPLES)
  from maxtext_like import look_at_data

  found = look_at_data(config, *overrides, show=options.show, documents=options.documents, for_sft=options.sft)
  color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
  for record in found.records:
    print(_record(record, found.length, color))
  if found.template is not None:
    print(f"template {found.template}")
  for name, counts in found.counts.items():
    print("\n".join(_counts(name, counts, found.length)))
  return 2 if any(counts.bad or not counts.learned for counts in found.counts.values()) else 0


def _options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
  parser.add_argument(
    "--sft", action="store_true", help="treat the arguments as `sft` does: data_format=chat, dataset chosen by the files"
  )
  parser.add_argument("--show", type=int, default=3, metavar="N", help="number of records to show from each source (3)")
  parser.add_argument(
    "--documents", type=int, default=10_000, metavar="N", help="number of documents to count in each source (10,000)"
  )
  return parser


def _record(record: "ShownRecord", length: int, color: bool) -> str:
  from maxtext_like.cli.main import printable

  begin, end = (GREEN, PLAIN) if color else ("⟦", "⟧")
  text = "".join(f"{begin}{printable(part)}{end}" if learned else printable(part) for part, learned in record.parts)
  head = f"--- {printable(record.place)}: {record.tokens:,} tokens, "
  if record.kept is None:
    return f"{head}{record.learned:,} learned\n{text}"
  lost = record.learned - record.kept
  head += f"{record.kept:,} learned, truncated at max_target_length={length}: {lost:,} more learned tokens are after the cut"
  return f"{head}\n{text}\n--- truncated here; the rest is not trained on:\n{printable(record.rest)}"


def _counts(name: str, c: "SourceCounts", length: int) -> list[str]:
  from maxtext_like.cli.main import printable

  of = f"{c.documents:,} of {c.available:,}" if c.documents < c.available else f"{c.documents:,}"
  share = f" ({c.learned / c.tokens:.1%})" if c.tokens else ""
  lines = [
    f"documents {of}{f' of {name}' * bool(name)}, {c.empty:,} empty, {c.bad:,} bad",
    f"tokens    {c.tokens:,}, {c.learned:,} learned{share}",
    f"cut       {c.truncated:,} truncated at max_target_length={length}, {c.unlearned:,} dropped (no learned token left)"
    + (f", {c.cut_at_image:,} truncated at an image (more images than max_images_per_row)" if c.cut_at_image else "")
    + (f", {c.excluded:,} left out because of a field of the record" if c.excluded else ""),
    f"rows      {c.rows:,} of {length} tokens, {c.filled:.1%} filled",
  ]
  lines += [f"note      {printable(note)}" for note in c.notes]
  if not c.learned:
    lines += ["no token is learned: train stops with an error", f"  fix: {_more_to_learn(c, length)}"]
  lines += [f"bad       {printable(reason)}" for reason in c.reasons]
  lines += [f"bad       ... and {c.bad - len(c.reasons):,} more"] if c.bad > len(c.reasons) else []
  return lines + ([f"  fix: {printable(c.fix)}"] if c.bad and c.learned else [])


def _more_to_learn(c: "SourceCounts", length: int) -> str:
  if c.unlearned:
    return f"set max_target_length above {length}, so that a learned token fits, or train_on=all"
  if c.excluded:
    return "set dataset_path to records whose fields do not exclude them (label, weight, train, ...)"
  return c.fix or "set dataset_path to files with text; these records are empty"
