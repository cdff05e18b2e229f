"""The model families with all their parts. The names are in ``config/choices.py``; a family is a folder of ``models/``.

Each part is imported by name at first use, because the parts belong to different layers of the program.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maxtext_like.config import choices
from maxtext_like.config.families import FamilyKeys

if TYPE_CHECKING:
  from maxtext_like.checkpoint.huggingface.family import HuggingFace


@dataclass(frozen=True)
class Family(FamilyKeys):
  """A model family: its configuration (``config/families.py``) and the parts that build and convert its models.

  - ``model.py`` has ``decoder``, which builds the layers, and ``tower`` if the family has a vision tower.
  - ``huggingface.py`` has ``HUGGING_FACE``, the translation of config.json and of tensor names.
  """

  @property
  def huggingface(self) -> "HuggingFace":
    """Translation of config.json and of tensor names."""
    return self._part("huggingface").HUGGING_FACE

  @property
  def decoder(self) -> Any:
    """(model, precision, kernel, platform) -> (``DecoderConfig``, layers)."""
    return self._part("model").decoder

  def tower(self, model: Any, vision: Any) -> Any:
    """Return the configuration of the vision tower and projector of a decoder.

    Raises:
      ValueError: the family has no vision tower, or its sizes are invalid.
    """
    made = getattr(self._part("model"), "tower", None)
    if made is None:
      raise ValueError(f"decoder_block {self.name} has no vision tower")
    return made(model, vision)


FAMILIES = {name: Family(name, f"maxtext_like.models.{name}") for name in choices.FAMILIES}
