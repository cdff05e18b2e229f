"""Optimizers by ``opt_type``. To add one: a file beside this one, a line here, and its name in config/schema.py."""

from collections.abc import Callable
from typing import Any

from maxtext_like.config.schema import TrainingConfig
from maxtext_like.training.optimizers import adafactor, adamw, lion, sgd
from maxtext_like.training.optimizers.optimizer import Optimizer
from maxtext_like.training.optimizers.rule import Rule

RULES: dict[str, Callable[[TrainingConfig], Rule]] = {
  "adafactor": adafactor.build,
  "adamw": adamw.build,
  "lion": lion.build,
  "sgd": sgd.build,
}


def make_optimizer(training: TrainingConfig, spec: Any, weight_dtype: str) -> Optimizer:
  """The optimizer of a configuration.

  Args:
    training: the ``training:`` section.
    spec: Params of the trainable leaves (None elsewhere).
    weight_dtype: of the stored parameters: the default of ``mu_dtype``.
  """
  rule = RULES[training.opt_type](training)
  return Optimizer(rule, training.adam_weight_decay, training.mu_dtype or weight_dtype, weight_dtype, spec)
