"""The command that started this process, in the form in which a person typed it. Imports nothing heavy."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from maxtext_like.masking import masked_words

VARIABLE = "MAXTEXT_LIKE_COMMAND"
"""Environment variable with the command of the launcher that started this process: the worker's own argv lacks its options."""

_is_command = False


@contextmanager
def as_command() -> Iterator[None]:
  """Mark this process as our command while the block runs. A notebook or a script of the user never enters it."""
  global _is_command
  before, _is_command = _is_command, True
  try:
    yield
  finally:
    _is_command = before


def is_command() -> bool:
  """Returns True if this process, or the launcher that started it, is the maxtext-like command."""
  return _is_command or VARIABLE in os.environ


def typed_words(words: Sequence[str] | None = None) -> list[str]:
  """Returns the words of the command.

  Args:
    words: the program and its arguments; default: ``sys.argv``.
  """
  if words is None and (command := os.environ.get(VARIABLE)):
    return shlex.split(command)
  program, *rest = sys.argv if words is None else words
  name = os.path.basename(program)
  if name == "__main__.py":
    return ["python", "-m", os.path.basename(os.path.dirname(program)), *rest]
  if name.endswith(".py") or not os.access(program, os.X_OK) or os.path.isdir(program):
    return ["python", program, *rest]
  found = shutil.which(name)
  # If the shell finds the program by its name, the user most likely typed the name without the path.
  return [name if found is not None and os.path.realpath(found) == os.path.realpath(program) else program, *rest]


def typed_command() -> str:
  """Returns the command as one line for a shell, with secrets masked."""
  return shlex.join(masked_words(typed_words()))
