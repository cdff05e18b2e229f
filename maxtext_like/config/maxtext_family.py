"""What a family of models says of MaxText's files and keys: the ``MAXTEXT`` of ``models/<family>/maxtext.py``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from maxtext_like.config.yaml_file import Entry, Scalar, parse_value, to_text


@dataclass(frozen=True)
class Meaning:
  """What a value of MaxText's is here.

  Attributes:
    value: ours.
    note: what to know about it; empty where it is simply the same.
    refused: there is none: what to write instead. Empty where there is one.
  """

  value: object = None
  note: str = ""
  refused: str = ""


def entry_of(key: str, value: object, source: Entry) -> Entry:
  """An entry with a value of ours, told to come from where the source was written."""
  if isinstance(value, tuple):
    return Entry(key, parse_value(to_text(value), source.origin), source.origin)
  return Entry(key, Scalar(to_text(value), plain=True, line=source.node.line), source.origin)


def same_number(text: str, number: str) -> bool:
  """Whether two texts are numbers, and the same."""
  try:
    return float(text) == float(number)
  except ValueError:
    return False


@dataclass
class ModelFile:
  """A model file of MaxText's, and what MaxText itself adds to it and ignores of it.

  Attributes:
    given: its keys.
    name: of the model.
    assumed: values by our name where the file says nothing.
    dropped: keys of the file that do nothing, or mean another thing.
    extra: entries beside those of the file.
  """

  given: Mapping[str, Entry]
  name: str
  assumed: dict[str, object] = field(default_factory=dict)
  dropped: set[str] = field(default_factory=set)
  extra: list[Entry] = field(default_factory=list)

  def text(self, key: str) -> str:
    """What is written at a key; empty: nothing."""
    node = self.given[key].node if key in self.given else None
    return node.text if isinstance(node, Scalar) else ""

  def number(self, key: str) -> float:
    """The number at a key, or 0."""
    text = self.text(key).replace("_", "")
    return float(text) if same_number(text, text) else 0.0

  @property
  def source(self) -> Entry:
    """Where what is added comes from."""
    place = self.given.get("decoder_block", next(iter(self.given.values())))
    return Entry("", place.node, f"what MaxText does for {self.name}")


@dataclass(frozen=True, kw_only=True)
class MaxText:
  """A family in MaxText.

  Attributes:
    decoder_blocks: other values of ``decoder_block`` that are this family there.
    fixed: keys that say what the family always does, with the values that are accepted.
    ignored: keys of ours that the family has not got and MaxText's files give it all the same, each with what holds instead.
    values: values of MaxText's that keys of ours do not have, by our key.
    defaults: what MaxText's base.yml (for the tokens: the tokenizer) says of a model where the file does not.
    complete: adds to a file what MaxText's code does for the family.
    differing: MaxText's defaults of keys of the family that this project decides otherwise, for a resolved configuration.
    image_rows: what no key says about images: of what, here, in MaxText.
    notes: what to know of a file, given the resolved values, a sentence each.
  """

  decoder_blocks: tuple[str, ...] = ()
  fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
  ignored: Mapping[str, str] = field(default_factory=dict)
  values: Mapping[str, Mapping[str, Meaning]] = field(default_factory=dict)
  defaults: Mapping[str, object] = field(default_factory=dict)
  complete: Callable[[ModelFile], None] = lambda file: None
  differing: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda values: {}
  image_rows: tuple[tuple[str, str, str], ...] = ()
  notes: Callable[[Mapping[str, object]], tuple[str, ...]] = lambda values: ()
