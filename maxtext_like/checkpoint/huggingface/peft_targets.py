"""Decides how peft represents each adapted weight, and which ones it cannot represent (from the ``tuners`` of peft 0.21).

peft names adapted weights in two lists. An entry of ``target_modules`` is a linear map and may have DoRA and dropout. An entry
of ``target_parameters`` is a weight of a module with two axes, or three for the experts (``ParamWrapper``). Rank, scale and
rsLoRA work as for modules, patterns are matched against ``<module>.weight``, and the tensors are named like those of a module.
But its update is added to the weight before the product, so that a single such entry excludes DoRA and dropout for the whole
adapter.

Some linear maps must be parameters: in families whose experts were separate modules in transformers 4, peft takes every gate,
gate_proj, up_proj and down_proj in ``target_modules`` for an expert's, and skips those of dense layers and shared experts
(``transformers_weight_conversion``). It does not change parameters. The router of these families is not a linear map anyway.
"""

import re
from typing import NamedTuple

from maxtext_like.checkpoint.huggingface.family import HuggingFace
from maxtext_like.checkpoint.huggingface.tensors import Piece, Tensor, tensor_table
from maxtext_like.checkpoint.huggingface.tied import HEAD
from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.adapter import Adapter
from maxtext_like.models.naming import row_names
from maxtext_like.models.registry import FAMILIES

LINEAR = ("linear", "linear2")
_TAKEN_FOR_EXPERTS = re.compile(r"(?:^|\.)(?:gate|(?:gate|up|down)_proj)$")


class AdaptedModule(NamedTuple):
  """An adapted linear map.

  Attributes:
    module: its name in transformers' class.
    piece: the piece of our parameters.
    as_parameter: True if peft names it in ``target_parameters``.
  """

  module: str
  piece: Piece
  as_parameter: bool

  @property
  def target(self) -> str:
    """Its name in the lists and patterns of peft."""
    return f"{self.module}.weight" if self.as_parameter else self.module


class PeftTargets(NamedTuple):
  """How peft represents an adapter.

  Attributes:
    maps: adapted linear maps.
    experts: adapted arrays of experts by name, with their adapted pieces.
    whole: fully trained tensors.
    without_dora: names, with N for the layer, of weights for which peft supports LoRA but not the requested DoRA.
    unwritten: such names of weights that are neither linear maps nor experts.
  """

  maps: list[AdaptedModule]
  experts: dict[str, tuple[Tensor, list[Piece]]]
  whole: list[Tensor]
  without_dora: list[str]
  unwritten: list[str]

  @property
  def refusal(self) -> str | None:
    """The reason why the adapter cannot be written for peft; None if it can."""
    reasons = [f"peft does not support DoRA for {', '.join(self.without_dora)}"] if self.without_dora else []
    reasons += [f"peft cannot represent updates of {', '.join(self.unwritten)}"] if self.unwritten else []
    return "; ".join(reasons) or None


def find_targets(adapter: Adapter, decoder: Decoder, decoder_block: str, *, nested: bool = False) -> PeftTargets:
  """Returns how peft represents an adapter.

  Args:
    adapter: the adapter.
    decoder, decoder_block: the model.
    nested: True if transformers nests the text model inside another model.
  """
  family = FAMILIES[decoder_block].huggingface
  takes = _takes_for_experts(decoder, family)
  found, without_dora, unwritten = PeftTargets([], {}, [], [], []), dict[str, None](), dict[str, None]()
  adapted = lambda piece: piece.path in adapter.weights and name_of(decoder, piece) in adapter.names
  for tensor in tensor_table(decoder, family, stacked=True):
    if tensor.pieces[0].path in adapter.whole:
      found.whole.append(tensor)
      continue
    own = [piece for piece in tensor.pieces if adapted(piece)]
    if not own:
      continue
    name = name_in_transformers(tensor, nested=nested)
    experts, module = tensor.rule.kind == "experts", name.removesuffix(".weight")
    as_parameter = takes and _TAKEN_FOR_EXPERTS.search(module) is not None
    if not experts and tensor.rule.kind not in LINEAR:
      unwritten[_of_all_layers(tensor)] = None
    elif adapter.dora and (experts or as_parameter):
      without_dora[_of_all_layers(tensor)] = None
    elif experts:
      found.experts[name] = tensor, own
    else:
      found.maps.extend(AdaptedModule(module, piece, as_parameter) for piece in own)
  return found._replace(without_dora=list(without_dora), unwritten=list(unwritten))


def _takes_for_experts(decoder: Decoder, family: HuggingFace) -> bool:
  """Returns True if peft takes projections for those of experts, which depends on the model_type of config.json."""
  return bool(family.stacked) and (family.dense_is_moe or any(layer.cfg.ffn.experts for layer in decoder.layers))


def _of_all_layers(tensor: Tensor) -> str:
  return re.sub(r"\d+", "N", tensor.name.removesuffix(".weight"))


def name_of(decoder: Decoder, piece: Piece) -> str:
  """Returns our name of the weight of a piece, such as ``layers.7.attention.q``."""
  names = row_names(decoder, piece.path)
  return names[piece.index[0]] if len(names) > 1 else names[0]


def name_in_transformers(tensor: Tensor, *, nested: bool) -> str:
  """Returns the name of a tensor in transformers' class; ``nested`` as for ``find_targets``."""
  return (
    tensor.name if tensor.name == HEAD else f"model.{'language_model.' if nested and not tensor.vision else ''}{tensor.name}"
  )
