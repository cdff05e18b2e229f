"""Argument parsing that the verbs share: the model first, then overlays and ``key=value`` words."""

import argparse
import os
import re
from collections.abc import Iterable

from maxtext_like.errors import UserError


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
      f"the model is missing{written}\n  fix: maxtext-like {verb} MODEL [key=value ...]; MODEL is a name, as gemma4-tiny, or a "
      "checkpoint's directory"
    )
  return argv[0], argv[1:]


def initial_weights(words: list[str]) -> list[str]:
  """Return the values of ``init_from`` in the words."""
  return [word.partition("=")[2] for word in words if re.match(r"-*(checkpoint\.)?init_from=.", word)]


def names_model(words: list[str]) -> bool:
  """Return True if the words name the model with ``model_name``, as MaxText's commands do."""
  return any(re.match(r"-*(model\.)?model_name(=|$)", word) for word in words)


def print_notes(notes: Iterable[str], margin: str = "") -> None:
  """Print the notes of a configuration, with ``margin`` before every line."""
  for note in notes:
    print(f"{margin}note: " + note.replace("\n", f"\n{margin}  "))


def configuration_parser(verb: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
  """Return a parser for the help of a verb ``VERB CONFIG [key=value ...]``; the verb may add options."""
  parser = argparse.ArgumentParser(
    prog=f"maxtext-like {verb}",
    usage=f"maxtext-like {verb} CONFIG [overlay.yml ...] [key=value ...]",
    description=description,
    epilog=epilog,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("CONFIG", help="name of a model, as gemma4-tiny, path of a .yml file, or directory of a checkpoint")
  what = "files with keys that override the model file, in order: your settings, or the mesh of a machine"
  parser.add_argument("overlay.yml", nargs="*", help=what)
  parser.add_argument(
    "key=value", nargs="*", help="values that override the files; maxtext-like train --help-keys lists the keys"
  )
  return parser


def parse_words(
  parser: argparse.ArgumentParser, argv: list[str], needed: dict[str, str]
) -> tuple[argparse.Namespace, list[str]]:
  """Return the options of a verb and the other words, usually ``key=value``. With --help, print the help and exit.

  Args:
    parser: parser of the verb, with ``exit_on_error=False`` and without required arguments, since these exit the process.
    argv: words after the verb.
    needed: required arguments, with their names in the help.

  Raises:
    UserError: an option has no value or a wrong one, or a required argument is missing.
  """
  fix = f"\n  fix: see {parser.prog} --help"
  try:
    options, rest = parser.parse_known_args(argv)
  except argparse.ArgumentError as error:
    raise UserError(f"{parser.prog}: {error}{fix}") from None
  for name, shown in needed.items():
    value = getattr(options, name)
    if value is None or (not shown.startswith("-") and "=" in value):
      raise UserError(f"{parser.prog} needs {shown}{fix}")
  return options, rest


def require_keys(verb: str, words: list[str]) -> list[str]:
  """Return the words, each of which must be ``key=value``. Raises UserError for another one, as a misspelled option."""
  if unknown := [word for word in words if word.startswith("-") or "=" not in word]:
    raise UserError(f"{verb}: unknown word {unknown[0]!r}\n  fix: see maxtext-like {verb} --help")
  return words


def on_the_host() -> None:
  """Make JAX use the CPU, unless JAX_PLATFORMS is set. For verbs that only move weights between files."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
