"""``evaluate``: evaluates a model on tasks of lm-evaluation-harness."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.arguments import Saved, require_number, words
from maxtext_like.api.loaded import as_loaded, require_counts
from maxtext_like.api.pretrained import Pretrained
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.evaluation.tasks import TaskResults


def evaluate(
  model: str | Path | Saved | Pretrained,
  tasks: str | Sequence[str],
  *overrides: str,
  include_path: str | Path | Sequence[str | Path] = (),
  num_fewshot: int | None = None,
  limit: float | None = None,
  batch_size: int | None = None,
  max_length: int | None = None,
  max_gen_toks: int = 256,
  gen_kwargs: Mapping[str, Any] | None = None,
  apply_chat_template: bool = False,
  fewshot_as_multiturn: bool | None = None,
  system_instruction: str | None = None,
  bootstrap_iters: int = 100_000,
  seed: int | None = None,
  log_samples: bool = False,
  confirm_run_unsafe_code: bool = False,
  adapters: str | Path | Saved | Sequence[str | Path | Saved] = (),
  on_batch: Callable[[str, int, int], None] | None = None,
  on_note: Callable[[str], None] | None = None,
  **keys: Any,
) -> "TaskResults":
  """Evaluate a model on tasks of lm-evaluation-harness, which the extra ``eval`` installs.

  Texts are encoded and shortened as in the harness' Hugging Face backend. Arguments with the harness' names mean the same.

  Args:
    model: the result of ``load``, or an argument for it.
    tasks: names of tasks, groups or tags, patterns as ``"mmlu_*"``, or .yaml files of tasks; a list, or separated by commas.
    overrides: words that override the configuration of a model to load, such as ``"dtype=bfloat16"``.
    include_path: one or several folders with more task files.
    num_fewshot: examples in a prompt; None: as each task says. Tasks that fix 0 keep it.
    limit: evaluate only this number of documents of each task, or this fraction if it is below 1.
    batch_size: rows of a batch; None: as many as have 8192 tokens together.
    max_length: longest input in tokens; longer ones lose their first tokens. None: the longest sequence of the model.
    max_gen_toks: length of an answer, for tasks that do not set it.
    gen_kwargs: replaces single ``generation_kwargs`` of tasks that generate.
    apply_chat_template: render prompts as conversations with the model's chat template (key ``chat_template``).
    fewshot_as_multiturn: examples are turns of the conversation; None: if there is a chat template.
    system_instruction: text before the prompt; with a chat template the system message.
    bootstrap_iters: samples for standard errors that have no formula; 0: no standard errors.
    seed: seed of few-shot examples and of sampling; None: the harness' own seeds.
    log_samples: keep every document with its prompt and answer, in ``samples``.
    confirm_run_unsafe_code: allow tasks that run code that the model writes.
    adapters: as for ``load``.
    on_batch: called before every batch with the kind of request, and the numbers of finished and of all requests.
    on_note: called with every remark about the loaded model, such as the storage of its weights.
    keys: the same as ``overrides``, as Python values.

  Raises:
    UserError: the harness is not installed, a task is unknown, its data cannot be loaded, or an argument is invalid.
    NonFiniteError: the logits are not finite.
    DoesNotFitError: the weights or the KV caches do not fit the memory of the device.
  """
  require_counts(evaluate, batch_size=batch_size, max_length=max_length, max_gen_toks=max_gen_toks)
  require_counts(evaluate, 0, num_fewshot=num_fewshot, bootstrap_iters=bootstrap_iters, seed=seed)
  if limit is not None:
    require_number(evaluate, "limit", limit)
    if limit <= 0:
      raise UserError(f"evaluate: limit={limit} is not above 0\n  fix: pass a number of documents, or a fraction below 1")
  if fewshot_as_multiturn and not apply_chat_template:
    raise UserError(
      "evaluate: fewshot_as_multiturn needs a chat template, which writes the turns\n"
      "  fix: apply_chat_template=True, or leave fewshot_as_multiturn out"
    )
  words(overrides, keys, evaluate)  # refuses a misspelled argument before the tasks are loaded
  from maxtext_like.evaluation.tasks import Tasks

  names = tasks.split(",") if isinstance(tasks, str) else list(tasks)
  folders = [include_path] if isinstance(include_path, str | Path) else include_path
  found = Tasks.load(
    names, include=[str(folder) for folder in folders], num_fewshot=num_fewshot, gen_kwargs=gen_kwargs, seed=seed
  )
  loaded = as_loaded(evaluate, model, overrides, keys, adapters, on_note)
  from maxtext_like.evaluation.harness import HarnessModel

  harness_model = HarnessModel(
    loaded.model,
    loaded.decoder,
    loaded.tokenizer,
    loaded.files,
    params=loaded.params,
    max_length=max_length,
    batch_size=batch_size,
    max_gen_toks=max_gen_toks,
    apply_chat_template=apply_chat_template,
    seed=seed or 0,
    on_batch=on_batch,
  )
  results = found.run(
    harness_model,
    limit=limit,
    apply_chat_template=apply_chat_template,
    fewshot_as_multiturn=apply_chat_template if fewshot_as_multiturn is None else fewshot_as_multiturn,
    system_instruction=system_instruction,
    log_samples=log_samples,
    bootstrap_iters=bootstrap_iters,
    confirm_run_unsafe_code=confirm_run_unsafe_code,
  )
  described = {
    "config": {
      "model": "maxtext_like",
      "model_args": {"model_name": loaded.config.model.model_name, "directory": str(loaded.directory)},
      "dtype": loaded.config.precision.dtype,
      "max_length": harness_model.max_length,
      "batch_size": batch_size,
      "limit": limit,
      "num_fewshot": num_fewshot,
      "gen_kwargs": None if gen_kwargs is None else dict(gen_kwargs),
      "chat_template": harness_model.chat_template(),
      "system_instruction": system_instruction,
      "bootstrap_iters": bootstrap_iters,
      "seed": seed,
    }
  }
  clamped = harness_model.clamped if loaded.decoder.uses_float16 else None
  return dataclasses.replace(results, results={**results.results, **described}, clamped=clamped)
