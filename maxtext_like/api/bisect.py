"""The smallest set of precision keys that mends a step, with what each of them does and costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import line_taker, place_or_url, require_number, words
from maxtext_like.api.configuration import load_config
from maxtext_like.config import hub
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.analysis.distance import Distance
  from maxtext_like.analysis.key_bisection import Bisection, Result
  from maxtext_like.api.arguments import Saved
  from maxtext_like.api.configuration import Configuration
  from maxtext_like.config.load import Loaded
  from maxtext_like.storage import Place
  from maxtext_like.training.loop.progress import Shown

COST_REPEATS = 10
ROWS, LENGTH = 2, 128  # of the batch, where a Hugging Face checkpoint is all that is named
SHOWN = 3  # arrays that are named for a key


@dataclass(frozen=True)
class Bisected:
  """What a search found. As text: errors, the keys as YAML, and a table of what each mends and costs.

  Attributes:
    result: the keys, and errors before and after.
    text: of it.
  """

  result: "Result"
  text: str

  def __str__(self) -> str:
    return self.text

  @property
  def hopeless(self) -> bool:
    """Nothing mends it."""
    return self.result.outcome == "hopeless"


def bisect(
  config: "Configuration | None" = None,
  *overrides: str,
  checkpoint: "str | Path | Saved | None" = None,
  tolerance: float | None = None,
  progress: "Shown" = None,
  **keys: Any,
) -> Bisected:
  """Compares one training step with the same step in float32: same weights, same batch.

  If it is not finite, or further away than the tolerance, searches the smallest set of precision keys that mends it, first
  in the whole model, then layer by layer.

  Args:
    config: a name, a path, or what ``load_config`` returned; None: a Hugging Face checkpoint's own, on random tokens.
    overrides: words laid over it, as ``"dtype=float16"``.
    checkpoint: weights to look at: a run, one of its checkpoints, or Hugging Face's, also by URL; None: those that a run would
      start with.
    tolerance: largest relative error of loss, gradients (of each array too) and update; None: chosen for model and dtype.
    progress: where lines go, as in ``train``: notes on the configuration, and one for each measurement.
    keys: values laid over it.

  Raises:
    UserError: configuration, data or checkpoint are not usable.
    DoesNotFitError: the float32 step does not fit the memory.
    NonFiniteError: the float32 step is not finite.
  """
  given, say = words(overrides, keys, bisect), line_taker(progress)
  if tolerance is not None:
    require_number(bisect, "tolerance", tolerance)
  if tolerance is not None and not 0 < tolerance < float("inf"):
    raise UserError(f"tolerance {tolerance:g}: not a relative error above 0\n  fix: as in 0.5")
  place = None
  if checkpoint is not None:
    place = place_or_url(checkpoint, "checkpoint")
    if isinstance(place, Path) and not place.is_dir():
      raise UserError(f"checkpoint {place}: not a directory{hub.advice(str(place))}")
  loaded = _configuration_of(place, given) if config is None else load_config(config, *given)
  for note in loaded.notes:
    say("note: " + note.replace("\n", "\n  "))
  search = _prepare(loaded, place, tolerance, say)
  result = search.run(cost_repeats=COST_REPEATS)
  if result.outcome == "mended":
    _require_loadable(loaded, result)
  return Bisected(result, _report(loaded, search, result))


def _configuration_of(checkpoint: "Path | Place | None", overrides: Sequence[str]) -> "Loaded":
  """The configuration of a Hugging Face checkpoint on random tokens; the words may say else.

  Raises:
    UserError: there is none in the directory.
  """
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
  from maxtext_like.checkpoint.weight_sources import hugging_face_here, is_hugging_face

  if checkpoint is None or not is_hugging_face(checkpoint):
    besides = f": {checkpoint} has no config.json" if checkpoint else ""
    raise UserError(f"bisect needs a configuration{besides}\n  fix: name a model, as gemma4-tiny, or a Hugging Face checkpoint")
  own = [f"per_device_batch_size={ROWS}", "dataset=synthetic"]
  return load_checkpoint_config(hugging_face_here(checkpoint), [*own, *overrides], length=LENGTH)[1]


def _prepare(
  loaded: "Loaded", checkpoint: "Path | Place | None", tolerance: float | None, say: Callable[[str], None]
) -> "Bisection":
  """The search over a configuration's first batch, on fresh weights or those of a checkpoint.

  Raises:
    UserError: configuration, data or checkpoint are not usable.
    DoesNotFitError: the float32 step does not fit the memory.
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

  if (place := launchers.place()) is not None:
    raise UserError(
      f"bisect compares programs in one process, and {place.launcher} started several\n"
      "  fix: run it on one host, outside of the launcher; num_decoder_layers=... makes a model that fits it"
    )
  config = loaded.config
  # A stored dtype is no obstacle: everything is compared in float32.
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
  """What is printed has to load, as the very configuration that was measured."""
  from maxtext_like.analysis import precision_overrides

  again = load_config(loaded, *precision_overrides.words(loaded.config, result.config)).config
  if (again.precision, again.training) != (result.config.precision, result.config.training):
    raise RuntimeError("the keys that were found do not load as the configuration that was measured")


def _report(loaded: "Loaded", search: "Bisection", result: "Result") -> str:
  """What was found, for people."""
  from maxtext_like.analysis import precision_overrides
  from maxtext_like.analysis.key_bisection import summary

  model, precision = loaded.config.model.model_name, loaded.config.precision
  lines = [f"{model} in {precision.dtype}: {_distance(result.before)}"]
  within = f"within the tolerance of {_tolerance(search)}"
  if result.outcome == "fine":
    return "\n".join([*lines, f"nothing to mend: {within}"])
  if result.outcome == "hopeless":
    nearest = f"nearest, with {summary(result.remedies)}: {_distance(result.after)}" if result.remedies else "as it is: nearest"
    return "\n".join([*lines, f"no precision key brings it {within}; {result.steps} configurations were measured", nearest])
  lines += [f"mended: {_distance(result.after)}; {result.steps} configurations were measured", ""]
  lines += [precision_overrides.yaml(loaded.config, result.config), "", _table(result)]
  return "\n".join(lines)


def _tolerance(search: "Bisection") -> str:
  """One number where all parts have the same; else by part, and where those come from."""
  if len(set(search.limits.values())) == 1:
    return f"{search.limits['loss']:g}"
  text = ", ".join(f"{part} {limit:.2g}" for part, limit in search.limits.items())
  return f"{text} (what {search.config.precision.dtype} makes of this model with every other key at its safer value, doubled)"


def _table(result: "Result") -> str:
  from maxtext_like.analysis.key_bisection import error_text, summary

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
  from maxtext_like.analysis.key_bisection import error_text

  parts = [("loss", d.loss), ("gradients", d.gradient), ("worst array", d.array), ("update", d.update)]
  text = ", ".join(f"{name} {error_text(error)}" for name, error in parts)
  return f"errors against float32: {text}" + ("" if d.loss_scale is None else f" (loss scale {d.loss_scale:g})")
