"""The parts of a model family that the configuration reads: its keys, tokens and MaxText translation.

The folders are imported by name at first use. ``models/registry.py`` adds the parts that need JAX.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from maxtext_like.config import choices

if TYPE_CHECKING:
  from maxtext_like.config.maxtext_family import MaxText
  from maxtext_like.config.model import ModelConfig
  from maxtext_like.config.vision import VisionConfig


@dataclass(frozen=True)
class FamilyKeys:
  """Configuration of a model family.

  - ``config.py`` has ``Config``, the keys of ``model:`` with their checks; ``Vision``, the keys of ``vision:``, if the family
    has a vision tower; ``SPELLINGS``, special tokens of its tokenizers by meaning; ``chat_template``, if one is published.
  - ``maxtext.py`` has ``MAXTEXT``, the translation of MaxText's files and keys.

  Attributes:
    name: value of ``decoder_block``.
    package: package with the parts.
  """

  name: str
  package: str

  def _part(self, name: str) -> ModuleType:
    return importlib.import_module(f"{self.package}.{name}")

  @property
  def config(self) -> "type[ModelConfig]":
    """Dataclass of the section ``model:``."""
    return self._part("config").Config

  @property
  def vision(self) -> "type[VisionConfig] | None":
    """Dataclass of the section ``vision:``, or None if the family has no vision tower."""
    return getattr(self._part("config"), "Vision", None)

  @property
  def spellings(self) -> Mapping[str, tuple[str, ...]]:
    """Spellings of special tokens in the family's tokenizers, by meaning."""
    return getattr(self._part("config"), "SPELLINGS", {})

  def chat_template(self, model: "ModelConfig") -> str | None:
    """Return the name of a model's published chat template (data/chat/registry.py), or None if only its checkpoint has one."""
    made = getattr(self._part("config"), "chat_template", None)
    return None if made is None else made(model)

  @property
  def maxtext(self) -> "MaxText":
    """Translation of MaxText's files and keys."""
    return self._part("maxtext").MAXTEXT


FAMILIES = {name: FamilyKeys(name, f"maxtext_like.models.{name}") for name in choices.FAMILIES}
