"""Classes of keys by the changes that are allowed between a checkpoint and the run that reads it.

A key declares its class as the type of its field: ``vocab_size: Shape[int]``. A key without a class is ``TRAINING``. Resume,
``init_from``, generate, forward, the list of changes and docs/reference/configuration.md read the classes from here. Every key
of ``model:`` and ``vision:`` declares one.
"""

import dataclasses
import enum
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


class KeyClass(enum.Enum):
  """Kinds of effects that a key has."""

  SHAPE = "shape"
  MATHEMATICS = "mathematics"
  DTYPE = "dtype"
  TRAINING = "training"

  @property
  def rule(self) -> str:
    """Return the rule for a run that reads a checkpoint with another value."""
    return _RULES[self]


_RULES = {
  KeyClass.SHAPE: "which arrays the model or the optimizer has, and their shapes; another value is refused",
  KeyClass.MATHEMATICS: "what a forward pass computes with the same weights; another value needs `allow_model_change=true`",
  KeyClass.DTYPE: "the dtype of stored arrays; another value needs `allow_dtype_change=true`",
  KeyClass.TRAINING: "how the model is trained; another value is accepted, and the run prints a line",
}

Shape = Annotated[T, KeyClass.SHAPE]
Mathematics = Annotated[T, KeyClass.MATHEMATICS]
StoredDtype = Annotated[T, KeyClass.DTYPE]
TrainingOnly = Annotated[T, KeyClass.TRAINING]


@dataclass(frozen=True)
class When:
  """A key does nothing unless another key of its section has a value.

  Attributes:
    key: the other key.
    value: the value that it needs; None: any value except false, 0 and null.
  """

  key: str
  value: Any = None

  def holds(self, section: Any) -> bool:
    """Return True if the key has an effect in a section."""
    found = getattr(section, self.key)
    return bool(found) if self.value is None else found == self.value


@dataclass(frozen=True)
class Adds:
  """Turning a key on adds a part to the layers. A new run may add it to weights without it: its parameters are initialized.

  Attributes:
    part: the name of the part in the names of parameters.
    stage: the key that says whether the forward pass uses the part.
    before: the value of that key with which the part is trained and not used.
  """

  part: str
  stage: str
  before: Any


@dataclass(frozen=True)
class SelectsTrained:
  """A key decides which parameters are trained: a resumed run keeps the optimizer state of those that still are."""


@dataclass(frozen=True)
class Marks:
  """Class and conditions that a key declares."""

  kind: KeyClass = KeyClass.TRAINING
  declared: bool = False
  when: tuple[When, ...] = ()
  adds: Adds | None = None
  selects_trained: bool = False


@functools.cache
def marks(section: type) -> Mapping[str, Marks]:
  """The marks of every key of a section's dataclass, by name."""
  hints = typing.get_type_hints(section, include_extras=True)
  found = {}
  for field in dataclasses.fields(section):
    extras = getattr(hints[field.name], "__metadata__", ())
    kinds = [extra for extra in extras if isinstance(extra, KeyClass)]
    assert len(kinds) <= 1, f"{field.name} of {section.__name__} declares {kinds}"
    found[field.name] = Marks(
      kind=kinds[0] if kinds else KeyClass.TRAINING,
      declared=bool(kinds),
      when=tuple(extra for extra in extras if isinstance(extra, When)),
      adds=next((extra for extra in extras if isinstance(extra, Adds)), None),
      selects_trained=any(isinstance(extra, SelectsTrained) for extra in extras),
    )
  return found


def does_something(section: Any, key: str) -> bool:
  """Return True if a key has an effect with the other values of its section."""
  return all(when.holds(section) for when in marks(type(section))[key].when)
