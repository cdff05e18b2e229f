"""What a rule of descent is: a direction, and a bound on what it computes.

To add one: a file with a frozen dataclass of these members and a ``build``, and its name in ``registry.py``.
"""

from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import optax


class Bound(NamedTuple):
  """Float32 scalars that no magnitude exceeds in the update of a rule, but for roundings; infinite where none is known.

  Attributes:
    direction: of the direction of descent.
    moment: of the next state's numbers that are stored in ``mu_dtype``.
    state: of all numbers of the next state.
    computed: of everything else on the way, in float32.
  """

  direction: jax.Array
  moment: jax.Array
  state: jax.Array
  computed: jax.Array


class Rule(Protocol):
  """A direction of descent, in float32 and without the learning rate. A frozen dataclass.

  Attributes:
    bounded_to: ``bound`` of an ordinary state is finite for gradients up to this magnitude, so that the step need not look at
      their update; infinite: for all that are ordinary.
    first, second: the fields of the direction's state that hold the moments, as ``mu_dtype`` and ``nu_dtype`` mean them; None:
      there is none.
    whole: the direction of an array needs all of it, so that the steps of all arrays are there before one is applied.
    smaller: keys of another rule, whose moments take next to no memory, as a remedy where a run does not fit; None: none.
  """

  bounded_to: ClassVar[float]
  whole: ClassVar[bool]
  smaller: ClassVar[str | None]
  second: ClassVar[str | None]

  @property
  def first(self) -> str | None: ...

  def direction(self, mu_dtype: Any, spec: Any) -> optax.GradientTransformation:
    """Gradients to the direction, of leaves of which ``spec`` has the Params; the first moment alone is stored in
    ``mu_dtype``."""
    ...

  def bound(self, gradient: jax.Array, state: jax.Array) -> Bound:
    """The bound for gradients and a state whose numbers have at most these magnitudes, float32 scalars.

    The second moment is taken to be no less than 0, as every finite update leaves it.
    """
    ...
