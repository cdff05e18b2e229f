"""Objectives by ``objective``. To add one: a file beside this one, named as the configuration names it, and its name here.

The file has ``build(model) -> Objective``, which raises UserError for values of the configuration that do not go together. This
module imports no JAX, so that the configuration may ask for the names.
"""

import importlib
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
  from maxtext_like.models.model import Model
  from maxtext_like.training.objectives.objective import Objective

Name = Literal["language_modelling"]
NAMES: tuple[Name, ...] = get_args(Name)


def make_objective(name: Name, model: "Model") -> "Objective":
  """The objective of that name, of a model; imports its module."""
  return importlib.import_module(f"{__package__}.{name}").build(model)
