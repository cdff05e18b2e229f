"""``xray`` and ``xray_step``: measure every tensor of a JAX function or training step, and find the first cause of a NaN."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, place_or_url, words
from maxtext_like.api.config import load_config
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.api.config import Configuration
  from maxtext_like.config.schema import Config
  from maxtext_like.numerics.xray_report import Report

SHOWN = 20


@dataclass(frozen=True)
class StepReport:
  """Measurements of a training step. As text: a table of its tensors.

  Attributes:
    config: configuration of the step.
    title: title with model and step.
    report: statistics of every tensor by its name in the model, and the first cause of a non-finite number.
    place: default directory of ``write``.
    ended: for ``replay``, one line on how the step ended its run; otherwise "".
  """

  config: "Config"
  title: str
  report: "Report"
  place: Path
  ended: str = ""

  def __str__(self) -> str:
    return f"{self.title}\n{self.report.table(SHOWN)}"

  @property
  def finite(self) -> bool:
    """True if loss, gradients and the next state are finite."""
    return self.report.finite

  @property
  def cause(self) -> str | None:
    """Origin of the first non-finite number, and precision keys that may repair it; None if all numbers are finite."""
    from maxtext_like.analysis.step_xray import cause_lines

    return None if self.finite else cause_lines(self.config, self.report)

  def write(self, directory: str | Path | None = None) -> Path:
    """Write xray.json and xray.html, and return the path of xray.html. With several processes, only the first one writes.

    Raises:
      UserError: the directory cannot be written.
    """
    from maxtext_like.analysis.failed_step import write
    from maxtext_like.sharding import processes

    out = self.place if directory is None else Path(directory).expanduser()
    try:
      if processes.primary():
        write(self.report, out, self.title)
    except OSError as error:
      raise UserError(f"{out}: cannot be written: {error.strerror or error}\n  fix: choose another directory") from error
    return out / "xray.html"


def xray(function: Callable[..., Any], *args: Any, **keywords: Any) -> "Report":
  """Run a JAX function once, with statistics of every tensor and the first cause of a non-finite number.

  To include gradients, pass a function that computes them: ``xray(jax.value_and_grad(loss), params)``. For options, and for
  many calls of one program, see ``maxtext_like.numerics.xray.xray``.

  Args:
    function: a function, a Flax NNX module or method (its state is not changed), or the ``apply`` of a Linen module.
    args: its arguments: arrays, trees of arrays, NNX modules, and static values.
    keywords: its keyword arguments.

  Returns:
    An object with ``finite``, ``first_cause``, ``tensors``, ``outputs``, ``table()`` and ``html()``.

  Raises:
    UserError: the argument is not callable, or it changes an NNX module that is not one of its arguments.
  """
  from flax import linen
  from flax.errors import TraceContextError

  from maxtext_like.numerics.xray import xray as wrapped

  if isinstance(function, linen.Module) and function.scope is None:
    raise UserError(
      f"xray: {type(function).__name__} is a Linen module, which does not contain its variables\n"
      "  fix: xray(module.apply, variables, x)"
    )
  if not callable(function):
    raise UserError(f"xray: {type(function).__name__} is not a function\n  fix: write xray(f, x) instead of xray(f(x))")
  try:
    return wrapped(function)(*args, **keywords)
  except TraceContextError as error:
    raise UserError(
      f"xray: the function changes a module that is not an argument ({str(error).split(' (')[0]})\n"
      "  fix: pass it as an argument: xray(lambda model, x: ..., model, x)"
    ) from error


def xray_step(
  config: "Configuration",
  *overrides: str,
  checkpoint: str | Path | Saved | None = None,
  everything: bool = False,
  **keys: Any,
) -> StepReport:
  """Run one training step on the first batch of the data, and measure its tensors. The model is not trained.

  Args:
    config: a configuration, as for ``load_config``.
    overrides: words that override the configuration.
    checkpoint: a run or one of its checkpoints (with optimizer state), a Hugging Face checkpoint, its name in the local cache,
      or a URL; None: the state that a run starts with.
    everything: measure every tensor instead of the most important ones; compilation takes much longer.
    keys: the same as Python values.

  Raises:
    UserError: the configuration, the data or the checkpoint is invalid.
    DoesNotFitError: not enough memory.
  """
  from maxtext_like.analysis.step_xray import xray_step as look
  from maxtext_like.capacity import memory
  from maxtext_like.checkpoint.weight_sources import require_source
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.training.run.batches import first_batch
  from maxtext_like.training.run.preflight import run_directory
  from maxtext_like.training.run.process_group import join
  from maxtext_like.training.step.initial_state import whole_state
  from maxtext_like.training.step.program import make_program

  loaded = load_config(config, *words(overrides, keys, xray_step))
  c = loaded.config
  place = None if checkpoint is None else place_or_url(checkpoint, "checkpoint")
  if place is not None:
    require_source(place, "checkpoint")
  source, directory = c.checkpoint, run_directory(c)
  if place is not None:  # use the tokenizer of the checkpoint, not that of an existing run of this name
    source = dataclasses.replace(source, init_from=str(place), resume=False)
  name = directory.path.name
  beside = directory.path.parent if isinstance(directory.home, Path) else Path("runs")
  with join(loaded):
    use_compilation_cache(c.logging.compilation_cache_dir)
    program = make_program(c)
    memory.require_fit(program)
    program, batch = first_batch(program, source, directory.checkpoints)
    state = whole_state(program, place)
    report = look(program, state, batch, everything=everything)
    title = f"x-ray of {name}, step {int(state['step']) + 1}"
  return StepReport(c, title, report, beside / f"{name}-xray")
