"""Training from Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, require_shown, words
from maxtext_like.api.configuration import load_config, load_for_sft
from maxtext_like.local_copies import copy_file

if TYPE_CHECKING:
  from maxtext_like.api.configuration import Configuration
  from maxtext_like.api.pretrained import Pretrained
  from maxtext_like.storage import Place
  from maxtext_like.training.loop.progress import Shown


@dataclass(frozen=True)
class Run(Saved):
  """A run that came to its end.

  Attributes:
    directory: config.yml, metrics.jsonl, checkpoints/, report.html and the rest; of a run in a store what this machine has.
    outcome: what came of it, in a line.
    url: of a run in a store; empty: it is in the directory.
  """

  directory: Path
  outcome: str
  url: str = ""

  @property
  def place(self) -> str:
    return self.url or str(self.directory)

  @property
  def metrics(self) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, one for each step: "step", "loss", "grad_norm", ..."""
    from maxtext_like.training.sinks.metrics import METRICS, by_step, read

    return by_step(read(copy_file(f"{self.url}/{METRICS}") if self.url else self.directory / METRICS))

  @property
  def checkpoint(self) -> "Path | Place | None":
    """The newest complete checkpoint; None: it keeps none."""
    from maxtext_like.checkpoint.weight_sources import find_step, located

    return find_step(located(self.place))

  @property
  def best(self) -> "Path | Place | None":
    """The checkpoint with the lowest held-out loss, of a run with ``keep_best``; None: there is none."""
    from maxtext_like.checkpoint.store.best_steps import NAME
    from maxtext_like.checkpoint.weight_sources import find_step, located

    return find_step(located(self.place) / "checkpoints" / NAME)

  def load(self, *overrides: str, **keys: Any) -> "Pretrained":
    """What was trained; see ``maxtext_like.load``."""
    from maxtext_like.api.pretrained import load

    return load(self.place, *overrides, **keys)


def train(config: "Configuration", *overrides: str, progress: "Shown" = None, **keys: Any) -> Run:
  """Trains as configured. The same call again goes on from the newest checkpoint, or finds the run finished.

  A process that hangs is ended, as the ``watchdog_*`` keys say. In the main thread Ctrl-C stops after the step that runs,
  with a checkpoint.

  Args:
    config: a name, a path, or what ``load_config`` returned.
    overrides: words laid over it, as ``"steps=20"``.
    progress: where its lines go: a stream, as ``sys.stdout``, or a function of a line; None: nowhere.
    keys: values laid over it, as ``steps=20``.

  Raises:
    UserError: configuration or input cannot be used.
    NonFiniteError: numbers that are not finite, with their cause; or the run has ended, and its last weights are not usable.
    DoesNotFitError: the memory does not suffice, with what makes the run smaller.
    StoppedRunError: a signal asked for the end; what was trained is saved.
    RetryableError: a fault that the same call again can mend.
  """
  from maxtext_like.training.loop.progress import Progress
  from maxtext_like.training.run.preflight import first_look, run_directory

  require_shown(progress)
  loaded = load_config(config, *words(overrides, keys, train))
  found = run_directory(loaded.config)
  directory, url = found.path, found.url
  if (finished := first_look(loaded)) is not None:
    with Progress(0, 1, progress) as shown:
      shown.say(finished)
    return Run(directory, finished, url)
  from maxtext_like.analysis.failed_step import FailedStep
  from maxtext_like.training.run.run import train as run

  return Run(directory, run(loaded, FailedStep, progress), url)


def sft(config: "Configuration", *overrides: str, progress: "Shown" = None, **keys: Any) -> Run:
  """Fine-tunes on conversations: ``train`` with ``data_format=chat``, and ``dataset`` as the files of ``dataset_path`` say.

  Args:
    config: a name, a path, or what ``load_config`` returned.
    overrides: words laid over it, as ``"dataset_path=chats.jsonl"``.
    progress: where its lines go, as with ``train``.
    keys: values laid over it, as ``dataset_path="chats.jsonl"``.

  Raises:
    ExitError: as ``train``.
  """
  from maxtext_like.training.loop.progress import Progress

  require_shown(progress)
  loaded = load_for_sft(config, words(overrides, keys, sft))
  with Progress(0, 1, progress) as shown:
    for note in loaded.notes:
      shown.say(f"note    {note}")
  return train(loaded, progress=progress)
