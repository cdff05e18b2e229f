"""Objectives by the value of ``objective``.

To add one, create a file in this folder named like that value, and add the name here. The file defines ``build(model) ->
Objective``, which raises UserError for settings that cannot be combined. This module does not import JAX, so that the
configuration can read the names.
"""

import importlib
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
  from maxtext_like.models.model import Model
  from maxtext_like.training.objectives.objective import Objective

Name = Literal["language_modelling"]
NAMES: tuple[Name, ...] = get_args(Name)


def make_objective(name: Name, model: "Model") -> "Objective":
  """Import the module of an objective and build the objective for a model."""
  return importlib.import_module(f"{__package__}.{name}").build(model)
