"""Loads an objective by name. The names are in ``config/choices.py``; each is a file of this folder.

The file has ``build(model) -> Objective``, which raises UserError for a configuration that the objective does not support.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from maxtext_like.models.model import Model
  from maxtext_like.training.objectives.objective import Objective


def make_objective(name: str, model: "Model") -> "Objective":
  """Return the objective of that name for a model; imports its module."""
  return importlib.import_module(f"{__package__}.{name}").build(model)
