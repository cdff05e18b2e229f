"""The command that started this process, as a person types it. Imports nothing heavy."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from maxtext_like.masking import masked_words

VARIABLE = "MAXTEXT_LIKE_COMMAND"
"""The launcher of several processes passes its command to them in this environment variable: theirs lack its options."""

_is_command = False


def begin_command() -> None:
  """Note that this process is our command; the command calls it first. In a notebook or a script nothing does."""
  global _is_command
  _is_command = True


def is_command() -> bool:
  """Return True if the words of this process, or of its launcher, are the call that trains."""
  return _is_command or VARIABLE in os.environ


def typed_words(words: Sequence[str] | None = None) -> list[str]:
  """The words of the command.

  Args:
    words: the program and its arguments, as ``sys.argv``, which is the default.
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
  # A program that the shell finds by its name was most likely typed so.
  return [name if found is not None and os.path.realpath(found) == os.path.realpath(program) else program, *rest]


def typed_command() -> str:
  """The command in a line that a shell takes, without secrets."""
  return shlex.join(masked_words(typed_words()))
