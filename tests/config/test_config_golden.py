"""Every model's resolved configuration against its golden copies, so that each change of a default is noticed.

Each value is stored once: ``golden/configs/defaults.txt`` has those of base.yml, and a model's file has those that the model
changes. After an intended change, ``python tests/config/test_config_golden.py`` writes new copies. Review the difference.
"""

import re
from pathlib import Path

import pytest

from maxtext_like.config.files import model_names
from maxtext_like.config.load import load_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "configs"


def resolved(name):
  """Return the resolved YAML without line numbers, which change with every comment."""
  return re.sub(r"(\.yml):\d+$", r"\1", load_config(name).to_yaml(), flags=re.MULTILINE)


def own(text):
  """Return the lines of a resolved configuration whose values do not come from base.yml."""
  return "".join(line for line in text.splitlines(keepends=True) if not line.endswith("# configs/base.yml\n"))


def defaults():
  """Return the resolved lines that come from base.yml in any model, with their sections."""
  lines: dict[str, None] = {}
  for name in model_names():
    section = ""
    for line in resolved(name).splitlines():
      if line and not line.startswith((" ", "#")):
        section = line
      elif line.endswith("# configs/base.yml"):
        lines[f"{section} {line.split('  # ')[0].strip()}"] = None
  return "".join(f"{line}\n" for line in sorted(lines))


@pytest.mark.parametrize("name", model_names())
def test_resolved_configuration_is_the_golden_one(name):
  assert own(resolved(name)) == (GOLDEN / f"{name}.yml").read_text("utf-8")


def test_defaults_are_the_golden_ones():
  assert defaults() == (GOLDEN / "defaults.txt").read_text("utf-8")


def test_there_is_no_golden_copy_of_a_model_that_is_gone():
  assert sorted(path.stem for path in GOLDEN.glob("*.yml")) == model_names()


if __name__ == "__main__":
  (GOLDEN / "defaults.txt").write_text(defaults(), encoding="utf-8")
  for model in model_names():
    (GOLDEN / f"{model}.yml").write_text(own(resolved(model)), encoding="utf-8")
