"""``maxtext-like train --help-keys [PATTERN]``: lists configuration keys with type, default and description."""

import sys
from typing import TYPE_CHECKING

from maxtext_like import list_keys
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.config.document import Key


def run(argv: list[str]) -> int:
  """List the keys whose name, section or description matches the regular expression ``argv[0]``, or all keys."""
  if len(argv) > 1:
    raise UserError(
      f"--help-keys takes one pattern, not {len(argv)}: {' '.join(argv)}\n  fix: put quotes around a pattern with spaces"
    )
  found = list_keys(*argv)
  if sys.stdout.isatty():
    _print_table(found.keys)
    lines = found.elsewhere
  else:
    lines = [str(found)]
  for line in lines:
    print(line)
  return 0


def _print_table(found: "tuple[Key, ...]") -> None:
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
