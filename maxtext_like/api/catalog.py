"""What there is to choose from: the model configurations that come with the package, and the keys that say how they run."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxtext_like.config import foreign_names, maxtext
from maxtext_like.config.document import Key
from maxtext_like.config.document import keys as documented
from maxtext_like.config.files import configs_folder, model_names
from maxtext_like.config.load import load_config
from maxtext_like.config.model import ExpertsConfig, ModelConfig
from maxtext_like.config.precision_keys import PrecisionConfig
from maxtext_like.config.problems import did_you_misspell
from maxtext_like.config.schema import Config
from maxtext_like.config.vision import VisionConfig
from maxtext_like.errors import UserError


@dataclass(frozen=True)
class Counts:
  """Parameters of a model: all of them, and those that one token passes through (fewer where experts are routed)."""

  total: int
  active: int


def parameter_counts(model: ModelConfig, precision: PrecisionConfig, vision: VisionConfig | None = None) -> Counts:
  """Counts from the declared shapes; non-trainable ones (router bias, layer scalar) are buffers and not counted.

  ``vision`` with ``use_multimodal`` adds the tower and its projector.
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
    name: what ``load_config`` takes.
    counts: of its parameters.
    config: of it, as it comes.
    about: what it is.
  """

  name: str
  counts: Counts
  config: Config
  about: str


def list_models() -> list[Listed]:
  """Every model configuration, by name. Parameters are counted by shape arithmetic, without arrays."""
  found = []
  for name in model_names():
    c = load_config(name).config
    found.append(Listed(name, parameter_counts(c.model, c.precision, c.vision), c, _first_comment(name)))
  return found


def _first_comment(name: str) -> str:
  first = (configs_folder() / "models" / f"{name}.yml").read_text("utf-8").partition("\n")[0]
  return first.removeprefix("# ") if first.startswith("# ") else ""


@dataclass(frozen=True)
class Keys:
  """Keys of a configuration. As text: a line each, ``section.key  (type; default ...)  meaning``.

  Attributes:
    keys: with section, name, kind (its type), default and meaning, in the order of ``configs/base.yml``.
    elsewhere: what other trainers' names that match mean here, a line each.
  """

  keys: tuple[Key, ...]
  elsewhere: tuple[str, ...]

  def __str__(self) -> str:
    return "\n".join(
      [*(f"{k.section}.{k.name}  ({k.kind}; default {k.default})  {k.meaning}" for k in self.keys), *self.elsewhere]
    )


def list_keys(pattern: str = "") -> Keys:
  """The keys that ``load_config`` takes, and whoever takes its keywords.

  Args:
    pattern: a regular expression; those whose section.name or meaning has it, upper or lower case.

  Raises:
    UserError: no key has it, or it is no regular expression.
  """
  try:
    matches = re.compile(pattern, re.IGNORECASE).search
  except re.error as error:
    raise UserError(f"{pattern!r}: not a regular expression: {error}") from error
  found = tuple(k for k in documented() if matches(f"{k.section}.{k.name}") or matches(k.meaning))
  elsewhere = [f"{theirs}: MaxText's name of {ours}" for theirs, ours in maxtext.RENAMED.items() if pattern and matches(theirs)]
  foreign = {theirs: said for theirs, said in foreign_names.NAMES.items() if pattern and re.fullmatch(pattern, theirs, re.I)}
  if not found and not elsewhere and not foreign and (said := foreign_names.find(pattern)) is not None:
    foreign = {pattern: said}
  elsewhere += [f"{theirs}: no key here: {said.says}\n  fix: {said.fix('VALUE')}" for theirs, said in foreign.items()]
  if not found and not elsewhere:
    raise UserError(f"{pattern!r}: no such key{did_you_misspell(pattern, [k.name for k in documented()])}")
  return Keys(found, tuple(elsewhere))
