"""What the model writes while it is trained: every so many steps, the continuations of a few prompts.

Read-only: the parameters are looked at between two steps, with draws of their own, so the losses are the same without.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxtext_like.config.schema import LoggingConfig
from maxtext_like.data.tokenizer import Tokenizer
from maxtext_like.errors import NonFiniteError
from maxtext_like.generation.engine import check, generate
from maxtext_like.generation.prompts import Prompt, continuation, encode
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.stop import stop_tokens
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.training.metrics import read
from maxtext_like.training.program import Program

FILE_NAME = "samples.jsonl"
_SHOWN = 80  # characters of a text on the screen
_log = logging.getLogger(__name__)


class Samples:
  """Continues ``sample_prompts`` and writes samples.jsonl: step, prompt, text, tokens; "error" where logits are not finite.

  Args:
    program: of the run.
    tokenizer: of its data.
    path: the file.
    say: shows a line.

  Raises:
    UserError: a prompt that the model cannot take; before anything is trained.
  """

  def __init__(self, program: Program, tokenizer: Tokenizer, path: Path, say: Callable[[str], None]):
    logging_config: LoggingConfig = program.config.logging
    self._program, self._tokenizer, self._path, self._say = program, tokenizer, path, say
    self._texts, self._tokens = logging_config.sample_prompts, logging_config.sample_tokens
    self._sampling = Sampling(
      temperature=logging_config.sample_temperature, vocabulary=tokenizer.vocab_size, seed=program.config.training.seed
    )
    prompts = [Prompt(text, place=f"sample_prompts[{i}]") for i, text in enumerate(self._texts)]
    self._prompts = encode(prompts, tokenizer, program.config.vision)
    check(self._prompts, program.decoder, self._tokens)
    self._stop = stop_tokens(tokenizer, tokenizer.files[0].parent if tokenizer.files else None)

  def __call__(self, step: int, params: Any) -> None:
    """Samples from the parameters after ``step`` steps. Logits that are not finite are told, not sampled."""
    answers: list[list[int]] = [[] for _ in self._texts]
    error = None
    try:
      with use_mesh(self._program.mesh):
        for rows in generate(
          self._program.decoder, params, self._prompts, max_tokens=self._tokens, stop=self._stop, sampling=self._sampling
        ):
          for answer, new in zip(answers, rows, strict=True):
            answer.extend(new)
    except NonFiniteError as raised:
      # Whether the training is sound is for its own checks to say; float16 may overflow in a prompt and nowhere else.
      error = str(raised).splitlines()[0]
      _log.warning("step %d: no samples: %s", step, error)
    with self._path.open("a", encoding="utf-8") as file:
      for prompt, ids, answer in zip(self._texts, self._prompts.tokens, answers, strict=True):
        text = continuation(self._tokenizer, ids, answer)
        row = {"step": step, "prompt": prompt, "text": text, "tokens": len(answer)}
        file.write(json.dumps(row if error is None else row | {"error": error}) + "\n")
        if error is None:
          self._say(sample_line(step, prompt, text))


def sample_line(step: int, prompt: str, text: str) -> str:
  """One sample as a line: quoted, so that spaces show; line ends and control characters are escapes."""
  return f"sample  step {step}  {_quoted(prompt)} -> {_quoted(text)}"


def _quoted(text: str) -> str:
  escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
  return f'"{escaped}"' if len(escaped) <= _SHOWN else f'"{escaped[:_SHOWN]}..."'


def read_samples(directory: Path) -> list[dict[str, Any]]:
  """The samples of a run, oldest first."""
  return read(directory / FILE_NAME)
