"""Tasks of lm-evaluation-harness: finding them, running them on a ``HarnessModel``, and their results.

The harness, of the extra ``eval``, is imported by the functions, because it loads slowly and is optional.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext_like import atomic
from maxtext_like.config.problems import nearest
from maxtext_like.errors import UserError
from maxtext_like.extras import install

if TYPE_CHECKING:
  from maxtext_like.evaluation.harness import HarnessModel

BOOTSTRAP_ITERS = 100_000  # the harness' default


def require_harness() -> None:
  """Raise UserError if lm-evaluation-harness is not installed."""
  if importlib.util.find_spec("lm_eval") is None:
    raise UserError(f"evaluation on tasks needs lm-evaluation-harness, which is not installed\n  fix: {install('eval')}")


@dataclass(frozen=True)
class TaskResults:
  """Results of tasks, as the harness returns them.

  Attributes:
    results: content of the harness' results file: "results" by task and metric, "groups", "versions", "n-shot",
      "configs", "higher_is_better", ...
    samples: by task, one record for each document; empty unless they were asked for.
    clamped: values that float16 clamped; None without float16.
  """

  results: Mapping[str, Any]
  samples: Mapping[str, list[dict[str, Any]]]
  clamped: int | None = None

  @property
  def metrics(self) -> dict[str, float]:
    """Numbers by "task/metric"; with a filter other than none "task/metric/filter". Standard errors are left out."""
    found = {}
    for task, values in self.results["results"].items():
      for key, value in values.items():
        metric, _, kind = key.partition(",")
        if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
          found[f"{task}/{metric}" if kind == "none" else f"{task}/{metric}/{kind}"] = float(value)
    return found

  def __str__(self) -> str:
    """The tables that the harness prints: tasks, and groups if there are any."""
    from lm_eval.utils import make_table  # pyright: ignore[reportMissingImports]

    tables = [make_table(self.results)]
    if self.results.get("groups"):
      tables.append(make_table(self.results, "groups"))
    return "\n".join(table.strip("\n") for table in tables)

  def write(self, path: Path) -> list[Path]:
    """Write the results as JSON, and the samples of each task to a .jsonl file in the same directory.

    Returns:
      The files.

    Raises:
      UserError: a file cannot be written.
    """
    files = {path: _json(self.results, indent=1) + "\n"}
    for task, records in self.samples.items():
      name = "".join(c if c.isalnum() or c in "-_." else "_" for c in task)
      files[path.with_name(f"{path.stem}.samples.{name}.jsonl")] = "".join(_json(record) + "\n" for record in records)
    for file, text in files.items():
      try:
        atomic.write_text(file, text)
      except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}", fix="choose another output file") from None
    return list(files)


def _json(value: Any, indent: int | None = None) -> str:
  from lm_eval.utils import handle_non_serializable  # pyright: ignore[reportMissingImports]

  return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)


@dataclass(frozen=True)
class Tasks:
  """Loaded tasks with their data.

  Attributes:
    loaded: result of the harness' ``TaskManager.load``: tasks and groups by name.
    seed: seed of the choice of few-shot examples; None: the harness' own.
  """

  loaded: Any
  seed: int | None = None

  @property
  def names(self) -> list[str]:
    """Names of the tasks, without groups."""
    return list(self.loaded["tasks"])

  @classmethod
  def load(
    cls,
    names: Sequence[str],
    *,
    include: Sequence[str] = (),
    num_fewshot: int | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    seed: int | None = None,
  ) -> "Tasks":
    """Find tasks and load their data.

    Args:
      names: names of tasks, groups or tags of the harness, patterns as ``"mmlu_*"``, or .yaml files of tasks.
      include: folders with more .yaml files of tasks.
      num_fewshot: examples in a prompt, for tasks that do not fix it to 0; None: as each task says.
      gen_kwargs: replaces single ``generation_kwargs`` of tasks that generate.
      seed: see the attribute.

    Raises:
      UserError: a name is unknown, a task file is invalid, or the data cannot be loaded.
    """
    require_harness()
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    given = [name.strip() for name in names if name.strip()]
    if not given:
      raise UserError("no task is named\n  fix: name tasks, such as arc_easy,hellaswag, or the .yaml file of a task")
    if missing := [folder for folder in include if not Path(folder).expanduser().is_dir()]:
      raise UserError(f"{missing[0]}: no such folder of task files", fix="name the folder with the .yaml files of the tasks")
    folders = [str(Path(folder).expanduser()) for folder in include]
    # The harness reads 14,000 files to list its own tasks. That takes seconds, so its list is read only if a name needs it.
    loaded = None
    manager = TaskManager(include_path=folders, include_defaults=False)
    if all(_find(manager, name) for name in given):
      with contextlib.suppress(KeyError):  # a local group may name tasks of the harness
        loaded = _load(manager, given)
    if loaded is None:
      manager = TaskManager(include_path=folders)
      try:
        loaded = _load(manager, given)
      except KeyError as error:
        raise UserError(
          f"tasks: {error.args[0] if error.args else error}", fix="correct the names in the group's file"
        ) from None
    for task in loaded["tasks"].values():
      if gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(gen_kwargs), update=True)
      # As in the harness: 0 in a task's file is fixed, and a task without a number has no examples.
      if num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
      elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    return cls(loaded, seed)

  def run(
    self,
    model: "HarnessModel",
    *,
    limit: float | None = None,
    apply_chat_template: bool = False,
    fewshot_as_multiturn: bool = False,
    system_instruction: str | None = None,
    log_samples: bool = False,
    bootstrap_iters: int = BOOTSTRAP_ITERS,
    confirm_run_unsafe_code: bool = False,
  ) -> TaskResults:
    """Evaluate a model. Arguments have the names and the meaning of the harness. The random state of this process is kept.

    Raises:
      UserError: a task needs another kind of model, or marks its code as unsafe; and as ``HarnessModel``.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED  # pyright: ignore[reportMissingImports]
    from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]

    self._require_supported(confirm_run_unsafe_code)
    first, others = (DEFAULT_RANDOM_SEED, DEFAULT_OTHER_SEED) if self.seed is None else (self.seed, self.seed)
    for task in self.loaded["tasks"].values():
      task.set_fewshot_seed(seed=others)  # each evaluation draws the same examples
    with _own_random_state(first, others), _in_this_process(quiet=bootstrap_iters > 0):
      found = evaluate(
        lm=model,
        task_dict=self.loaded,
        limit=limit,
        bootstrap_iters=bootstrap_iters,
        log_samples=log_samples,
        system_instruction=system_instruction,
        apply_chat_template=apply_chat_template,
        fewshot_as_multiturn=fewshot_as_multiturn,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
      )
    results = {**found, "lm_eval_version": importlib.metadata.version("lm_eval")}
    samples = results.pop("samples", None) or {}
    return TaskResults(results, samples)

  def _require_supported(self, unsafe_allowed: bool) -> None:
    for name, task in self.loaded["tasks"].items():
      if getattr(task, "MULTIMODAL", False):
        raise UserError(f"task {name} needs images\n  why: only tasks of text are supported\n  fix: leave it out")
      if getattr(task, "UNSAFE_CODE", False) and not unsafe_allowed:
        raise UserError(
          f"task {name} runs code that the model writes\n  fix: confirm_run_unsafe_code, on a machine that may be damaged"
        )


def _find(manager: Any, name: str) -> list[str]:
  """Return the tasks that a name, a pattern or the path of a file means; none if it is unknown."""
  if name.endswith((".yaml", ".yml")):
    path = Path(name).expanduser()
    return [str(path)] if path.is_file() else []
  return manager.match_tasks([name])


def _load(manager: Any, names: Sequence[str]) -> Any:
  """Load tasks by name. Raises KeyError for a task that a group names and the manager does not know."""
  specs: list[str] = []
  for name in names:
    if not (found := _find(manager, name)):
      if name.endswith((".yaml", ".yml")):
        raise UserError(f"{name}: no such file of a task", fix="pass the path of an existing .yaml file")
      near = nearest(name, manager.all_tasks, 3)
      also = f"; similar names: {', '.join(near)}" if near else ""
      raise UserError(f"unknown task {name!r}{also}\n  fix: name a task of lm-evaluation-harness, or its .yaml file")
    specs += [spec for spec in found if spec not in specs]
  try:
    return manager.load(specs)
  except (UserError, KeyError):
    raise
  except Exception as error:  # the data library raises errors of many kinds
    raise UserError(
      f"tasks {', '.join(specs)}: cannot be loaded: {type(error).__name__}: {error}\n"
      "  fix: correct the task's file or its dataset_path; data on the Hugging Face hub need network access the first time"
    ) from error


@contextlib.contextmanager
def _own_random_state(first: int, others: int) -> Iterator[None]:
  """Seed the global generators as the harness does, and restore their state afterwards."""
  python, numpy = random.getstate(), np.random.get_state()
  try:
    random.seed(first)
    np.random.seed(others)
    yield
  finally:
    random.setstate(python)
    np.random.set_state(numpy)


@contextlib.contextmanager
def _in_this_process(quiet: bool) -> Iterator[None]:
  """Make the harness compute standard errors without forking, which JAX does not survive, and show no progress bars.

  Args:
    quiet: also drop what the harness prints about standard errors. This redirects the standard output of the process.
  """
  from lm_eval.api import task  # pyright: ignore[reportMissingImports]

  before, bars = os.environ.get("DISABLE_MULTIPROC"), task.tqdm
  os.environ["DISABLE_MULTIPROC"] = "1"
  task.tqdm = functools.partial(bars, disable=True)
  try:
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
      yield
  finally:
    task.tqdm = bars
    if before is None:
      del os.environ["DISABLE_MULTIPROC"]
    else:
      os.environ["DISABLE_MULTIPROC"] = before
