"""``maxtext-like config``: prints the resolved configuration as YAML with the origin of each value."""

from maxtext_like import load_config
from maxtext_like.cli.arguments import print_notes, split_configuration

DESCRIPTION = "Prints the resolved configuration as a YAML file that can be used again. Comments show where each value was set."
EXAMPLES = """examples:
  maxtext-like config gemma4-31b
  maxtext-like config gemma4-31b gpu/h200.yml steps=20 dtype=float32 > my.yml"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  config, overrides = split_configuration("config", DESCRIPTION, argv, EXAMPLES)
  loaded = load_config(config, *overrides)
  print(loaded.to_yaml(), end="")
  print_notes(loaded.notes, "# ")
  return 0
