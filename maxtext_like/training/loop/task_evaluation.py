"""Evaluates the weights of a run on tasks of lm-evaluation-harness (``eval_tasks``) every ``eval_tasks_interval`` steps.

The evaluation reads the parameters between two steps and restores the random state, so it does not change the losses. Every
process of the run computes all requests, on the mesh of the run.
"""

import logging
from collections.abc import Callable
from typing import Any

from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.errors import DoesNotFitError, NonFiniteError, UserError
from maxtext_like.evaluation.tasks import Tasks
from maxtext_like.training.loop.signals import StopRequest, StopRequested
from maxtext_like.training.loop.watchdog import Watchdog
from maxtext_like.training.step.program import TrainProgram

NAME = "eval_tasks"
"""Beginning of the names of these metrics: ``eval_tasks/TASK/METRIC``."""
_SHOWN = 8  # metrics in the printed line; metrics.jsonl has all of them
_log = logging.getLogger(__name__)


class TaskEvaluation:
  """Evaluates ``eval_tasks``. If the data are conversations, prompts use their chat template."""

  def __init__(
    self,
    program: TrainProgram,
    tokenizer: Tokenizer,
    stop: StopRequest,
    watchdog: Watchdog,
    say: Callable[[str], None],
  ):
    """Loads the tasks and their data, so that an error stops the run before training.

    Args:
      program: program of the run.
      tokenizer: tokenizer of its data.
      stop: stop requests, which interrupt an evaluation between two batches.
      watchdog: its time limit restarts with every batch.
      say: prints a line.

    Raises:
      UserError: the harness is not installed, a task is unknown, or its data cannot be loaded.
    """
    settings, training = program.config.logging, program.config.training
    self._tasks = Tasks.load(settings.eval_tasks)
    from maxtext_like.evaluation.harness import HarnessModel

    self._program, self._limit, self._say = program, settings.eval_tasks_limit, say
    self._stop, self._watchdog = stop, watchdog
    self._chat = program.config.data.data_format == "chat"
    self._batches = 0
    # Rows as long as those of training, and batches as large as a microbatch, so that they fit where a step fits.
    self._model = HarnessModel(
      program.model,
      program.model.decoder,
      tokenizer,
      tokenizer.files[0].parent if tokenizer.files else None,
      max_length=training.max_target_length,
      batch_tokens=program.microbatch * training.max_target_length,
      apply_chat_template=self._chat,
      on_batch=self._before_batch,
    )

  def __call__(self, params: Any) -> dict[str, float] | None:
    """Evaluate the tasks with these parameters.

    Returns:
      Metrics by ``eval_tasks/TASK/METRIC``. None if a stop request interrupted the evaluation. None with a warning if logits
      are not finite, for which training has its own checks, if caches do not fit in memory, or if the model cannot take a
      request, such as one with a token that has no row or with more new tokens than a row has.
    """
    self._batches, self._model.params = 0, self._program.weights(params)
    try:
      found = self._tasks.run(
        self._model,
        limit=self._limit,
        apply_chat_template=self._chat,
        fewshot_as_multiturn=self._chat,
        bootstrap_iters=0,
      )
    except StopRequested:
      return None
    except (DoesNotFitError, NonFiniteError, UserError) as error:
      # These errors do not concern the training, so it continues without results.
      _log.warning("no results of eval_tasks: %s", str(error).splitlines()[0])
      return None
    finally:
      self._model.params = None  # the next step reuses the memory
    # Print the first metrics. The files of the run get all of them.
    shown = [f"{name} {value:.4f}" for name, value in found.metrics.items()]
    self._say(f"tasks   {', '.join(shown[:_SHOWN])}{', ...' if len(shown) > _SHOWN else ''}")
    return {f"{NAME}/{name}": value for name, value in found.metrics.items()}

  def _before_batch(self, *_: object) -> None:
    """Restart the time limit and check for stop requests, in all processes at the same batch."""
    self._watchdog.restart()
    self._stop.check_together(self._batches)
    self._batches += 1
