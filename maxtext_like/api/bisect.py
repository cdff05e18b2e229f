"""``bisect``: finds the smallest set of precision keys that repairs a step, with the effect and cost of each key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import line_taker, place_or_url, require_number, words
from maxtext_like.api.config import load_config
from maxtext_like.config import hub
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.analysis.distance import Distance
  from maxtext_like.analysis.key_bisection import Bisection, Result
  from maxtext_like.api.arguments import Saved
  from maxtext_like.api.config import Configuration
  from maxtext_like.config.load import Loaded
  from maxtext_like.storage import Place
  from maxtext_like.training.loop.progress import Shown

COST_REPEATS = 10
ROWS, LENGTH = 2, 128  # batch for a Hugging Face checkpoint without a configuration
SHOWN = 3  # maximum number of arrays listed for a key


@dataclass(frozen=True)
class Bisected:
  """Result of a search. As text: errors, the keys as YAML, and a table with the effect and cost of each key.

  Attributes:
    result: the keys, and errors before and after.
    text: the printed report.
  """

  result: "Result"
  text: str

  def __str__(self) -> str:
    return self.text

  @property
  def no_fix_found(self) -> bool:
    """True if no set of precision keys repairs the step."""
    return self.result.outcome == "hopeless"


def bisect(
  config: "Configuration | None" = None,
  *overrides: str,
  checkpoint: "str | Path | Saved | None" = None,
  tolerance: float | None = None,
  progress: "Shown" = None,
  **keys: Any,
) -> Bisected:
  """Compare one training step with the same step in float32 (same weights, same batch).

  If the step is not finite, or its error exceeds the tolerance, search for the smallest set of precision keys that repairs it,
  first for the model as a whole, then for single layers.

  Args:
    config: a configuration, as for ``load_config``; None: that of a Hugging Face checkpoint, on random tokens.
    overrides: words that override the configuration, such as ``"dtype=float16"``.
    checkpoint: weights to use: a run, one of its checkpoints, a Hugging Face checkpoint, or a URL; None: the weights that a run
      starts with.
    tolerance: maximum relative error of loss, gradients (also of each array) and update; None: chosen by model and dtype.
    progress: target of printed lines, as in ``train``: notes on the configuration, and a line for each measurement.
    keys: the same as Python values.

  Raises:
    UserError: the configuration, the data or the checkpoint is invalid.
    DoesNotFitError: not enough memory for the float32 step.
    NonFiniteError: the float32 step is not finite.
  """
  given, say = words(overrides, keys, bisect), line_taker(progress)
  if tolerance is not None:
    require_number(bisect, "tolerance", tolerance)
  if tolerance is not None and not 0 < tolerance < float("inf"):
    raise UserError(f"tolerance {tolerance:g}: not a relative error above 0", fix="pass a positive number, such as 0.5")
  place = None
  if checkpoint is not None:
    place = place_or_url(checkpoint, "checkpoint")
    if isinstance(place, Path) and not place.is_dir():
      raise UserError(
        f"checkpoint {place}: not a directory{hub.advice(str(place))}",
        fix=hub.fix(str(place)),
      )
  loaded = _configuration_of(place, given) if config is None else load_config(config, *given)
  for note in loaded.notes:
    say("note: " + note.replace("\n", "\n  "))
  search = _prepare(loaded, place, tolerance, say)
  result = search.run(cost_repeats=COST_REPEATS)
  if result.outcome == "mended":
    _require_loadable(loaded, result)
  return Bisected(result, _report(loaded, search, result))


def _configuration_of(checkpoint: "Path | Place | None", overrides: Sequence[str]) -> "Loaded":
  """Return the configuration of a Hugging Face checkpoint on random tokens, with overrides.

  Raises:
    UserError: the directory has no config.json.
  """
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
  from maxtext_like.checkpoint.weight_sources import is_hugging_face, local_hugging_face

  if checkpoint is None or not is_hugging_face(checkpoint):
    besides = f": {checkpoint} has no config.json" if checkpoint else ""
    raise UserError(
      f"bisect needs a configuration{besides}\n  fix: name a model, such as gemma4-tiny, or a Hugging Face checkpoint"
    )
  own = [f"per_device_batch_size={ROWS}", "dataset=synthetic"]
  return load_checkpoint_config(local_hugging_face(checkpoint), [*own, *overrides], length=LENGTH)[1]


def _prepare(
  loaded: "Loaded", checkpoint: "Path | Place | None", tolerance: float | None, say: Callable[[str], None]
) -> "Bisection":
  """Return the search for the first batch of a configuration, with new weights or those of a checkpoint.

  Raises:
    UserError: the configuration, the data or the checkpoint is invalid.
    DoesNotFitError: not enough memory for the float32 step.
    NonFiniteError: the float32 step is not finite.
  """
  import dataclasses

  import numpy as np

  from maxtext_like.analysis import precision_overrides
  from maxtext_like.analysis.distance import Steps
  from maxtext_like.analysis.key_bisection import Bisection
  from maxtext_like.capacity import memory
  from maxtext_like.checkpoint.adapters.adapter_step import holds_adapter_alone
  from maxtext_like.checkpoint.read_weights import read_weights
  from maxtext_like.checkpoint.store import manifest
  from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face, located, readable_step
  from maxtext_like.sharding import launchers
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.training.run.batches import first_batch
  from maxtext_like.training.step.initial_state import trained_params, with_given_adapter

  if (place := launchers.position()) is not None:
    raise UserError(
      f"bisect runs in one process, but {place.launcher} started several\n"
      "  fix: run it on one host without the launcher; num_decoder_layers=... makes the model small enough"
    )
  config = loaded.config
  # Any stored dtype is accepted, because everything is compared in float32.
  source = checkpoint or (config.checkpoint.init_from and located(config.checkpoint.init_from))
  stored = {"allow_dtype_change": True, "resume": False, "init_from": str(source) if source else None}
  config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **stored))
  use_compilation_cache(config.logging.compilation_cache_dir)
  steps = Steps()
  program = steps.program(precision_overrides.reference(config))
  memory.require_fit(program)
  program, batch = first_batch(program, config.checkpoint, located(config.logging.output_dir))
  seed = np.uint32(config.training.seed % 2**32)
  step = None if checkpoint is None or is_hugging_face(checkpoint) else find_step(checkpoint)
  if program.adapter is not None and step is not None and holds_adapter_alone(stored := manifest.read(step)):
    return Bisection(config, trained_params(program, readable_step(step), stored), batch, tolerance, steps, say)
  params: Any = read_weights(source, program.model) if source else program.model.lower_init().compile()(seed)
  if program.adapter is not None:
    params = with_given_adapter(program, program.lower_around().compile()(params, seed))["params"]
  return Bisection(config, params, batch, tolerance, steps, say)


def _require_loadable(loaded: "Loaded", result: "Result") -> None:
  """Check that the printed keys load as the configuration that was measured."""
  from maxtext_like.analysis import precision_overrides

  again = load_config(loaded, *precision_overrides.words(loaded.config, result.config)).config
  if (again.precision, again.training) != (result.config.precision, result.config.training):
    raise RuntimeError("the keys that were found do not load as the configuration that was measured")


def _report(loaded: "Loaded", search: "Bisection", result: "Result") -> str:
  """Return the printed report."""
  from maxtext_like.analysis import precision_overrides
  from maxtext_like.analysis.key_bisection import summary

  model, precision = loaded.config.model.model_name, loaded.config.precision
  lines = [f"{model} in {precision.dtype}: {_distance(result.before)}"]
  within = f"within the tolerance of {_tolerance(search)}"
  if result.outcome == "fine":
    return "\n".join([*lines, f"nothing to repair: {within}"])
  if result.outcome == "hopeless":
    nearest = (
      f"smallest error, with {summary(result.remedies)}: {_distance(result.after)}"
      if result.remedies
      else "no key reduces the error"
    )
    return "\n".join([*lines, f"no precision key brings it {within}; {result.steps} configurations were measured", nearest])
  lines += [f"repaired: {_distance(result.after)}; {result.steps} configurations were measured", ""]
  lines += [precision_overrides.yaml(loaded.config, result.config), "", _table(result)]
  return "\n".join(lines)


def _tolerance(search: "Bisection") -> str:
  """Return the tolerance as text: one number, or one per part with their origin."""
  if len(set(search.limits.values())) == 1:
    return f"{search.limits['loss']:g}"
  text = ", ".join(f"{part} {limit:.2g}" for part, limit in search.limits.items())
  return f"{text} (twice the error of {search.config.precision.dtype} with every other key at its safer value)"


def _table(result: "Result") -> str:
  from maxtext_like.analysis.key_bisection import error_text, summary

  rows = [("key", "without it", "with it", "step time", "repairs")]
  for f in result.findings:
    name = summary([r for r in result.remedies if r.key == f.key])
    arrays = f": {', '.join(f.arrays[:SHOWN])}" + (f" and {len(f.arrays) - SHOWN} more" if len(f.arrays) > SHOWN else "")
    mends = ", ".join(f.mends) + (arrays if f.arrays else "")
    cost = "" if f.cost is None else f"x {f.cost:.2f}"
    rows.append((name, error_text(f.before.worst), error_text(f.after.worst), cost, mends))
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return "\n".join("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _distance(d: "Distance") -> str:
  from maxtext_like.analysis.key_bisection import error_text

  parts = [("loss", d.loss), ("gradients", d.gradient), ("worst array", d.array), ("update", d.update)]
  text = ", ".join(f"{name} {error_text(error)}" for name, error in parts)
  return f"errors against float32: {text}" + ("" if d.loss_scale is None else f" (loss scale {d.loss_scale:g})")
