"""Optimizers by ``opt_type``.

To add one, create a file in this folder named like the value of ``opt_type``, and add its name and keys here. The file defines
``build(training) -> Rule``. This module does not import JAX, so that the configuration can read the names.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
  from maxtext_like.config.training_keys import TrainingConfig
  from maxtext_like.training.optimizers.rule import Rule

Name = Literal["adamw", "adafactor", "lion", "sgd"]
NAMES: tuple[Name, ...] = get_args(Name)

KEYS: Mapping[str, tuple[str, ...]] = {
  "adamw": ("adam_b1", "adam_b2", "adam_eps"),
  "adafactor": ("adafactor_momentum_rank", "adam_b1"),  # adam_b1 is only used with a momentum rank above 0
  "lion": ("adam_b1", "adam_b2"),
  "sgd": ("sgd_momentum",),
}
"""Keys of ``training:`` that each optimizer's ``build`` reads. Setting another optimizer's key is reported."""


def make_rule(training: "TrainingConfig") -> "Rule":
  """Import the module of the update rule that a ``training:`` section names, and build the rule."""
  return importlib.import_module(f"{__package__}.{training.opt_type}").build(training)
