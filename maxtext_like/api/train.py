"""``train``: trains a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, require_shown, words
from maxtext_like.api.config import load_config
from maxtext_like.local_copies import copy_file

if TYPE_CHECKING:
  from maxtext_like.api.config import Configuration
  from maxtext_like.api.pretrained import Pretrained
  from maxtext_like.storage import Place
  from maxtext_like.training.loop.progress import Shown


@dataclass(frozen=True)
class Run(Saved):
  """A finished run.

  Attributes:
    directory: directory with config.yml, metrics.jsonl, checkpoints/ and report.html; for a run in a store, the local files.
    outcome: result of the run in one line.
    url: URL of a run in a store; "" for a local run.
  """

  directory: Path
  outcome: str
  url: str = ""

  @property
  def place(self) -> str:
    return self.url or str(self.directory)

  @property
  def metrics(self) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, one for each step: "step", "loss", "grad_norm", ..."""
    from maxtext_like.training.sinks.metrics import METRICS, by_step, read

    return by_step(read(copy_file(f"{self.url}/{METRICS}") if self.url else self.directory / METRICS))

  @property
  def checkpoint(self) -> "Path | Place | None":
    """The newest complete checkpoint, or None."""
    from maxtext_like.checkpoint.weight_sources import find_step, located

    return find_step(located(self.place))

  @property
  def best(self) -> "Path | Place | None":
    """The checkpoint with the lowest eval_loss of a run with ``keep_best``, or None."""
    from maxtext_like.checkpoint.store.best_steps import NAME
    from maxtext_like.checkpoint.weight_sources import find_step, located

    return find_step(located(self.place) / "checkpoints" / NAME)

  def load(self, *overrides: str, **keys: Any) -> "Pretrained":
    """Load the trained model; see ``maxtext_like.load``."""
    from maxtext_like.api.pretrained import load

    return load(self.place, *overrides, **keys)


def train(config: "Configuration", *overrides: str, progress: "Shown" = None, **keys: Any) -> Run:
  """Train a model. If the run exists, the same call resumes it from the newest checkpoint, or finds it finished.

  The ``watchdog_*`` keys end a process that hangs. In the main thread, Ctrl-C stops after the current step, with a checkpoint.

  Args:
    config: a configuration, as for ``load_config``.
    overrides: words that override the configuration, such as ``"steps=20"``.
    progress: target of printed lines: a stream, such as ``sys.stdout``, or a function of a line; None: no output.
    keys: the same as Python values, such as ``steps=20``.

  Raises:
    UserError: the configuration or an input is invalid.
    NonFiniteError: non-finite numbers, with their cause; or the run is finished and its last weights are not usable.
    DoesNotFitError: not enough memory; the message suggests settings that need less.
    StoppedRunError: a signal stopped the run; a checkpoint was saved.
    RetryableError: a failure that may not repeat; call again.
  """
  from maxtext_like.training.loop.progress import Progress
  from maxtext_like.training.run.preflight import preflight, run_directory

  require_shown(progress)
  loaded = load_config(config, *words(overrides, keys, train))
  found = run_directory(loaded.config)
  directory, url = found.path, found.url
  if (finished := preflight(loaded)) is not None:
    with Progress(0, 1, progress) as shown:
      shown.say(finished)
    return Run(directory, finished, url)
  from maxtext_like.analysis.failed_step import FailedStep
  from maxtext_like.training.run.run import train as run

  return Run(directory, run(loaded, FailedStep, progress), url)
