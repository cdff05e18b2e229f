"""Types for the translation of MaxText's files and keys in a model family: ``MAXTEXT`` in ``models/<family>/maxtext.py``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from maxtext_like.config.yaml_file import Entry, Scalar, parse_value, to_text


@dataclass(frozen=True)
class Meaning:
  """Translation of a value of MaxText.

  Attributes:
    value: value here.
    note: difference to know about; "" if the values mean the same.
    refused: advice for a value without a translation; "" if ``value`` is the translation.
  """

  value: object = None
  note: str = ""
  refused: str = ""


def entry_of(key: str, value: object, source: Entry) -> Entry:
  """Return an entry with a translated value and the origin of ``source``."""
  if isinstance(value, tuple):
    return Entry(key, parse_value(to_text(value), source.origin), source.origin)
  return Entry(key, Scalar(to_text(value), plain=True, line=source.node.line), source.origin)


def same_number(text: str, number: str) -> bool:
  """Return True if two texts are numbers of the same value."""
  try:
    return float(text) == float(number)
  except ValueError:
    return False


@dataclass
class ModelFile:
  """A model file of MaxText, with the values that MaxText adds to it and the keys that it ignores.

  Attributes:
    given: entries of the file, by key.
    name: name of the model.
    assumed: values by our key name, used if the file does not set them.
    dropped: keys of the file without effect, or with another meaning.
    extra: entries in addition to those of the file.
  """

  given: Mapping[str, Entry]
  name: str
  assumed: dict[str, object] = field(default_factory=dict)
  dropped: set[str] = field(default_factory=set)
  extra: list[Entry] = field(default_factory=list)

  def text(self, key: str) -> str:
    """Return the text of a key, or "" if the file does not set it."""
    node = self.given[key].node if key in self.given else None
    return node.text if isinstance(node, Scalar) else ""

  def number(self, key: str) -> float:
    """Return the number of a key, or 0 if the file does not set it."""
    text = self.text(key).replace("_", "")
    return float(text) if same_number(text, text) else 0.0

  @property
  def source(self) -> Entry:
    """Origin of values that MaxText adds."""
    place = self.given.get("decoder_block", next(iter(self.given.values())))
    return Entry("", place.node, f"MaxText's choice for {self.name}")


@dataclass(frozen=True, kw_only=True)
class MaxText:
  """How MaxText describes a model family.

  Attributes:
    decoder_blocks: further values of ``decoder_block`` in MaxText that mean this family.
    fixed: keys whose value the family fixes, with the accepted values.
    ignored: our keys that the family does not have, but that MaxText's files set, each with the reason why they have no effect.
    values: translations of values of MaxText, by our key name.
    defaults: defaults of MaxText's base.yml (for token ids: of the tokenizer) for keys of the model.
    complete: adds the choices of MaxText's code for the family to a file.
    differing: (resolved values) -> MaxText's defaults for keys of the family, if this project has others.
    image_rows: differences about images without a key: (subject, here, in MaxText).
    notes: (resolved values) -> notes on a file, one sentence each.
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
