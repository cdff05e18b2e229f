"""Looks through JAX functions and training steps from Python: ranges of every tensor, and the first cause of a NaN."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, place_or_url, words
from maxtext_like.api.configuration import load_config
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.api.configuration import Configuration
  from maxtext_like.config.schema import Config
  from maxtext_like.numerics.xray_report import Report

SHOWN = 20


@dataclass(frozen=True)
class StepReport:
  """A training step, looked through. As text: the table of its tensors.

  Attributes:
    config: of the step.
    title: which step, of what.
    report: every tensor, in the model's names, and the first cause of a number that is not finite.
    place: where ``write`` puts it unless it is told otherwise.
    ended: what the step did to its run, in a line; empty where it is of none.
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
    """Every number of loss, gradients and next state is."""
    return self.report.finite

  @property
  def cause(self) -> str | None:
    """Where the first number that is not finite comes from, and the precision keys against it; None: all are finite."""
    from maxtext_like.analysis.step_xray import cause_lines

    return None if self.finite else cause_lines(self.config, self.report)

  def write(self, directory: str | Path | None = None) -> Path:
    """Writes xray.json and xray.html; returns the latter's path. Of several processes the first one alone does.

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
      raise UserError(f"{out}: cannot be written: {error.strerror or error}; choose another directory") from error
    return out / "xray.html"


def xray(function: Callable[..., Any], *args: Any, **keywords: Any) -> "Report":
  """One run of any JAX function, with statistics of every tensor and the first cause of a number that is not finite.

  Gradients are looked through in a function that takes them: ``xray(jax.value_and_grad(loss), params)``. For options, and for
  many calls of one program, see ``maxtext_like.numerics.xray.xray``.

  Args:
    function: also a module of Flax NNX or a method of one, which stays as it was, or the ``apply`` of a Linen module.
    args: of it: arrays, trees of them, modules of NNX, and what the function branches on.
    keywords: the same.

  Returns:
    ``finite``, ``first_cause``, ``tensors``, ``outputs``, ``table()`` and ``html()``.

  Raises:
    UserError: no function, or one that changes a module of NNX which it was not given as an argument.
  """
  from flax import linen
  from flax.errors import TraceContextError

  from maxtext_like.numerics.xray import xray as wrapped

  if isinstance(function, linen.Module) and function.scope is None:
    raise UserError(
      f"xray: {type(function).__name__} is a Linen module, whose variables are outside of it\n"
      "  fix: xray(module.apply, variables, x)"
    )
  if not callable(function):
    raise UserError(f"xray: {type(function).__name__} is no function\n  fix: xray(f, x) instead of xray(f(x))")
  try:
    return wrapped(function)(*args, **keywords)
  except TraceContextError as error:
    raise UserError(
      f"xray: the function changes a module that it was not given ({str(error).split(' (')[0]})\n"
      "  fix: give it as an argument: xray(lambda model, x: ..., model, x)"
    ) from error


def xray_step(
  config: "Configuration",
  *overrides: str,
  checkpoint: str | Path | Saved | None = None,
  everything: bool = False,
  **keys: Any,
) -> StepReport:
  """One training step of a configuration on the first batch of its data, looked through. Nothing is trained.

  Args:
    config: a name, a path, or what ``load_config`` returned.
    overrides: words laid over it.
    checkpoint: a run or one of its checkpoints (whole state), or a Hugging Face one, its name in this
      machine's cache or a URL; None: what a run would start with.
    everything: measure every tensor, not only the key ones: compiles far longer.
    keys: values laid over it.

  Raises:
    UserError: configuration, data or checkpoint cannot be used.
    DoesNotFitError: the memory does not suffice.
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
  if place is not None:  # its tokenizer too, not that of a run that happens to have this name
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


def replay(run: str | Path | Saved, *overrides: str, everything: bool = False, **keys: Any) -> StepReport:
  """The step that ended a run, looked through again, from the state and the batch that the run kept, on this machine's devices.

  A step that takes more than one host's memory is looked at by as many processes as a launcher starts with the same call.

  Args:
    run: its directory, or its URL.
    overrides: words laid over its configuration: ``"dtype=float32"`` shows whether the step is finite there.
    everything: measure every tensor, not only the key ones: compiles far longer.
    keys: values laid over it.

  Raises:
    UserError: no run, or none that a step ended.
    RetryableError: a store does not answer.
    DoesNotFitError: the memory does not suffice.
  """
  from maxtext_like.analysis import failed_step
  from maxtext_like.analysis.step_xray import xray_step as look
  from maxtext_like.checkpoint.weight_sources import is_there
  from maxtext_like.sharding.compilation_cache import use_compilation_cache
  from maxtext_like.sharding.mesh import make_mesh
  from maxtext_like.training.run.process_group import join
  from maxtext_like.training.step.initial_state import read_state
  from maxtext_like.training.step.program import make_program

  given, place = words(overrides, keys, replay), place_or_url(run, "run")
  if not is_there(place / "config.yml"):
    raise UserError(
      f"{place}: is no run directory, it holds no config.yml\n  fix: name that of a run that a step ended, as runs/NAME"
    )
  loaded, kept = load_config(str(place / "config.yml"), *given), failed_step.find(place)
  with join(loaded):
    use_compilation_cache(loaded.config.logging.compilation_cache_dir)
    mesh = make_mesh(loaded.config.mesh)
    program = make_program(failed_step.fitted(loaded.config, kept, mesh), mesh=mesh)
    report = look(program, read_state(kept.state, program), program.place(kept.batch), everything=everything)
  changed = f" with {' '.join(given)}" if given else ""
  title = f"x-ray of step {kept.step} of {place.name}{changed}, {mesh.size} x {mesh.devices.flat[0].platform}"
  ended = f"step {kept.step} of {place} ended it: {kept.error.splitlines()[0]}"
  beside = place / failed_step.DIRECTORY / "replay" if isinstance(place, Path) else Path("runs") / f"{place.name}-replay"
  return StepReport(program.config, title, report, beside, ended)
