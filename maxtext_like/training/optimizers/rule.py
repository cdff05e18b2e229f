"""The interface of an update rule: a direction, and a bound on everything it computes.

To add a rule, write a file with a frozen dataclass that has these members and a ``build`` function, and add its name to
``registry.py``.
"""

from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import optax


class Bound(NamedTuple):
  """Float32 scalars that bound all magnitudes in the update of a rule, apart from rounding; infinite if no bound is known.

  Attributes:
    direction: bound on the update direction.
    moment: bound on the elements of the next state that are stored in ``mu_dtype``.
    state: bound on all elements of the next state.
    computed: bound on all intermediate float32 values.
  """

  direction: jax.Array
  moment: jax.Array
  state: jax.Array
  computed: jax.Array


class Rule(Protocol):
  """An update rule: a direction in float32, without the learning rate. A frozen dataclass.

  Attributes:
    bounded_to: ``bound`` of an ordinary state is finite for gradients up to this magnitude, so the step need not inspect the
      update. Infinite if that holds for all ordinary gradients.
    first, second: the fields of the direction's state that hold the moments which ``mu_dtype`` and ``nu_dtype`` refer to; None
      if the rule has no such moment.
    whole: the direction of an array needs the complete array, so the updates of all arrays exist in memory before the first is
      applied.
    smaller: settings of another rule whose moments take almost no memory, suggested when a run does not fit; None if there is
      no suggestion.
  """

  bounded_to: ClassVar[float]
  whole: ClassVar[bool]
  smaller: ClassVar[str | None]
  second: ClassVar[str | None]

  @property
  def first(self) -> str | None: ...

  def direction(self, mu_dtype: Any, spec: Any) -> optax.GradientTransformation:
    """Return the transformation from gradients to directions, for leaves with the Params in ``spec``. Only the first moment is
    stored in ``mu_dtype``."""
    ...

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    """Return the bound for gradients and a state whose elements have at most these magnitudes (float32 scalars).

    The second moment is assumed to be at least 0, which every finite update guarantees.
    """
    ...
