"""Where peft has the additions of an adapter, and which it has no place for (peft 0.21; read from its ``tuners``).

peft names what it adapts in two lists. A module of ``target_modules`` is a linear map, and may have DoRA and dropout. Each of
``target_parameters`` is a weight of some module, of two axes or, with those of all experts, of three (``ParamWrapper``): rank,
scale and rsLoRA are as ever, patterns are held against ``<module>.weight``, and the tensors of the file are named as those of
a module. But it is added to before anything is multiplied, so one of them leaves the whole adapter without DoRA and dropout.

Why a linear map may have to be a parameter: in models that had a module for every expert in transformers 4, peft takes every
gate, gate_proj, up_proj and down_proj of ``target_modules`` for those of experts, and leaves out the dense layers' and the
shared experts' (``transformers_weight_conversion``). It leaves parameters as they are. The router of these models is no linear
map there anyway.
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
  """A linear map with an addition.

  Attributes:
    module: its name in transformers' class.
    piece: of our parameters.
    as_parameter: peft has it in ``target_parameters``.
  """

  module: str
  piece: Piece
  as_parameter: bool

  @property
  def target(self) -> str:
    """What peft's lists and patterns call it."""
    return f"{self.module}.weight" if self.as_parameter else self.module


class Places(NamedTuple):
  """Where peft has the additions of an adapter.

  Attributes:
    maps: linear maps.
    experts: arrays of experts that have an addition, by name, with their pieces that have it.
    whole: tensors that are trained whole.
    without_dora: names, of all layers at once, of what peft has additions for, but no DoRA, which they are.
    unwritten: those of what is neither linear map nor experts.
  """

  maps: list[AdaptedModule]
  experts: dict[str, tuple[Tensor, list[Piece]]]
  whole: list[Tensor]
  without_dora: list[str]
  unwritten: list[str]

  @property
  def refusal(self) -> str | None:
    """Why the adapter cannot be written for peft; None: it can."""
    reasons = [f"peft has no DoRA of {', '.join(self.without_dora)}"] if self.without_dora else []
    reasons += [f"additions to {', '.join(self.unwritten)} are not written for peft"] if self.unwritten else []
    return "; ".join(reasons) or None


def places(adapter: Adapter, decoder: Decoder, decoder_block: str, *, nested: bool = False) -> Places:
  """Where peft has the additions of an adapter.

  Args:
    adapter: which weights it is for.
    decoder, decoder_block: the model.
    nested: transformers has the text model inside of another.
  """
  family = FAMILIES[decoder_block].huggingface
  takes = _takes_for_experts(decoder, family)
  found, without_dora, unwritten = Places([], {}, [], [], []), dict[str, None](), dict[str, None]()
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
  """Whether peft takes projections for those of experts, which it does by the model_type of config.json."""
  return bool(family.stacked) and (family.dense_is_moe or any(layer.cfg.ffn.experts for layer in decoder.layers))


def _of_all_layers(tensor: Tensor) -> str:
  return re.sub(r"\d+", "N", tensor.name.removesuffix(".weight"))


def name_of(decoder: Decoder, piece: Piece) -> str:
  """Our name of the weight that a piece is, ``layers.7.attention.q``."""
  names = row_names(decoder, piece.path)
  return names[piece.index[0]] if len(names) > 1 else names[0]


def name_in_transformers(tensor: Tensor, *, nested: bool) -> str:
  """The name of a tensor in transformers' class; nested: as of ``places``."""
  return (
    tensor.name if tensor.name == HEAD else f"model.{'language_model.' if nested and not tensor.vision else ''}{tensor.name}"
  )
