"""What the verbs share in reading their words: the model first, then what the configuration understands or refuses."""

import argparse
import os
import re
from collections.abc import Iterable

from maxtext_like.errors import UserError


def split_configuration(verb: str, description: str, argv: list[str], epilog: str = "") -> tuple[str, list[str]]:
  """Splits ``CONFIG [overlay.yml ...] [key=value ...]``; prints the help of the verb and exits when asked to.

  Args:
    verb: the verb, for the usage line.
    description: what it does.
    argv: the words after the verb.
    epilog: printed below the help, as it is.

  Raises:
    UserError: the first word is no configuration, and no word is ``model_name=MODEL`` or ``init_from=DIR``.

  Returns:
    The configuration and the other words in order. Words that look like options (``--steps=5``) are left in, since
    ``maxtext_like.config.overrides`` understands or refuses them.
  """
  if "-h" in argv or "--help" in argv:
    configuration_parser(verb, description, epilog).parse_args(["--help"])
  if not argv or argv[0].startswith("-") or "=" in argv[0] or argv[0] == "model_name":
    if names_model(argv):
      return "base.yml", argv
    if sources := initial_weights(argv):
      return sources[-1], argv  # a checkpoint names its model too
    written = f"; {argv[0]!r} is not one" if argv else ""
    raise UserError(
      f"no configuration named{written}\n  fix: maxtext-like {verb} MODEL [key=value ...], with a name as gemma4-tiny or a "
      "checkpoint's directory as MODEL"
    )
  return argv[0], argv[1:]


def initial_weights(words: list[str]) -> list[str]:
  """The values of ``init_from`` among the words."""
  return [word.partition("=")[2] for word in words if re.match(r"-*(checkpoint\.)?init_from=.", word)]


def names_model(words: list[str]) -> bool:
  """Whether the words name the model as MaxText's commands do, by ``model_name``, which is laid over the defaults."""
  return any(re.match(r"-*(model\.)?model_name(=|$)", word) for word in words)


def print_notes(notes: Iterable[str], margin: str = "") -> None:
  """What a configuration has to say to whoever runs it, with ``margin`` before every line."""
  for note in notes:
    print(f"{margin}note: " + note.replace("\n", f"\n{margin}  "))


def configuration_parser(verb: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
  """The parser that writes the help of a verb ``VERB CONFIG [key=value ...]``; a verb may add options of its own."""
  parser = argparse.ArgumentParser(
    prog=f"maxtext-like {verb}",
    usage=f"maxtext-like {verb} CONFIG [overlay.yml ...] [key=value ...]",
    description=description,
    epilog=epilog,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("CONFIG", help="a model's name, as gemma4-tiny, the path of a .yml file, or a checkpoint's directory")
  what = "files with some keys each, laid over the model file in order: your own settings, the mesh of a machine"
  parser.add_argument("overlay.yml", nargs="*", help=what)
  parser.add_argument("key=value", nargs="*", help="values laid over the files; maxtext-like train --help-keys lists the keys")
  return parser


def parse_words(
  parser: argparse.ArgumentParser, argv: list[str], needed: dict[str, str]
) -> tuple[argparse.Namespace, list[str]]:
  """Options of a verb and the words that are none of them, usually ``key=value``; prints the help and exits when asked to.

  Args:
    parser: of the verb, with ``exit_on_error=False`` and nothing required, which would end the process.
    argv: the words after the verb.
    needed: what has to be there, and how the help calls it.

  Raises:
    UserError: an option without its value, with a wrong one, or missing.
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


def on_the_host() -> None:
  """For verbs that move weights between files: JAX uses the memory of this machine, unless the environment says otherwise."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
