"""``maxtext-like VERB ...``: finds the verb, turns errors into one message and an exit code. Imports nothing heavy."""

import errno
import gc
import importlib
import keyword
import os
import re
import sys
import traceback
from collections.abc import Sequence

from maxtext_like import __version__, abandoned_threads, typed_command
from maxtext_like.cli import streams
from maxtext_like.errors import ExitError, StoppedRunError, UserError

VERBS = {
  "train": "train a model",
  "sft": "fine-tune a model on conversations",
  "data": "show records as a run takes them, what is learned of them, and the counts of a pass",
  "forward": "run a checkpoint on the arrays of an .npz file",
  "import": "turn a Hugging Face checkpoint into one of ours, to train from",
  "export": "write the weights of a run for transformers and vLLM",
  "generate": "continue prompts with a run or a Hugging Face checkpoint",
  "bisect": "find the precision keys that mend a step which is not finite, or far from float32",
  "compile": "compile the train step for a TPU topology, on any machine, and tell whether it fits",
  "plan": "tell by arithmetic what the train step needs and takes at least on machines that are not here",
  "risk": "tell from the weights alone what overflows in a dtype",
  "audit": "read the train step's program: dtypes of every part, and which precision keys it honours",
  "xray": "look through one training step: ranges of every tensor, and the first cause of a NaN",
  "replay": "look again through the step that ended a run, in this or another precision",
  "config": "print a resolved configuration and where each value comes from",
  "models": "list the model configurations with their parameter counts",
}
"""Verb to what it does; each lives in ``maxtext_like.cli.<verb>`` (``import_``: a word of Python) as ``run(argv) -> int``."""
SEVERAL_PROCESSES = ("train", "sft", "xray", "replay")

USES_JAX = (
  "train", "sft", "forward", "import", "export", "generate", "bisect", "compile", "plan", "audit", "risk", "xray", "replay",
  "models",
)  # fmt: skip


def program(verb: str | None = None) -> int:
  """The command itself: ``main`` with the words of this process, behind a verb or from the verb on."""
  with typed_command.as_command():
    code = main(None if verb is None else [verb, *sys.argv[1:]])
  if abandoned_threads.may_call_back():  # not in main, which others call: the process may be theirs
    streams.leave(code)
  return code


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one verb.

  Args:
    argv: the words after the program's name; None takes those of this process.

  Returns:
    The exit code: 0 done; 2 wrong usage, configuration or input; 3 non-finite numbers or no progress; 4 does not fit; 42 a
    restart can mend it; 130 stopped by Ctrl-C. An error of this program itself is raised, with its traceback.
  """
  usual = gc.get_threshold()
  gc.set_threshold(50_000, 20, 100)  # what imports and tracing make stays: an eighth of a start went into looking for garbage
  try:
    with streams.LogLines():
      code = _exit_code(list(sys.argv[1:] if argv is None else argv))
  finally:
    gc.set_threshold(*usual)
  if abandoned_threads.any_running():
    streams.leave(code)
  return code


def _exit_code(words: list[str]) -> int:
  streams.open_closed()
  try:
    return _dispatch(words)
  except BrokenPipeError:
    if not streams.reader_left():
      raise  # some other pipe
    return 0
  except (ExitError, RuntimeError, OSError) as raised:
    if (error := _as_exit(raised)) is None:
      raise
    if os.environ.get("MAXTEXT_LIKE_DEBUG", "") not in ("", "0"):
      traceback.print_exc()
    asked = isinstance(error, StoppedRunError)
    streams.say_error(f"{'' if asked else 'error: '}{shortened(printable(str(error)))}")
    return error.exit_code
  except KeyboardInterrupt:
    streams.say_error("interrupted")
    return 130


def _as_exit(error: Exception) -> ExitError | None:
  if isinstance(error, ExitError):
    return error
  if isinstance(error, OSError):
    # Whoever looks first at a path that was typed gets one of these.
    known = error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP) and error.filename is not None
    return UserError(f"{error.filename}: {error.strerror}") if known else None
  from maxtext_like.cli.environment import backend_error

  return backend_error(error) if isinstance(error, RuntimeError) else None


def _dispatch(words: list[str]) -> int:
  if not words or words[0] in ("-h", "--help", "help"):
    print(usage())
    return 0 if words else UserError.exit_code
  if words[0] in ("-V", "--version"):
    print(__version__)
    return 0
  verb = words[0]
  if verb not in VERBS:
    raise UserError(_unknown_verb(verb))
  try:
    os.getcwd()
  except FileNotFoundError:
    raise UserError(
      "the working directory was deleted, so no path can be resolved\n  fix: cd to a directory that exists"
    ) from None
  from maxtext_like.config.overrides import TypedWord

  rest: list[str] = [TypedWord(word) for word in words[1:]]
  if "--help-keys" in rest:
    from maxtext_like.cli import keys

    return keys.run(rest[rest.index("--help-keys") + 1 :])
  several = next((word for word in rest if word.partition("=")[0] in ("--processes", "--devices-per-process")), None)
  if several is not None and verb not in SEVERAL_PROCESSES:
    raise UserError(f"{verb} runs in one process; {several} is for {', '.join(SEVERAL_PROCESSES)}\n  fix: leave it out")
  if verb in USES_JAX and "-h" not in rest and "--help" not in rest:
    from maxtext_like.cli.environment import check_environment

    check_environment()
  module = f"{verb}_" if keyword.iskeyword(verb) else verb
  return importlib.import_module(f"maxtext_like.cli.{module}").run(rest)


def usage() -> str:
  """The text of ``maxtext-like --help``."""
  width = max(map(len, VERBS))
  verbs = "\n".join(f"  {verb:{width}}  {what}" for verb, what in VERBS.items())
  return f"""usage: maxtext-like VERB ...

{verbs}

  maxtext-like train gemma4-tiny                   trains a small Gemma 4 on this machine's Python sources
  maxtext-like train gemma4-tiny steps=20 seed=1   the same with other values
  maxtext-like train --help-keys learning          every key with 'learning' in its name or meaning
  maxtext-like VERB --help                         what a verb takes

MAXTEXT_LIKE_DEBUG=1 adds the traceback to an error."""


def _unknown_verb(verb: str) -> str:
  from maxtext_like.config.problems import did_you_mean

  if verb.endswith((".yml", ".yaml")):
    return f"{verb!r} is not a verb\n  fix: maxtext-like train {verb}"
  near = did_you_mean(verb, VERBS)
  return f"unknown verb {verb!r}{near}\n  fix: one of {', '.join(VERBS)}; see maxtext-like --help"


def printable(text: str) -> str:
  """Text for a terminal: control characters, which a file name or a value may hold, are written as escapes."""
  return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str) -> str:
  """The text with the middle of every word of thousands of characters left out."""
  return re.sub(r"\S{1000,}", lambda word: f"{word[0][:200]}...({len(word[0])} characters)...{word[0][-50:]}", text)


if __name__ == "__main__":
  sys.exit(main())
