"""``generate_file``: answers a list of prompts into a file that a killed job continues."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.api.answers import as_prompts, draft_params_of, passes_note, result, texts_of
from maxtext_like.api.generate import generate
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.training.loop.progress import duration

if TYPE_CHECKING:
  from maxtext_like.api.pretrained import Pretrained
  from maxtext_like.generation.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class JobProgress:
  """Progress of a job.

  Attributes:
    prompts: number of prompts.
    done: number of prompts whose answers are in the file.
    earlier: number of prompts that an earlier job has answered.
    tokens: number of tokens that this job has generated.
    seconds: time since this job began to generate, including compilation.
    clamped: number of values that overflowed in float16 and were clamped by this job; None without float16.
    tokens_per_pass: as in ``Generation``.
  """

  prompts: int
  done: int
  earlier: int
  tokens: int
  seconds: float
  clamped: int | None = None
  tokens_per_pass: float | None = None

  @property
  def tokens_per_second(self) -> float:
    """Generated tokens per second."""
    return self.tokens / max(self.seconds, 1e-9)

  @property
  def seconds_left(self) -> float | None:
    """Estimated time until the end; None before the first prompt is done."""
    own = self.done - self.earlier
    return self.seconds / own * (self.prompts - self.done) if own else None

  def __str__(self) -> str:
    left = f", {duration(self.seconds_left)} left" if self.seconds_left else ""
    earlier = f" ({self.earlier} by an earlier job)" if self.earlier else ""
    rate = f"{self.tokens_per_second:,.1f} tokens/s{passes_note(self.tokens_per_pass)}"
    return f"{self.done} of {self.prompts} prompts{earlier}, {self.tokens:,} tokens, {rate}{left}"


def generate_file(
  model: "Pretrained",
  prompts: "Sequence[str | Prompt]",
  output: str | Path,
  *,
  on_progress: Callable[[JobProgress], None] | None = None,
  **options: Any,
) -> JobProgress:
  """Answer prompts into a file of JSON lines.

  A line has "index" (of the prompt), "prompt", "answers" (as ``Answer``, without the prompt) and "key". It is written when all
  answers to the prompt have ended. If the file exists, its prompts are not answered again, and the result is the same as that
  of one job, except for the order of the lines. A prompt with an answer that fails gets no line, and the other prompts are
  answered before the error is raised.

  Args:
    model: the result of ``load``.
    prompts: texts or prompts.
    output: the file.
    on_progress: called with the progress every time tokens were generated.
    options: as for ``generate``.

  Returns:
    The progress at the end.

  Raises:
    UserError: as for ``generate``; or the file has answers of another job.
    NonFiniteError: as for ``generate``, after the other prompts are answered.
    RetryableError: the disk is full.
  """
  from maxtext_like.generation.batch_file import BatchFile, job_key, prompt_key
  from maxtext_like.generation.shapes import slots_for
  from maxtext_like.generation.slots import TOKENS_PER_CALL

  listed = as_prompts(prompts)
  seeds = options.get("seeds")
  # Check the options with all prompts before the file is opened.
  clamped: list[int] = []
  how: dict[str, Any] = {"turn": TOKENS_PER_CALL, "continues": True, "on_clamped": clamped.append}
  some, texts = texts_of(model, generate, listed, options, **how)
  models = [model, *([draft] if (draft := options.get("draft")) is not None else [])]
  job = job_key(texts.options, *(part for one in models for part in _decisive_of(one)))
  keys = [prompt_key(job, prompt.text, request) for prompt, request in zip(listed, texts.requests, strict=True)]
  with BatchFile(Path(output), keys) as file:
    left = [i for i in range(len(listed)) if i not in file.done]
    earlier, tokens = len(file.done), 0
    if not left:
      return JobProgress(prompts=len(listed), done=earlier, earlier=earlier, tokens=0, seconds=0.0)
    if file.done:
      own = options if seeds is None else {**options, "seeds": [seeds[i] for i in left]}
      # As many slots, and caches as large, as at the beginning of the job, so that the answers are the same.
      how["least_slots"] = slots_for(len(listed) * texts.options.answers, texts.options.slots)
      how["least_tokens"] = max(len(request.tokens) + request.limit for request in texts.requests)
      some, texts = texts_of(model, generate, [listed[i] for i in left], own, numbers=left, **how)
    params, draft_params = model.decoding_params, draft_params_of(options)  # read before the clock starts
    begin = time.monotonic()
    progress = lambda: JobProgress(
      prompts=len(listed),
      done=len(file.done),
      earlier=earlier,
      tokens=tokens,
      seconds=time.monotonic() - begin,
      clamped=sum(clamped) if model.model.decoder.uses_float16 else None,
      tokens_per_pass=texts.tokens_per_pass,
    )
    counted, failed = [0] * len(left), {}
    for pieces in texts.run(params, draft_params=draft_params, texts=False):
      for at in sorted({piece.prompt for piece in pieces}):
        answers = texts.answers[at]
        made = sum(len(answer.tokens) for answer in answers)
        tokens, counted[at] = tokens + made - counted[at], made
        if (error := next((answer.error for answer in answers if answer.error is not None), None)) is not None:
          failed.setdefault(left[at], error)
        elif all(answer.ended for answer in answers) and left[at] not in file.done:
          found = [result(some[at], j, answer, logprobs=texts.options.logprobs) for j, answer in enumerate(answers)]
          fields = [{k: v for k, v in asdict(answer).items() if k != "prompt" and v is not None} for answer in found]
          file.add(left[at], {"prompt": some[at].text, "answers": fields})
      if on_progress is not None:
        on_progress(progress())
    if failed:
      index, error = next(iter(failed.items()))
      kind = NonFiniteError if isinstance(error, NonFiniteError) else UserError
      raise kind(
        f"{len(failed)} of {len(listed)} prompts failed, the others are answered. The first, with index {index}: {error}"
      )
    return progress()


def _decisive_of(model: "Pretrained") -> list[Any]:
  """Return everything about a model that decides its answers: equations, stored forms, weights, and the tokenizer."""
  import jax

  own = model.model
  arrays = [(jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in jax.tree.leaves_with_path(own.abstract_params)]
  # The decoder is the static argument of the compiled programs, so its text has every choice of precision.
  equations, form = repr(model.decoder_without_kernels), repr(own.base and own.base.form)
  return [equations, form, arrays, own.platform, model.weight_identity, model.tokenizer.fingerprint]
