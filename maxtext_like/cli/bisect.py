"""``maxtext-like bisect``: the smallest set of precision keys that mends a step, with what each of them does and costs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.cli.arguments import names_model, parse_words, print_notes
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.errors import NonFiniteError, UserError

if TYPE_CHECKING:
  from maxtext_like.analysis.bisect import Bisection, Result
  from maxtext_like.analysis.distance import Distance
  from maxtext_like.config.load import Loaded

COST_REPEATS = 10
ROWS, LENGTH = 2, 128  # of the batch, where a Hugging Face checkpoint is all that is named
SHOWN = 3  # arrays that are named for a key

DESCRIPTION = """One training step of a configuration is compared with the same step in float32: same weights, same batch. If it
is not finite, or further away than the tolerance, the smallest set of precision keys that mends it is searched for, first
in the whole model, then layer by layer, and printed as YAML."""
EPILOG = """examples:
  maxtext-like bisect gemma4-tiny dtype=float16 float32_gate_product=false
  maxtext-like bisect --checkpoint gemma-3-4b-pt dtype=float16
  maxtext-like bisect gemma4-31b --checkpoint runs/mine gpu/h200.yml max_target_length=512 --tolerance 0.05

exit codes: 0 fine as it is, or mended; 2 wrong usage; 3 nothing mends it, or float32 is not finite either; 4 does not fit"""


def run(argv: list[str]) -> int:
  """Searches and prints; see ``DESCRIPTION``."""
  options, words = _parse(argv)
  checkpoint = options.checkpoint and Path(options.checkpoint).expanduser()
  if checkpoint and not checkpoint.is_dir():
    raise UserError(f"--checkpoint {options.checkpoint}: not a directory")
  load = _loader(options.config, checkpoint)
  loaded = load(words)
  print_notes(loaded.notes)
  search = prepare(loaded, checkpoint, options.tolerance)
  result = search.run(cost_repeats=COST_REPEATS)
  if result.outcome == "mended":
    _check(load, words, loaded, result)
  print(report(loaded, search, result))
  return NonFiniteError.exit_code if result.outcome == "hopeless" else 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  parser = argparse.ArgumentParser(
    prog="maxtext-like bisect",
    usage="maxtext-like bisect [CONFIG] [--checkpoint DIR] [--tolerance X] [overlay.yml ...] [key=value ...]",
    description=DESCRIPTION,
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  model = "a model's name, as gemma4-tiny, or the path of a .yml file; not needed with a Hugging Face checkpoint"
  parser.add_argument("config", metavar="CONFIG", nargs="?", help=model)
  parser.add_argument(
    "--checkpoint",
    type=checkpoint_path,
    metavar="DIR",
    help="weights to look at: a run, one of its checkpoints, or Hugging Face's",
  )
  what = "largest relative error of loss, gradients (of each array too) and update (from 0.5 to 2, chosen for model and dtype)"
  parser.add_argument("--tolerance", metavar="X", type=float, help=what)
  options, words = parse_words(parser, argv, {})
  if options.config is not None and "=" in options.config:
    options.config, words = None, [options.config, *words]
  elif options.config is None and words and "=" not in words[0] and not words[0].startswith("-"):
    options.config, words = words[0], words[1:]  # behind an option, where Python 3.11's argparse overlooks it
  if options.config is None and options.checkpoint is None and names_model(words):
    options.config = "base.yml"
  if options.tolerance is not None and not 0 < options.tolerance < float("inf"):
    raise UserError(f"--tolerance {options.tolerance:g}: not a relative error above 0\n  fix: as in --tolerance 0.5")
  return options, words


def _loader(name: str | None, checkpoint: Path | None) -> Callable[[list[str]], "Loaded"]:
  """The configuration for some words: of a name, or of a Hugging Face checkpoint on random tokens (words may say else)."""
  from maxtext_like.config.load import load_config

  if name is not None:
    return lambda words: load_config(name, words)
  if checkpoint is None or not (checkpoint / "config.json").is_file():
    besides = f": {checkpoint} has no config.json" if checkpoint else ""
    raise UserError(f"maxtext-like bisect needs CONFIG{besides}\n  fix: see maxtext-like bisect --help")
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config

  own = [f"per_device_batch_size={ROWS}", "dataset=synthetic"]
  return lambda words: load_checkpoint_config(checkpoint, [*own, *words], length=LENGTH)[1]


def prepare(loaded: "Loaded", checkpoint: Path | None, tolerance: float | None) -> "Bisection":
  """The search over a configuration's first batch, on fresh weights or those of a checkpoint.

  Raises:
    UserError: configuration, data or checkpoint are not usable.
    DoesNotFitError: the float32 step does not fit the memory.
    NonFiniteError: the float32 step is not finite.
  """
  import dataclasses

  import numpy as np

  from maxtext_like.analysis import remedies
  from maxtext_like.analysis.bisect import Bisection
  from maxtext_like.analysis.distance import Steps
  from maxtext_like.checkpoint.read_weights import read_weights
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.training import memory
  from maxtext_like.training.batches import first_batch

  config = loaded.config
  # A stored dtype is no obstacle: everything is compared in float32.
  source = checkpoint or (config.checkpoint.init_from and Path(config.checkpoint.init_from))
  stored = {"allow_dtype_change": True, "resume": False, "init_from": str(source) if source else None}
  config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **stored))
  use_compilation_cache(config.logging.compilation_cache_dir)
  steps = Steps()
  program = steps.program(remedies.reference(config))
  memory.require_fit(program)
  batch = first_batch(program, config.checkpoint, Path(config.logging.output_dir))
  if source:
    params: Any = read_weights(source, program.model)
  else:
    params = program.model.lower_init().compile()(np.uint32(config.training.seed % 2**32))
  return Bisection(config, params, batch, tolerance, steps, lambda line: print(line, flush=True))


def _check(load: Callable[[list[str]], "Loaded"], words: list[str], loaded: "Loaded", result: "Result") -> None:
  """What is printed has to load, as the very configuration that was measured."""
  from maxtext_like.analysis import remedies

  again = load([*words, *remedies.words(loaded.config, result.config)]).config
  if (again.precision, again.training) != (result.config.precision, result.config.training):
    raise RuntimeError("the keys that were found do not load as the configuration that was measured")


def report(loaded: "Loaded", search: "Bisection", result: "Result") -> str:
  """What was found, for people."""
  from maxtext_like.analysis import remedies
  from maxtext_like.analysis.bisect import summary

  model, precision = loaded.config.model.model_name, loaded.config.precision
  lines = [f"{model} in {precision.dtype}: {_distance(result.before)}"]
  within = f"within the tolerance of {_tolerance(search)}"
  if result.outcome == "fine":
    return "\n".join([*lines, f"nothing to mend: {within}"])
  if result.outcome == "hopeless":
    nearest = f"nearest, with {summary(result.remedies)}: {_distance(result.after)}" if result.remedies else "as it is: nearest"
    return "\n".join([*lines, f"no precision key brings it {within}; {result.steps} configurations were measured", nearest])
  lines += [f"mended: {_distance(result.after)}; {result.steps} configurations were measured", ""]
  lines += [remedies.yaml(loaded.config, result.config), "", _table(result)]
  return "\n".join(lines)


def _tolerance(search: "Bisection") -> str:
  """One number where all parts have the same; else by part, and where those come from."""
  if len(set(search.limits.values())) == 1:
    return f"{search.limits['loss']:g}"
  text = ", ".join(f"{part} {limit:.2g}" for part, limit in search.limits.items())
  return f"{text} (what {search.config.precision.dtype} makes of this model with every other key at its safer value, doubled)"


def _table(result: "Result") -> str:
  from maxtext_like.analysis.bisect import error_text, summary

  rows = [("key", "without it", "with it", "step time", "mends")]
  for f in result.findings:
    name = summary([r for r in result.remedies if r.key == f.key])
    arrays = f": {', '.join(f.arrays[:SHOWN])}" + (f" and {len(f.arrays) - SHOWN} more" if len(f.arrays) > SHOWN else "")
    mends = ", ".join(f.mends) + (arrays if f.arrays else "")
    cost = "" if f.cost is None else f"x {f.cost:.2f}"
    rows.append((name, error_text(f.before.worst), error_text(f.after.worst), cost, mends))
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return "\n".join("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _distance(d: "Distance") -> str:
  from maxtext_like.analysis.bisect import error_text

  parts = [("loss", d.loss), ("gradients", d.gradient), ("worst array", d.array), ("update", d.update)]
  text = ", ".join(f"{name} {error_text(error)}" for name, error in parts)
  return f"errors against float32: {text}" + ("" if d.loss_scale is None else f" (loss scale {d.loss_scale:g})")
