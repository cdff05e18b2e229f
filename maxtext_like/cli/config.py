"""``maxtext-like config``: prints the resolved configuration as YAML, each value with the place it comes from."""

from maxtext_like import load_config
from maxtext_like.cli.arguments import print_notes, split_configuration

DESCRIPTION = "Prints the resolved configuration as YAML that can be used again; comments tell where values come from."
EXAMPLES = """examples:
  maxtext-like config gemma4-31b
  maxtext-like config gemma4-31b gpu/h200.yml steps=20 dtype=float32 > my.yml"""


def run(argv: list[str]) -> int:
  """Prints the configuration; see ``DESCRIPTION``."""
  config, overrides = split_configuration("config", DESCRIPTION, argv, EXAMPLES)
  loaded = load_config(config, *overrides)
  print(loaded.to_yaml(), end="")
  print_notes(loaded.notes, "# ")
  return 0
