"""``maxtext-like VERB ...``: runs a verb, and turns errors into a message and an exit code. Imports no slow packages."""

import errno
import gc
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence

from maxtext_like import __version__, abandoned_threads, typed_command
from maxtext_like.cli import streams
from maxtext_like.errors import ExitError, StoppedRunError, UserError
from maxtext_like.storage import failed, is_remote
from maxtext_like.verbs import VERBS, module_of


def program(verb: str | None = None) -> int:
  """Entry point of the command: ``main`` with the arguments of this process, after ``verb`` if it is set."""
  with typed_command.as_command():
    code = main(None if verb is None else [verb, *sys.argv[1:]])
  if abandoned_threads.may_call_back():  # not in main, because its caller may own the process
    streams.leave(code)
  return code


def main(argv: Sequence[str] | None = None) -> int:
  """Run one verb.

  Args:
    argv: arguments after the program's name; None: the arguments of this process.

  Returns:
    The exit code: 0 done; 2 wrong usage, configuration or input; 3 non-finite numbers or no progress; 4 not enough memory; 42 a
    failure that a restart may fix; 130 stopped by Ctrl-C. A bug of the program is raised with its traceback.
  """
  usual = gc.get_threshold()
  gc.set_threshold(50_000, 20, 100)  # objects of imports and tracing stay alive; collecting garbage took an eighth of a start
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
    text = printable(with_escaped_breaks(str(error), words))
    streams.say_error(f"{'' if asked else 'error: '}{shortened(text)}")
    return error.exit_code
  except KeyboardInterrupt:
    streams.say_error("interrupted")
    return 130


def _as_exit(error: Exception) -> ExitError | None:
  if isinstance(error, ExitError):
    return error
  if isinstance(error, OSError):
    # The first access to a path that the user typed may raise one of these.
    if isinstance(error, PermissionError) and is_remote(str(error.filename)):
      return failed(error)
    known = error.errno in (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP) and error.filename is not None
    return (
      UserError(f"{error.filename}: {error.strerror}", fix="name a path that exists and that you may read") if known else None
    )
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
      "the working directory was deleted, so relative paths cannot be resolved\n  fix: cd to a directory that exists"
    ) from None
  from maxtext_like.config.overrides import TypedWord

  rest: list[str] = [TypedWord(word) for word in words[1:]]
  if "--help-keys" in rest:
    from maxtext_like.cli import keys

    return keys.run(rest[rest.index("--help-keys") + 1 :])
  several = next((word for word in rest if word.partition("=")[0] in ("--processes", "--devices-per-process")), None)
  if several is not None and not VERBS[verb].several_processes:
    accept = ", ".join(name for name, entry in VERBS.items() if entry.several_processes)
    raise UserError(f"{verb} runs in one process; only {accept} accept {several}\n  fix: leave it out")
  if VERBS[verb].uses_jax and "-h" not in rest and "--help" not in rest:
    from maxtext_like.cli.environment import check_environment

    check_environment()
  return importlib.import_module(f"maxtext_like.cli.{module_of(verb)}").run(rest)


def usage() -> str:
  """Return the text of ``maxtext-like --help``."""
  width = max(map(len, VERBS))
  verbs = "\n".join(f"  {verb:{width}}  {entry.summary}" for verb, entry in VERBS.items())
  return f"""usage: maxtext-like VERB ...

Pretrain and fine-tune Gemma 3/4, DeepSeek V3/V3.2 and Qwen3 models in JAX.

{verbs}

  maxtext-like train gemma4-tiny                   train a small Gemma 4 on the Python sources of this machine
  maxtext-like train gemma4-tiny steps=20 seed=1   the same with other settings
  maxtext-like train --help-keys learning          list keys with 'learning' in their name or description
  maxtext-like VERB --help                         arguments of a verb

MAXTEXT_LIKE_DEBUG=1 adds the traceback to an error message."""


def _unknown_verb(verb: str) -> str:
  from maxtext_like.config.problems import did_you_mean

  if verb.endswith((".yml", ".yaml")):
    return f"{verb!r} is not a verb\n  fix: maxtext-like train {verb}"
  near = did_you_mean(verb, VERBS)
  return f"unknown verb {verb!r}{near}\n  fix: use one of {', '.join(VERBS)}; see maxtext-like --help"


def printable(text: str) -> str:
  """Return text for a terminal with control characters, as from a file name, written as escapes."""
  return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def with_escaped_breaks(text: str, words: Sequence[str]) -> str:
  """Return text with the line breaks inside parts of the typed words (keys, values, names of files) written as escapes, so that
  they cannot forge a line."""
  for part in {part for word in words for part in re.split("[/=]", word) if "\n" in part.strip("\n")}:
    text = text.replace(part, part.replace("\n", "\\n"))
  return text


def shortened(text: str) -> str:
  """Return the text with the middle of every word of 1000 or more characters left out."""
  return re.sub(r"\S{1000,}", lambda word: f"{word[0][:200]}...({len(word[0])} characters)...{word[0][-50:]}", text)


if __name__ == "__main__":
  sys.exit(main())
