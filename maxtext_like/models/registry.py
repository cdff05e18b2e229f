"""The families of models: one line each. A family is a folder; other code asks this registry for its parts.

The parts belong to different layers of the program. Each is imported by name on first use, so the configuration can read the
keys of a family without JAX.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from maxtext_like.checkpoint.huggingface.family import HuggingFace
  from maxtext_like.config.maxtext_family import MaxText
  from maxtext_like.config.model import ModelConfig
  from maxtext_like.config.vision import VisionConfig


@dataclass(frozen=True)
class Family:
  """A family of models: a value of ``decoder_block``, and a package with these modules:

  - ``config.py``: ``Config``, its keys in ``model:`` and their checks; ``Vision``, its keys in ``vision:``, if it has a vision
  tower; ``SPELLINGS``, the special tokens of its tokenizers by meaning; ``chat_template``, if one is published;
  - ``maxtext.py``: ``MAXTEXT``, the meaning of MaxText's files and keys for this family;
  - ``model.py``: ``decoder``, which builds its layers; ``tower``, if it has a vision tower;
  - ``huggingface.py``: ``HUGGING_FACE``, its config.json and the names of its tensors.

  Attributes:
    name: the value of ``decoder_block``.
    package: the package with the modules.
  """

  name: str
  package: str

  def _part(self, name: str) -> ModuleType:
    return importlib.import_module(f"{self.package}.{name}")

  @property
  def config(self) -> "type[ModelConfig]":
    """The class of the ``model:`` section."""
    return self._part("config").Config

  @property
  def vision(self) -> "type[VisionConfig] | None":
    """The class of the ``vision:`` section; None: the family has no vision tower."""
    return getattr(self._part("config"), "Vision", None)

  @property
  def spellings(self) -> Mapping[str, tuple[str, ...]]:
    """The spellings of special tokens in its tokenizers, by meaning."""
    return getattr(self._part("config"), "SPELLINGS", {})

  def chat_template(self, model: "ModelConfig") -> str | None:
    """Return the name of the chat template that is published for a model (data/chat/registry.py). None: use its
    checkpoint's."""
    made = getattr(self._part("config"), "chat_template", None)
    return None if made is None else made(model)

  @property
  def maxtext(self) -> "MaxText":
    """The meaning of MaxText's files and keys for this family."""
    return self._part("maxtext").MAXTEXT

  @property
  def huggingface(self) -> "HuggingFace":
    """Its config.json and tensor names at Hugging Face."""
    return self._part("huggingface").HUGGING_FACE

  @property
  def decoder(self) -> Any:
    """(model, precision, kernel, platform) -> (``DecoderConfig``, layers)."""
    return self._part("model").decoder

  def tower(self, model: Any, vision: Any) -> Any:
    """Return the configuration of the vision tower and projector of a decoder.

    Raises:
      ValueError: the family has no vision tower, or its sizes are impossible.
    """
    made = getattr(self._part("model"), "tower", None)
    if made is None:
      raise ValueError(f"decoder_block {self.name} has no vision tower")
    return made(model, vision)


FAMILIES: dict[str, Family] = {
  "gemma3": Family("gemma3", "maxtext_like.models.gemma3"),
  "gemma4": Family("gemma4", "maxtext_like.models.gemma4"),
  "deepseek": Family("deepseek", "maxtext_like.models.deepseek"),
  "qwen3": Family("qwen3", "maxtext_like.models.qwen3"),
}
