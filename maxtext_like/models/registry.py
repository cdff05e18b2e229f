"""The families of models, a line each. What a family is lies in its folder; whoever needs a part of it asks here.

The parts belong to different layers of the program, and each is loaded by name when it is first asked for: so the
configuration may read a family's fields without JAX.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from maxtext_like.analysis.risk.model_risk import Formula
  from maxtext_like.checkpoint.huggingface.family import HuggingFace
  from maxtext_like.config.maxtext_family import MaxText
  from maxtext_like.config.model import ModelConfig
  from maxtext_like.config.vision import VisionConfig


@dataclass(frozen=True)
class Family:
  """A family of models: the ``decoder_block`` of a configuration and the package that holds

  - ``config.py``: ``Config``, its keys in ``model:`` and their checks; ``Vision``, those in ``vision:``, if it has a tower;
    ``SPELLINGS``, its tokenizers' special tokens by what they mean; ``chat_template``, if one is published;
  - ``maxtext.py``: ``MAXTEXT``, what MaxText's files and keys mean for it;
  - ``model.py``: ``decoder``, which builds its layers; ``tower``, if it has one for images;
  - ``huggingface.py``: ``HUGGING_FACE``, its config.json and the names of its tensors;
  - ``risk.py``: ``RISK``, how large its numbers can become, if somebody has written it down.

  Attributes:
    name: the value of ``decoder_block``.
    package: where the parts are.
  """

  name: str
  package: str

  def _part(self, name: str) -> ModuleType:
    return importlib.import_module(f"{self.package}.{name}")

  @property
  def config(self) -> "type[ModelConfig]":
    """What ``model:`` is made into."""
    return self._part("config").Config

  @property
  def vision(self) -> "type[VisionConfig] | None":
    """What ``vision:`` is made into; None: the family has no tower."""
    return getattr(self._part("config"), "Vision", None)

  @property
  def spellings(self) -> Mapping[str, tuple[str, ...]]:
    """How its tokenizers spell special tokens, by what they mean."""
    return getattr(self._part("config"), "SPELLINGS", {})

  def chat_template(self, model: "ModelConfig") -> str | None:
    """The name of the chat template that is published for a model (data/chat/registry.py); None: its checkpoint has one."""
    made = getattr(self._part("config"), "chat_template", None)
    return None if made is None else made(model)

  @property
  def maxtext(self) -> "MaxText":
    """What MaxText's files and keys mean for it."""
    return self._part("maxtext").MAXTEXT

  @property
  def huggingface(self) -> "HuggingFace":
    """What it is called at Hugging Face."""
    return self._part("huggingface").HUGGING_FACE

  @property
  def decoder(self) -> Any:
    """(model, precision, kernel, platform) -> (``DecoderConfig``, layers)."""
    return self._part("model").decoder

  @property
  def risk(self) -> "Formula | None":
    """How large its numbers can become; None: nobody has written it down."""
    there = importlib.util.find_spec(f"{self.package}.risk") is not None
    return self._part("risk").RISK if there else None

  def tower(self, model: Any, vision: Any) -> Any:
    """The configuration of the vision tower and projector that belong to a decoder.

    Raises:
      ValueError: the family has no tower, or sizes that no tower can have.
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
