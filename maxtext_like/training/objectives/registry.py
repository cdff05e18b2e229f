"""Objectives by name. To add one: a file beside this one, and a line here."""

from collections.abc import Callable

from maxtext_like.models.placed import Model
from maxtext_like.training.objectives import language_modelling
from maxtext_like.training.objectives.objective import Objective

OBJECTIVES: dict[str, Callable[[Model], Objective]] = {
  "language_modelling": language_modelling.build,
}
"""Each makes the objective of a model. Raises UserError for values of the configuration that do not go together."""
