"""``maxtext-like data``: records as a run takes them, with what is learned marked, and the counts of a pass."""

import os
import sys
from typing import TYPE_CHECKING

from maxtext_like.cli.arguments import configuration_parser, parse_words, split_configuration

if TYPE_CHECKING:
  from maxtext_like.data.preview import ShownRecord, SourceCounts

DESCRIPTION = """Shows the first records as a run takes them, rendered and tokenised, with the tokens that are learned marked
(green on a terminal, else between ⟦ and ⟧), and counts of a pass: tokens, learned tokens, what is cut or left out, bad
records with file, line and reason. It is the first thing to look at when a loss is not what it should be."""
EXAMPLES = """examples:
  maxtext-like data --sft gemma3-4b init_from=gemma-3-4b-it dataset_path=chats.jsonl --show 3
  maxtext-like data gemma4-tiny --show 1

exit codes: 2 wrong usage, configuration or input, also where records are bad, or a source has nothing to learn"""
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def run(argv: list[str]) -> int:
  """Shows and counts; see ``DESCRIPTION``."""
  parser = configuration_parser("data", DESCRIPTION, EXAMPLES)
  if "-h" in argv or "--help" in argv:
    _options(parser)
    parser.parse_args(["--help"])
  import argparse

  reader = argparse.ArgumentParser(prog="maxtext-like data", allow_abbrev=False, exit_on_error=False, add_help=False)
  options, rest = parse_words(_options(reader), argv, {})
  config, overrides = split_configuration("data", DESCRIPTION, rest, EXAMPLES)
  from maxtext_like import look_at_data

  found = look_at_data(config, *overrides, show=options.show, documents=options.documents, for_sft=options.sft)
  colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
  for record in found.records:
    print(_record(record, found.length, colour))
  if found.template is not None:
    print(f"template {found.template}")
  for name, counts in found.counts.items():
    print("\n".join(_counts(name, counts, found.length)))
  return 2 if any(counts.bad or not counts.learned for counts in found.counts.values()) else 0


def _options(parser):
  parser.add_argument(
    "--sft", action="store_true", help="as `sft` takes the same words: data_format=chat, and dataset as the files say"
  )
  parser.add_argument("--show", type=int, default=3, metavar="N", help="records of each source that are shown (3)")
  parser.add_argument("--documents", type=int, default=10_000, metavar="N", help="of each source that are counted (10,000)")
  return parser


def _record(record: "ShownRecord", length: int, colour: bool) -> str:
  from maxtext_like.cli.main import printable

  begin, end = (GREEN, PLAIN) if colour else ("⟦", "⟧")
  text = "".join(f"{begin}{printable(part)}{end}" if learned else printable(part) for part, learned in record.parts)
  head = f"--- {printable(record.place)}: {record.tokens:,} tokens, "
  if record.kept is None:
    return f"{head}{record.learned:,} learned\n{text}"
  lost = record.learned - record.kept
  head += f"{record.kept:,} learned, cut at max_target_length={length}: {lost:,} more tokens would be learned after the cut"
  return f"{head}\n{text}\n--- cut here, what follows is not trained on:\n{printable(record.rest)}"


def _counts(name: str, c: "SourceCounts", length: int) -> list[str]:
  from maxtext_like.cli.main import printable

  of = f"{c.documents:,} of {c.available:,}" if c.documents < c.available else f"{c.documents:,}"
  share = f" ({c.learned / c.tokens:.1%})" if c.tokens else ""
  lines = [
    f"documents {of}{f' of {name}' * bool(name)}, {c.empty:,} empty, {c.bad:,} bad",
    f"tokens    {c.tokens:,}, {c.learned:,} learned{share}",
    f"cut       {c.truncated:,} longer than max_target_length={length}, {c.unlearned:,} left out with nothing to learn"
    + (f", {c.cut_at_image:,} with more images than max_images_per_row" if c.cut_at_image else "")
    + (f", {c.excluded:,} left out as their records mark them" if c.excluded else ""),
    f"rows      {c.rows:,} of {length} tokens, {c.filled:.1%} filled",
  ]
  lines += [f"note      {printable(note)}" for note in c.notes]
  if not c.learned:
    lines += ["nothing is learned: train refuses this", f"  fix: {_more_to_learn(c, length)}"]
  lines += [f"bad       {printable(reason)}" for reason in c.reasons]
  lines += [f"bad       ... and {c.bad - len(c.reasons):,} more"] if c.bad > len(c.reasons) else []
  return lines + ([f"  fix: {printable(c.fix)}"] if c.bad and c.learned else [])


def _more_to_learn(c: "SourceCounts", length: int) -> str:
  if c.unlearned:
    return f"max_target_length above {length}, in which the first learned token is to come, or train_on=all"
  if c.excluded:
    return "dataset_path with records that are not marked as bad (label, weight, train, ... in the records)"
  return c.fix or "dataset_path=FILES of records that have text: these are empty"
