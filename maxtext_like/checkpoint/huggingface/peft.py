"""Reads and writes adapters in the format of peft 0.21: adapter_config.json (``LoraConfig``) and adapter_model.safetensors.

Every adapted linear map has two tensors, ``base_model.model.<module>.lora_A.weight`` [R, in] and ``...lora_B.weight`` [out, R].
Its weight is changed by ``lora_alpha / r`` (with rsLoRA ``/ sqrt(r)``) times B A. With DoRA ``...lora_magnitude_vector`` [out]
is the norm of each row of the sum. ``peft_targets`` decides whether the settings name a map as a module or as a parameter.
``peft_experts`` handles experts, which are arrays of a module instead of linear maps. The tensors of ``modules_to_save`` are
stored completely, under their names in the model: here the vision tower, its projector, the embedding and the head. If
embedding and head are one array, peft trains them as one only with ``ensure_weight_tying``, otherwise as separate copies.
"""

import functools
import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from maxtext_like.checkpoint.huggingface import peft_experts, peft_settings
from maxtext_like.checkpoint.huggingface.export import write_json
from maxtext_like.checkpoint.huggingface.peft_targets import LINEAR, find_targets, name_in_transformers
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.tensors import Piece, Tensor, tensor_table
from maxtext_like.checkpoint.huggingface.tied import EMBEDDING, HEAD
from maxtext_like.checkpoint.huggingface.writer import Source, new_directory, write
from maxtext_like.checkpoint.store import sidecar_files
from maxtext_like.config.adapter_keys import TABLES, AdapterConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.adapter import WHOLE, Adapter
from maxtext_like.models.registry import FAMILIES
from maxtext_like.storage import Place
from maxtext_like.strict_json import parse_file, printable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MERGE = "set use_multimodal=true if it belongs to a vision tower; else merge the adapter with peft and import the result"
_log = logging.getLogger(__name__)
_EMBEDDING, _HEAD = TABLES
_TENSOR = re.compile(
  r"(?:base_model\.model\.)?(.+)\.lora_(?:([AB])(?:\.default)?\.weight|magnitude_vector(?:\.default)?(?:\.weight)?)"
)


class Written(NamedTuple):
  """Summary of a written adapter.

  Attributes:
    maps: number of adapted maps.
    notes: settings that peft's format cannot express and that were left out.
  """

  maps: int
  notes: tuple[str, ...]


def write_adapter(
  out: Path | Place,
  adapter: Adapter,
  factors: dict[str, Any],
  decoder: Decoder,
  decoder_block: str,
  *,
  base: str | None,
  nested: bool,
  settings: AdapterConfig,
  files: Sequence[Path] = (),
) -> Written:
  """Writes an adapter as a directory that ``peft.PeftModel.from_pretrained`` loads.

  Args:
    out: a directory that does not exist or is empty.
    adapter: the adapter.
    factors: its arrays.
    decoder, decoder_block: the model.
    base: name of the base weights for the file; None if unknown.
    nested: True if transformers nests the text model inside another model.
    settings: settings of the adapter.
    files: files to copy, such as the tokenizer.

  Raises:
    UserError: peft cannot represent one of the adapted weights, or ``out`` cannot be written.
  """
  found = find_targets(adapter, decoder, decoder_block, nested=nested)
  if refusal := found.refusal:
    raise UserError(
      f"{printable(out)}: {refusal}\n  fix: export the merged weights (export --merge), or train with other lora_modules"
    )
  sources, rank, alpha = [], settings.lora_rank, settings.alpha
  ranks: dict[str, int] = {}
  alphas: dict[str, float] = {}

  def note(target: str, own: int, scale: float) -> None:
    ranks.update({target: own} if own != rank else {})
    own_alpha = float(f"{scale / settings.scale(own, 1.0):.9g}")
    alphas.update({target: own_alpha} if not math.isclose(own_alpha, alpha, rel_tol=1e-6) else {})

  # Linear maps, then experts, then tensors that are trained fully.
  for adapted in found.maps:
    module, piece = adapted.module, adapted.piece
    ab = _at(factors, piece.path)
    shapes = piece.hf_shape()
    own, scale = adapter.size(piece.path, piece.index[0] if piece.index else None)
    note(adapted.target, own, scale)
    sources.append(Source(f"{_PREFIX}{module}.lora_A.weight", "F32", (own, shapes[1]), _a(ab, piece, own)))
    sources.append(Source(f"{_PREFIX}{module}.lora_B.weight", "F32", (shapes[0], own), _b(ab, piece, own)))
    if adapter.dora:
      sources.append(Source(f"{_PREFIX}{module}.lora_magnitude_vector", "F32", (shapes[0],), _magnitude(ab, piece)))
  for name, (tensor, pieces) in found.experts.items():
    halves = [_half(adapter, factors, piece, has_addition=piece in pieces) for piece in tensor.pieces]
    (each, outputs, inputs), own = tensor.shape, sum(half.rank for half in halves)
    note(name, own, peft_experts.scale(halves))
    module = f"{_PREFIX}{peft_experts.wrapper(name, found.experts)}"
    for n, (letter, shape) in enumerate((("A", (each * own, inputs)), ("B", (outputs, own * each)))):
      values = lambda n=n, halves=halves: peft_experts.fused(halves)[n]
      sources.append(Source(f"{module}.lora_{letter}.weight", "F32", shape, values))
  arrays = {path: _at(factors, path)[WHOLE] for path in adapter.whole}
  for tensor in found.whole:
    values = lambda tensor=tensor: tensor.from_params(arrays).astype(np.float32)
    names = [name_in_transformers(tensor, nested=nested), *([HEAD] if tensor.name == EMBEDDING and decoder.cfg.tied else [])]
    sources += [Source(f"{_PREFIX}{name}", "F32", tensor.shape, values) for name in names]
  parameters = sorted([*found.experts, *(m.target for m in found.maps if m.as_parameter)])
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": rank,
    "lora_alpha": alpha,
    "rank_pattern": ranks,
    "alpha_pattern": alphas,
    "lora_dropout": 0.0 if parameters else adapter.dropout,  # peft refuses dropout together with target_parameters
    "use_rslora": settings.lora_rslora,
    "use_dora": adapter.dora,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    # Complete module paths, because a vision tower may have modules of the same names.
    "target_modules": sorted(m.target for m in found.maps if not m.as_parameter),
  }
  if parameters:
    config["target_parameters"] = parameters
  if found.whole:
    config["modules_to_save"] = sorted({tensor.name.partition(".")[0] for tensor in found.whole})
  if decoder.cfg.tied and any(tensor.name == EMBEDDING for tensor in found.whole):
    config["ensure_weight_tying"] = True
  with new_directory(out, CONFIG) as new:
    write(new.path, sources, shard_size=2**62, single=WEIGHTS)
    sidecar_files.copy(files, new.path)
    write_json(new.path / CONFIG, config)
  lost = f"lora_dropout = {adapter.dropout:g} is written as 0, because peft does not support it with target_parameters"
  return Written(len(found.maps) + len(found.experts), (lost,) if parameters and adapter.dropout else ())


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
  for key in path:
    tree = tree[key]
  return tree


def _half(adapter: Adapter, factors: dict[str, Any], piece: Piece, *, has_addition: bool) -> peft_experts.Half:
  """Returns the update of one of the weights in an array of experts."""

  def values() -> tuple[np.ndarray, np.ndarray]:
    a, b = (np.asarray(_at(factors, piece.path)[name][piece.index], np.float32) for name in ("lora_a", "lora_b"))
    return a[..., :rank], b[..., :rank, :]

  rank, scale = adapter.size(piece.path, piece.index[0] if piece.index else None) if has_addition else (0, 1.0)
  return peft_experts.Half(rank, scale, piece.shape[2], values)


def _a(ab: dict[str, Any], piece: Piece, rank: int) -> Any:
  """Returns a function that makes A in peft's layout, [R, in]."""

  def values() -> np.ndarray:
    a = np.asarray(ab["lora_a"][piece.index], np.float32)
    return a.reshape(-1, a.shape[-1]).T[:rank]

  return values


def _b(ab: dict[str, Any], piece: Piece, rank: int) -> Any:
  """Returns a function that makes B in peft's layout, [out, R]."""

  def values() -> np.ndarray:
    b = np.asarray(ab["lora_b"][piece.index], np.float32)
    return b.reshape(b.shape[0], -1).T[:, :rank]

  return values


def _magnitude(ab: dict[str, Any], piece: Piece) -> Any:
  """Returns a function that makes the magnitudes in peft's layout, [out]."""
  return lambda: np.asarray(ab["lora_magnitude"][piece.index], np.float32).reshape(-1)


@dataclass(frozen=True)
class AdaptedMap:
  """A linear map or an array of experts, and its update from a peft file.

  Attributes:
    tensor: the tensor of the model.
    a, b: float32 [R, in] and [out, R]; for experts with a leading expert axis.
    scale: factor of b a.
    magnitude: float32 [out], norms of the outputs (DoRA); None without DoRA.
  """

  tensor: Tensor
  a: np.ndarray
  b: np.ndarray
  scale: float
  magnitude: np.ndarray | None

  @property
  def rank(self) -> int:
    """Rank R."""
    return self.a.shape[-2]

  def factors(self, piece: Piece) -> dict[str, np.ndarray]:
    """Returns "lora_a" and "lora_b" of one of our parameters, with inputs or outputs flattened to one axis."""
    b = self.b if piece.half is None else np.split(self.b, 2, axis=-2)[piece.half]
    own = {"lora_a": self.a.swapaxes(-1, -2), "lora_b": b.swapaxes(-1, -2)}
    return own | ({} if self.magnitude is None else {"lora_magnitude": self.magnitude})

  def additions(self) -> Iterator[tuple[Piece, np.ndarray, np.ndarray | None]]:
    """Yields, for each of our parameters, its piece, the update in float32 in our layout, and the norms of its outputs."""
    product = self.scale * (self.b @ self.a)
    for piece in self.tensor.pieces:
      yield piece, piece.to_ours(product), self.magnitude


@dataclass(frozen=True)
class PeftAdapter:
  """A peft adapter matched with a model.

  Attributes:
    directory: its directory.
    maps: adapted maps.
    whole: tensors that replace those of the model, float32.
  """

  directory: Path
  maps: tuple[AdaptedMap, ...]
  whole: tuple[tuple[Tensor, np.ndarray], ...] = ()

  @property
  def vision_tower(self) -> Literal["projector", "trained"] | None:
    """The value of the key ``vision_tower`` that matches the fully trained tensors."""
    paths = {piece.path[:2] for tensor, _ in self.whole if tensor.vision for piece in tensor.pieces}
    return None if not paths else "projector" if paths == {("vision", "projector")} else "trained"

  @property
  def modules_to_save(self) -> tuple[str, ...]:
    """The value of the key ``modules_to_save`` that matches the fully trained tables."""
    return tuple(sorted(tensor.name.removesuffix(".weight") for tensor, _ in self.whole if not tensor.vision))


def is_adapter(directory: Path) -> bool:
  """Returns True if the directory contains a peft adapter."""
  return (directory / CONFIG).is_file()


def read_settings(directory: Path) -> dict[str, Any]:
  """Reads adapter_config.json.

  Raises:
    UserError: the file is malformed, or the adapter is not a LoRA adapter.
  """
  config = parse_file(directory / CONFIG, limit=4 << 20)
  if not isinstance(config, dict) or config.get("peft_type") != "LORA":
    kind = printable(config.get("peft_type")) if isinstance(config, dict) else "?"
    raise UserError(
      f"{printable(directory / CONFIG)}: not a LoRA adapter (peft_type {kind})", fix="name the directory of a LoRA adapter"
    )
  peft_settings.require_valid(config, printable(directory / CONFIG))
  return config


@functools.cache
def _warn_once(message: str) -> None:
  _log.warning("%s", message)


def read_adapter(directory: Path, decoder: Decoder, decoder_block: str) -> PeftAdapter:
  """Reads a peft adapter.

  Raises:
    UserError: as ``read_settings``; the adapter belongs to another model, or adapts something other than linear maps.
  """
  where, config = printable(directory / CONFIG), read_settings(directory)
  peft_settings.require_supported(config, where)
  if unread := peft_settings.unread(config):
    _warn_once(f"{where}: not read: {', '.join(unread)}; if these settings change the adapter, the results will differ")
  # The model's tensors that an adapter may refer to, by their names without prefix.
  file = SafetensorsFile(directory / WEIGHTS)
  family = FAMILIES[decoder_block].huggingface
  table = tensor_table(decoder, family)
  tensors = {_bare(t.name): t for t in table if t.rule.kind in LINEAR}
  stacked = {_bare(t.name): t for t in tensor_table(decoder, family, stacked=True) if t.rule.kind == "experts"}
  apart = {_bare(t.name): t for t in table if t.vision or t.name in (EMBEDDING, HEAD)} if config.get("modules_to_save") else {}
  same = _of_one_table(file, apart, bool(config.get("ensure_weight_tying")), where) if _EMBEDDING in apart else None
  whole = []
  found: dict[str, dict[str, np.ndarray]] = {}
  # Sort the tensors of the file by module.
  for name in file.entries:
    if name == same:
      continue
    match = _TENSOR.fullmatch(name)
    if match is None and config.get("modules_to_save"):
      whole.append(_whole(file, name, apart, where))
      continue
    if match is None and name.endswith(".base_layer.weight"):
      raise UserError(
        f"{printable(file.path)}: '{printable(name)}' is a weight of the base model, which peft saved next to its update\n"
        "  fix: save_pretrained(DIR, save_embedding_layers=False)"
      )
    if match is None:
      raise UserError(
        f"{printable(file.path)}: tensor '{printable(name)}' does not belong to a LoRA adapter of linear maps",
        fix="merge the adapter with peft (merge_and_unload) and import the result",
      )
    part = match[2] or "magnitude_vector"
    found.setdefault(match[1], {})[f"lora_{part}"] = np.asarray(file.tensor(name), np.float32)
  # Check shapes and settings of each module.
  parts = ["lora_A", "lora_B", *(["lora_magnitude_vector"] if config.get("use_dora") else [])]
  targets = config.get("target_parameters") or []
  of_experts = peft_experts.matched(found, stacked, targets, _bare, printable(file.path))
  maps = []
  for module, own in sorted(found.items()):
    name, tensor = of_experts.get(module) or (module, tensors.get(_bare(module)))
    if tensor is None or set(own) != set(parts):
      lacks = "the model has no such map" if tensor is None else f"has {', '.join(sorted(own))} instead of {', '.join(parts)}"
      raise UserError(
        f"{printable(file.path)}: '{printable(module)}': {lacks}",
        fix="use an adapter of this model, or save it again with peft",
      )
    a, b, magnitude = own["lora_A"], own["lora_B"], own.get("lora_magnitude_vector")
    each = tensor.shape[0] if module in of_experts else 1
    fits = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] and (b.shape[0], a.shape[1]) == tensor.shape[-2:]
    if not fits or a.shape[0] % each or not a.shape[0]:
      raise UserError(
        f"{printable(file.path)}: '{printable(module)}': lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit a map of "
        f"{list(tensor.shape)}",
        fix="use an adapter that was trained on this model",
      )
    if magnitude is not None and magnitude.size != tensor.shape[0]:
      raise UserError(
        f"{printable(file.path)}: '{printable(module)}': {magnitude.size} norms for {tensor.shape[0]} outputs",
        fix="use an adapter that was trained on this model",
      )
    if not all(np.isfinite(x).all() for x in own.values()):
      raise UserError(
        f"{printable(file.path)}: '{printable(module)}' contains non-finite numbers",
        fix="use an earlier checkpoint of the adapter",
      )
    magnitude = None if magnitude is None else magnitude.reshape(-1)
    if module in of_experts:
      a, b = peft_experts.apart(a, b, each)
    if any(f".{name}.weight".endswith(f".{target}") for target in targets):
      name += ".weight"  # peft matches its patterns against this name
    elif module not in of_experts:
      peft_settings.require_target(config, module, where)
    if (rank := peft_settings.rank(config, name, where)) != a.shape[-2]:
      raise UserError(
        f"{where}: '{printable(module)}' has rank {rank} by r and rank_pattern, but its tensors have rank {a.shape[-2]}\n"
        "  why: the update is scaled by lora_alpha / r, so its scale is unknown\n"
        f"  fix: if the file was edited, write the rank of the tensors, r = {a.shape[-2]}; otherwise save the adapter again"
      )
    maps.append(AdaptedMap(tensor, a, b, peft_settings.scale(config, name, a.shape[-2], where), magnitude))
  if not maps:
    raise UserError(
      f"{printable(file.path)}: contains no tensors of an adapter",
      fix="save the adapter again with peft: model.save_pretrained(DIR)",
    )
  # Every entry of modules_to_save must have been found.
  modules = config.get("modules_to_save") or []
  parts_of_whole = {part for tensor, _ in whole for part in tensor.name.split(".")}
  if _EMBEDDING in parts_of_whole and apart[_EMBEDDING] is apart.get(_HEAD):
    parts_of_whole.add(_HEAD)
  for module in modules if isinstance(modules, list) else [modules]:
    if str(module).split(".")[-1] not in parts_of_whole:
      raise UserError(
        f"{where}: modules_to_save = {printable(modules)} is not supported: {printable(module)} is not the embedding, the head "
        f"or a part of this model's vision tower\n  fix: {_MERGE}"
      )
  return PeftAdapter(directory, tuple(maps), tuple(whole))


def _of_one_table(file: SafetensorsFile, apart: dict[str, Tensor], tied: bool, where: str) -> str | None:
  """Finds the redundant second copy of the table in an adapter for a model whose head is its embedding.

  Args:
    file: tensors of the adapter.
    apart: the model's tensors that ``modules_to_save`` may name, by bare names. The head is added to it.
    tied: True if peft trained embedding and head as one.
    where: name of the settings file.

  Returns:
    The tensor name of the second copy; None if there is only one.

  Raises:
    UserError: embedding and head were trained separately.
  """
  if _HEAD in apart:
    return None  # the model has a separate head
  there = [name for module in (_EMBEDDING, _HEAD) for name in file.entries if _bare(name.removeprefix(_PREFIX)) == module]
  if not there:
    return None
  apart[_HEAD] = apart[_EMBEDDING]
  first, second = (np.asarray(file.tensor(name), np.float32) for name in (there[0], there[-1]))
  equal = len(there) == 2 and np.array_equal(first, second)
  if not equal and (len(there) == 2 or not tied):
    raise UserError(
      f"{where}: modules_to_save: '{printable(there[0])}' was trained {'next to a head' if len(there) == 2 else 'alone'}\n"
      "  why: embedding and head of this model are one array, but peft makes two of them unless ensure_weight_tying is set\n"
      "  fix: train with LoraConfig(modules_to_save=['embed_tokens'], ensure_weight_tying=True)\n"
      "       or merge the adapter with peft and import the result"
    )
  return there[1] if len(there) == 2 else None


def _whole(file: SafetensorsFile, name: str, known: dict[str, Tensor], where: str) -> tuple[Tensor, np.ndarray]:
  """Returns a tensor of ``modules_to_save``, and the tensor of the model that it replaces."""
  tensor = known.get(_bare(name.removeprefix(_PREFIX)))
  if tensor is None:
    raise UserError(
      f"{where}: modules_to_save: '{printable(name)}' is not the embedding, the head or an array of this model's tower\n"
      "  why: only these can be trained fully next to an adapter\n"
      f"  fix: {_MERGE}"
    )
  values = np.asarray(file.tensor(name), np.float32)
  if values.shape != tensor.shape or not np.isfinite(values).all():
    what = f"{list(values.shape)} instead of {list(tensor.shape)}" if values.shape != tensor.shape else "non-finite numbers"
    raise UserError(
      f"{printable(file.path)}: '{printable(name)}': {what}", fix="use an adapter of this model, or save it again with peft"
    )
  return tensor, values


def _bare(module: str) -> str:
  """Returns the name of a module or tensor without the prefix before the layers, which differs between classes and files."""
  name = module.removesuffix(".weight")
  return re.sub(r"^(?:(?:model|language_model)\.)+", "", name)
