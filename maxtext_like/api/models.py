"""``list_models``: lists the model configurations with their parameter counts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxtext_like.config.files import configs_folder, model_names
from maxtext_like.config.load import load_config
from maxtext_like.config.model import ExpertsConfig, ModelConfig
from maxtext_like.config.precision_keys import PrecisionConfig
from maxtext_like.config.schema import Config
from maxtext_like.config.vision import VisionConfig


@dataclass(frozen=True)
class Counts:
  """Number of parameters of a model: in total, and used by one token (fewer in a mixture of experts)."""

  total: int
  active: int


def parameter_counts(model: ModelConfig, precision: PrecisionConfig, vision: VisionConfig | None = None) -> Counts:
  """Count parameters by their shapes. Non-trainable ones (router bias, layer scalar) are buffers and not counted.

  ``vision`` with ``use_multimodal`` adds the vision tower and its projector.
  """
  from maxtext_like.layers.param import Param
  from maxtext_like.models.build import build_decoder, precision_of

  chosen = model.num_experts_per_tok / model.num_experts if isinstance(model, ExpertsConfig) and model.num_experts else 1

  def leaves(tree: Mapping, routed: bool) -> Iterator[tuple[Param, bool]]:
    for name, branch in tree.items():
      if isinstance(branch, Param):
        yield branch, routed
      else:
        yield from leaves(branch, routed or name == "experts")

  total = active = 0
  for param, routed in leaves(build_decoder(model, precision_of(precision), vision=vision).params(), routed=False):
    if not param.trainable:
      continue
    size = math.prod(param.shape)
    total += size
    active += round(size * chosen) if routed else size
  return Counts(total, active)


@dataclass(frozen=True)
class Listed:
  """A model configuration.

  Attributes:
    name: name for ``load_config``.
    counts: parameter counts.
    config: its configuration without overrides.
    about: one-line description.
  """

  name: str
  counts: Counts
  config: Config
  about: str


def list_models() -> list[Listed]:
  """Return every model configuration, sorted by name. Parameters are counted by their shapes."""
  found = []
  for name in model_names():
    c = load_config(name).config
    found.append(Listed(name, parameter_counts(c.model, c.precision, c.vision), c, _first_comment(name)))
  return found


def _first_comment(name: str) -> str:
  first = (configs_folder() / "models" / f"{name}.yml").read_text("utf-8").partition("\n")[0]
  return first.removeprefix("# ") if first.startswith("# ") else ""
