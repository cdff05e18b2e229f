"""``maxtext-like train --help-keys [PATTERN]``: every configuration key with its type, default and meaning."""

import re
import sys

from maxtext_like.config import foreign_names, maxtext
from maxtext_like.config.document import Key, keys
from maxtext_like.config.problems import did_you_mean
from maxtext_like.errors import UserError


def run(argv: list[str]) -> int:
  """Lists the keys whose name, section or meaning matches ``argv[0]``, a regular expression; all without it."""
  if len(argv) > 1:
    raise UserError(f"--help-keys takes one pattern, not {len(argv)}: {' '.join(argv)}")
  pattern = argv[0] if argv else ""
  try:
    matches = re.compile(pattern, re.IGNORECASE).search
  except re.error as error:
    raise UserError(f"--help-keys {pattern!r}: not a regular expression: {error}") from error
  found = [k for k in keys() if matches(f"{k.section}.{k.name}") or matches(k.meaning)]
  renamed = {theirs: ours for theirs, ours in maxtext.RENAMED.items() if pattern and matches(theirs)}
  foreign = {theirs: said for theirs, said in foreign_names.NAMES.items() if pattern and re.fullmatch(pattern, theirs, re.I)}
  if not found and not renamed and not foreign and (said := foreign_names.find(pattern)) is not None:
    foreign = {pattern: said}
  if not found and not renamed and not foreign:
    raise UserError(f"--help-keys {pattern!r}: no such key{did_you_mean(pattern, [k.name for k in keys()])}")
  if sys.stdout.isatty():
    _print_table(found)
  else:
    for k in found:
      print(f"{k.section}.{k.name}  ({k.kind}; default {k.default})  {k.meaning}")
  for theirs, ours in renamed.items():
    print(f"{theirs}: MaxText's name of {ours}")
  for theirs, said in foreign.items():
    print(f"{theirs}: no key here: {said.says}\n  fix: {said.fix('VALUE')}")
  return 0


def _print_table(found: list[Key]) -> None:
  from rich.console import Console
  from rich.table import Table

  table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
  for column in ("key", "type", "default", "meaning"):
    table.add_column(column, overflow="fold", style="cyan" if column == "key" else None)
  section = ""
  for k in found:
    if k.section != section:
      table.add_row(f"[bold]{k.section}:[/]")
      section = k.section
    table.add_row(f"  {k.name}", k.kind.replace("[", "\\["), k.default.replace("[", "\\["), k.meaning.replace("[", "\\["))
  Console().print(table)
