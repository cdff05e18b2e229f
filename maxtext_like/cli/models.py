"""``maxtext-like models``: the model configurations with their parameter counts, by shape arithmetic, without arrays."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxtext_like.config.files import configs_folder, model_names
from maxtext_like.config.load import load_config
from maxtext_like.config.model import ExpertsConfig, ModelConfig
from maxtext_like.config.precision_keys import PrecisionConfig
from maxtext_like.config.vision import VisionConfig


@dataclass(frozen=True)
class Counts:
  """Parameters of a model: all of them, and those that one token passes through (fewer where experts are routed)."""

  total: int
  active: int


def parameter_counts(model: ModelConfig, precision: PrecisionConfig, vision: VisionConfig | None = None) -> Counts:
  """Counts from the declared shapes; non-trainable ones (router bias, layer scalar) are buffers and not counted.

  ``vision`` with ``use_multimodal`` adds the tower and its projector.
  """
  from maxtext_like.layers.param import Param
  from maxtext_like.models.build import build_decoder, precision_of

  chosen = model.num_experts_per_tok / model.num_experts if isinstance(model, ExpertsConfig) and model.num_experts else 1

  def leaves(tree: Mapping, routed: bool) -> Iterator[tuple[Param, bool]]:
    for name, branch in tree.items():
      if isinstance(branch, Param):
        yield branch, routed
      else:
        yield from leaves(branch, routed or name == "experts")

  total = active = 0
  for param, routed in leaves(build_decoder(model, precision_of(precision), vision=vision).params(), routed=False):
    if not param.trainable:
      continue
    size = math.prod(param.shape)
    total += size
    active += round(size * chosen) if routed else size
  return Counts(total, active)


def run(argv: list[str]) -> int:
  """Prints the table."""
  parser = argparse.ArgumentParser(
    prog="maxtext-like models",
    description="Lists the model configurations. Parameters are counted from the shapes of the layers; 'active' are "
    "those that one token passes through.",
  )
  parser.add_argument("--exact", action="store_true", help="whole numbers instead of billions")
  exact = parser.parse_args(argv).exact
  rows = []
  for name in model_names():
    config = load_config(name).config
    model, counts = config.model, parameter_counts(config.model, config.precision, config.vision)
    number = (lambda n: f"{n:,}") if exact else _rounded
    active = number(counts.active) if counts.active != counts.total else ""
    rows.append(
      (name, number(counts.total), active, str(model.num_decoder_layers), str(model.emb_dim),
       str(config.training.max_target_length), config.precision.dtype, _first_comment(name))
    )  # fmt: skip
  _print(rows)
  return 0


def _print(rows: list[tuple[str, ...]]) -> None:
  columns = ("model", "parameters", "active", "layers", "width", "row", "dtype", "what it is")
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
  for unit, size in (("B", 10**9), ("M", 10**6)):
    if count >= size:
      return f"{count / size:.2f} {unit}"
  return str(count)


def _first_comment(name: str) -> str:
  first = (configs_folder() / "models" / f"{name}.yml").read_text("utf-8").partition("\n")[0]
  return first.removeprefix("# ") if first.startswith("# ") else ""
