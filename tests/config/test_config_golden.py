"""Every model's resolved configuration against its golden copy, so that no change of a default goes unseen.

After a change that is meant: ``python tests/config/test_config_golden.py`` writes the copies anew; read the difference.
"""

import re
from pathlib import Path

import pytest

from maxtext_like.config.files import model_names
from maxtext_like.config.load import load_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "configs"


def resolved(name):
  """The resolved YAML; lines of files are left out, since they move with every comment."""
  return re.sub(r"(\.yml):\d+$", r"\1", load_config(name).to_yaml(), flags=re.MULTILINE)


@pytest.mark.parametrize("name", model_names())
def test_resolved_configuration_is_the_golden_one(name):
  assert resolved(name) == (GOLDEN / f"{name}.yml").read_text("utf-8")


def test_there_is_no_golden_copy_of_a_model_that_is_gone():
  assert sorted(path.stem for path in GOLDEN.glob("*.yml")) == model_names()


if __name__ == "__main__":
  for model in model_names():
    (GOLDEN / f"{model}.yml").write_text(resolved(model), encoding="utf-8")
