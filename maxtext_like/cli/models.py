"""``maxtext-like models``: lists the model configurations with parameter counts, computed from shapes."""

import sys

from maxtext_like.cli.arguments import parse_words, require_none, verb_parser

DESCRIPTION = """Lists the model configurations. Parameters are counted from the shapes of the
layers; 'active' counts the parameters that one token uses, 'tokens' is max_target_length."""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  parser = verb_parser("models", "[-h] [--exact]", DESCRIPTION)
  parser.add_argument("--exact", action="store_true", help="whole numbers instead of billions")
  options, rest = parse_words(parser, argv)
  require_none(parser, rest)
  from maxtext_like import list_models

  number = (lambda n: f"{n:,}") if options.exact else _rounded
  rows = []
  for m in list_models():
    active = number(m.counts.active) if m.counts.active != m.counts.total else ""
    rows.append(
      (m.name, number(m.counts.total), active, str(m.config.model.num_decoder_layers), str(m.config.model.emb_dim),
       str(m.config.training.max_target_length), m.config.precision.dtype, m.about)
    )  # fmt: skip
  _print(rows)
  return 0


def _print(rows: list[tuple[str, ...]]) -> None:
  columns = ("model", "parameters", "active", "layers", "width", "tokens", "dtype", "description")
  if not sys.stdout.isatty():
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
      print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return
  from rich.console import Console
  from rich.table import Table

  table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
  for i, column in enumerate(columns):
    numeric = 1 <= i <= 5
    table.add_column(column, justify="right" if numeric else "left", no_wrap=i < 7, style="cyan" if i == 0 else None)
  for row in rows:
    table.add_row(*row)
  Console().print(table)


def _rounded(count: int) -> str:
  unit, size = ("B", 10**9) if count >= 10**9 else ("M", 10**6)
  return f"{count / size:.2f} {unit}"
