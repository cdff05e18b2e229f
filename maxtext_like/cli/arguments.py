"""Argument parsing and printing that the verbs share.

``verb_parser`` and ``parse_words`` read the options of a verb. ``split_configuration`` reads a model, overlays and
``key=value`` words.
"""

import argparse
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TextIO

from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.overrides import is_key
from maxtext_like.config.paths import existing_path
from maxtext_like.config.problems import alternatives, nearest
from maxtext_like.errors import UserError

NOTHING: Mapping[str, str] = MappingProxyType({})


class Report(Protocol):
  """A result of the API that has a JSON form."""

  def to_json(self) -> Any:
    """Return the result as lists, dicts, strings and numbers."""
    ...


def split_configuration(verb: str, description: str, argv: list[str], epilog: str = "") -> tuple[str, list[str]]:
  """Split ``CONFIG [overlay.yml ...] [key=value ...]``. With --help, print the help of the verb and exit.

  Args:
    verb: name of the verb, for the usage line.
    description: description of the verb.
    argv: words after the verb.
    epilog: text printed after the help.

  Returns:
    The configuration, and the other words in order. Words that look like options (``--steps=5``) are included;
    ``maxtext_like.config.overrides`` parses them or reports them.

  Raises:
    UserError: the first word is not a configuration, and no word is ``model_name=MODEL`` or ``init_from=DIR``.
  """
  if "-h" in argv or "--help" in argv:
    configuration_parser(verb, description, epilog).parse_args(["--help"])
  if not argv or argv[0].startswith("-") or "=" in argv[0] or argv[0] == "model_name":
    if names_model(argv):
      return "base.yml", argv
    if sources := initial_weights(argv):
      return sources[-1], argv  # a checkpoint contains the configuration of its model
    written = f": {argv[0]!r} is not a configuration" if argv else ""
    raise UserError(
      f"the model is missing{written}\n  fix: maxtext-like {verb} MODEL [key=value ...]; MODEL is a name, such as gemma4-tiny, "
      "or a checkpoint's directory"
    )
  return argv[0], argv[1:]


def initial_weights(words: list[str]) -> list[str]:
  """Return the values of ``init_from`` in the words."""
  return [word.partition("=")[2] for word in words if re.match(r"-*(checkpoint\.)?init_from=.", word)]


def names_model(words: list[str]) -> bool:
  """Return True if the words name the model with ``model_name``, as MaxText's commands do."""
  return any(re.match(r"-*(model\.)?model_name(=|$)", word) for word in words)


def print_notes(notes: Iterable[str], margin: str = "", file: TextIO | None = None) -> None:
  """Print the notes of a configuration or a result, with ``margin`` before every line, to ``file`` (default: stdout)."""
  for note in notes:
    print(f"{margin}note: " + note.replace("\n", f"\n{margin}  "), file=file)


def write_json(found: Report, path: str | None) -> None:
  """Write a result as JSON; do nothing if ``path``, the value of --json, is None."""
  if path is not None:
    Path(path).write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")


def verb_parser(verb: str, usage: str = "", description: str = "", epilog: str = "") -> argparse.ArgumentParser:
  """Return a parser for the options of a verb, to be read with ``parse_words``. It raises errors instead of exiting.

  Args:
    verb: name of the verb.
    usage: arguments in the usage line. If empty, the parser has no --help; ``split_configuration`` then prints the help.
    description: description of the verb.
    epilog: text printed after the help.
  """
  return argparse.ArgumentParser(
    prog=f"maxtext-like {verb}",
    usage=f"maxtext-like {verb} {usage}",
    description=description,
    epilog=epilog,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=bool(usage),
    allow_abbrev=False,
    exit_on_error=False,
  )


def add_model(parser: argparse.ArgumentParser) -> None:
  """Add the argument of verbs that evaluate a checkpoint."""
  parser.add_argument(
    "model", nargs="?", type=checkpoint_path, metavar="RUN_OR_HF_DIR", help="a run, or a Hugging Face checkpoint"
  )


def add_adapters(parser: argparse.ArgumentParser) -> None:
  """Add the option --adapter of verbs that can add adapters to the weights that they load."""
  what = "LoRA adapter to add to the weights: of peft, or a run with lora_rank; may be repeated"
  parser.add_argument("--adapter", type=existing_path, metavar="DIR", action="append", default=[], dest="adapters", help=what)


def configuration_parser(verb: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
  """Return a parser for the help of a verb ``VERB CONFIG [key=value ...]``; the verb may add options."""
  parser = verb_parser(verb, "CONFIG [overlay.yml ...] [key=value ...]", description, epilog)
  parser.add_argument("CONFIG", help="name of a model, such as gemma4-tiny, path of a .yml file, or directory of a checkpoint")
  what = "files with keys that override the model file, in order: your settings, or the mesh of a machine"
  parser.add_argument("overlay.yml", nargs="*", help=what)
  parser.add_argument(
    "key=value", nargs="*", help="values that override the files; maxtext-like train --help-keys lists the keys"
  )
  return parser


def parse_words(
  parser: argparse.ArgumentParser, argv: list[str], needed: Mapping[str, str] = NOTHING
) -> tuple[argparse.Namespace, list[str]]:
  """Return the options of a verb and the other words, usually ``key=value``. With --help, print the help and exit.

  Args:
    parser: a ``verb_parser`` without required arguments, since these exit the process.
    argv: words after the verb.
    needed: required arguments, with their names in the help.

  Raises:
    UserError: an option has no value or a wrong one, or a required argument is missing.
  """
  fix = f"\n  fix: see {parser.prog} --help"
  try:
    options, rest = parser.parse_known_args(argv)
  except argparse.ArgumentError as error:
    raise UserError(f"{parser.prog}: {error}{'' if '  fix: ' in str(error) else fix}") from None
  for name, shown in needed.items():
    value = getattr(options, name)
    if value is None or (not shown.startswith("-") and "=" in value):
      raise UserError(f"{parser.prog} needs {shown}{fix}")
  return options, rest


def require_keys(parser: argparse.ArgumentParser, words: list[str], known: Collection[str] = ()) -> list[str]:
  """Return the words, each of which must be ``key=value``. Raises UserError for another one, as a misspelled option.

  Args:
    parser: the parser of the verb, which has left these words.
    words: the words.
    known: keys of the verb in addition to those of a configuration.
  """
  if unknown := [word for word in words if word.startswith("-") or "=" not in word]:
    raise _unknown_word(parser, unknown[0], known)
  return words


def require_none(parser: argparse.ArgumentParser, words: list[str]) -> None:
  """Raise UserError if a word is left that is not an option of the verb."""
  if words:
    raise _unknown_word(parser, words[0])


def _unknown_word(parser: argparse.ArgumentParser, word: str, known: Collection[str] = ()) -> UserError:
  """Return the error for a word that a verb does not have, with the option or key that may be meant, or all options."""
  name = word.partition("=")[0]
  options = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", parser.format_help()))
  options.pop("--help", None)
  meant = nearest(name, options) if name.startswith("-") else []
  if (key := name.lstrip("-").replace("-", "_")) in known or is_key(key):
    meant.append(f"{key}=VALUE")
  write = f"write {alternatives(meant)}" if meant else f"the options are {', '.join(options)}"
  return UserError(f"{parser.prog.split()[-1]}: unknown word {word!r}", fix=f"{write}; see {parser.prog} --help")


def on_the_host() -> None:
  """Make JAX use the CPU, unless JAX_PLATFORMS is set. For verbs that only move weights between files."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
