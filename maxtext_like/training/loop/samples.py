"""Generates text during training: continuations of a few prompts every ``sample_every`` steps.

Sampling reads the parameters between two steps and has its own random numbers, so it does not change the losses.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from maxtext_like.config.schema import LoggingConfig
from maxtext_like.data.tokenization.tokenizer import Tokenizer
from maxtext_like.errors import DoesNotFitError, NonFiniteError, UserError
from maxtext_like.generation.engine import check, generate
from maxtext_like.generation.prompts import Prompt, chat_renderer, continuation, encode
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.stop import stop_tokens
from maxtext_like.masking import masked
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.training.sinks.metrics import Row
from maxtext_like.training.step.program import TrainProgram

_SHOWN = 80  # maximum number of characters of a text in the terminal
_log = logging.getLogger(__name__)


class Samples:
  """Continues ``sample_prompts``. If the data are conversations, each prompt is a user message that the model answers.

  Args:
    program: program of the run.
    tokenizer: tokenizer of its data.
    say: prints a line.

  Raises:
    UserError: the model cannot take a prompt. Raised before training starts.
  """

  def __init__(self, program: TrainProgram, tokenizer: Tokenizer, say: Callable[[str], None]):
    logging_config: LoggingConfig = program.config.logging
    self._program, self._tokenizer, self._say = program, tokenizer, say
    self._texts, self._tokens = logging_config.sample_prompts, logging_config.sample_tokens
    # The same seed in every run, independent of training.
    self._sampling = Sampling(
      temperature=logging_config.sample_temperature, vocabulary=tokenizer.vocab_size, seed=program.config.training.seed
    )
    self._stop = stop_tokens(tokenizer, tokenizer.files[0].parent if tokenizer.files else None, model=program.config.model)
    # With chat data, prompts are user messages in the data's chat template.
    make, renderer = Prompt, None
    if program.config.data.data_format == "chat":
      make = Prompt.chat
      renderer, ends = chat_renderer(program.config, tokenizer)
      self._stop |= ends
    # Encode the prompts now, so that an invalid one stops the run before training.
    prompts = [replace(make(text), place=f"sample_prompts[{i}]") for i, text in enumerate(self._texts)]
    spelled = program.config.data.special_tokens_in_text
    self._prompts = encode(prompts, tokenizer, program.config.vision, renderer, special_tokens=spelled)
    check(self._prompts, program.model.decoder, self._tokens)

  def __call__(self, step: int, params: Any) -> list[Row]:
    """Sample from the parameters after ``step`` steps.

    Returns:
      Rows of samples.jsonl: step, prompt, text, tokens; also "error" if logits are not finite, no token may follow, or the
      caches do not fit.
    """
    answers: list[list[int]] = [[] for _ in self._texts]
    error = None
    try:
      with use_mesh(self._program.model.mesh):
        for rows in generate(
          self._program.model.decoder,
          self._program.weights(params),
          self._prompts,
          max_tokens=self._tokens,
          stop=self._stop,
          sampling=self._sampling,
        ):
          for answer, new in zip(answers, rows, strict=True):
            answer.extend(new)
    except (DoesNotFitError, NonFiniteError, UserError) as raised:
      # Only a warning: float16 may overflow for one prompt alone, and training has its own finiteness checks. Caches may not
      # fit in the memory that training leaves.
      error = str(raised).splitlines()[0]
      _log.warning("step %d: no samples: %s", step, error)
    # One row per prompt.
    found = []
    for prompt, ids, answer in zip(self._texts, self._prompts.tokens, answers, strict=True):
      # Mask secrets here, because the texts go to the terminal, samples.jsonl, trackers and the report.
      prompt, text = masked(prompt), masked(continuation(self._tokenizer, ids, answer))
      row: Row = {"step": step, "prompt": prompt, "text": text, "tokens": len(answer)}
      found.append(row if error is None else row | {"error": error})
      if error is None:
        self._say(sample_line(step, prompt, text))
    return found


def sample_line(step: int, prompt: str, text: str) -> str:
  """Return one sample as a line. It is quoted to show spaces; line breaks and control characters are escaped."""
  return f"sample  step {step}  {_quoted(prompt)} -> {_quoted(text)}"


def _quoted(text: str) -> str:
  escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
  return f'"{escaped}"' if len(escaped) <= _SHOWN else f'"{escaped[:_SHOWN]}..."'
