"""``replay``: repeats the step that ended a run, with statistics of every tensor."""

from pathlib import Path
from typing import Any

from maxtext_like.api.arguments import Saved, place_or_url, words
from maxtext_like.api.config import load_config
from maxtext_like.api.xray import StepReport
from maxtext_like.errors import UserError


def replay(run: str | Path | Saved, *overrides: str, everything: bool = False, **keys: Any) -> StepReport:
  """Repeat the step that ended a run, from the state and the batch that the run saved, on the devices of this machine.

  For a step that needs several hosts, a launcher starts the same call in several processes.

  Args:
    run: directory or URL of the run.
    overrides: words laid over its configuration: ``"dtype=float32"`` shows whether the step is finite there.
    everything: measure every tensor instead of the most important ones; compilation takes much longer.
    keys: the same as Python values.

  Raises:
    UserError: there is no such run, or no step ended it.
    RetryableError: a store does not answer.
    DoesNotFitError: not enough memory.
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
      f"{place}: is not a run directory, because it has no config.yml\n"
      "  fix: name a run that ended with a failed step, such as runs/NAME"
    )
  loaded, kept = load_config(str(place / "config.yml"), *given), failed_step.find(place)
  with join(loaded):
    use_compilation_cache(loaded.config.logging.compilation_cache_dir)
    mesh = make_mesh(loaded.config.mesh)
    program = make_program(failed_step.fitted(loaded.config, kept, mesh), mesh=mesh)
    report = look(program, read_state(kept.state, program), program.place(kept.batch), everything=everything)
  changed = f" with {' '.join(given)}" if given else ""
  title = f"x-ray of step {kept.step} of {place.name}{changed}, {mesh.size} x {mesh.devices.flat[0].platform}"
  cause = kept.error.splitlines()[0].removeprefix(f"step {kept.step}: ")
  ended = f"step {kept.step} of {place} ended the run: {cause}"
  beside = place / failed_step.DIRECTORY / "replay" if isinstance(place, Path) else Path("runs") / f"{place.name}-replay"
  return StepReport(program.config, title, report, beside, ended)
