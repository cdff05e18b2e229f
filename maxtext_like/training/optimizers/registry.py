"""Loads an optimizer by ``opt_type``. The names are in ``config/choices.py``; each is a file of this folder.

The file has ``build(training) -> Rule``.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from maxtext_like.config.training_keys import TrainingConfig
  from maxtext_like.training.optimizers.rule import Rule


def make_rule(training: "TrainingConfig") -> "Rule":
  """Return the update rule that ``training.opt_type`` names; imports its module."""
  return importlib.import_module(f"{__package__}.{training.opt_type}").build(training)
