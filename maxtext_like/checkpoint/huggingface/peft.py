"""Adapters as peft writes and loads them: adapter_config.json and adapter_model.safetensors (peft 0.21, ``LoraConfig``).

Every adapted linear map has two tensors, ``base_model.model.<module>.lora_A.weight`` [R, in] and ``...lora_B.weight`` [out, R];
what is added to its weight is ``lora_alpha / r`` (with rsLoRA ``/ sqrt(r)``) times B A.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_like.checkpoint.huggingface.export import new_directory, write_json
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.tensors import Piece, Tensor, tensor_table
from maxtext_like.checkpoint.huggingface.tied import HEAD
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.adapter import Adapter
from maxtext_like.models.naming import row_names
from maxtext_like.models.registry import FAMILIES
from maxtext_like.strict_json import parse_file, printable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LINEAR = ("linear", "linear2")


def write_adapter(
  out: Path, adapter: Adapter, factors: dict[str, Any], decoder: Decoder, decoder_block: str, *, base: str | None, nested: bool,
  rslora: bool,
) -> int:  # fmt: skip
  """Writes an adapter as a directory that ``peft.PeftModel.from_pretrained`` loads.

  Args:
    out: a directory that does not exist, or an empty one.
    adapter: which weights it is for.
    factors: its arrays.
    decoder, decoder_block: the model.
    base: what the weights below it are called; None: nobody knows.
    nested: transformers has the text model inside of another.
    rslora: the scale is said as ``lora_alpha / sqrt(r)``.

  Returns:
    The number of adapted maps.

  Raises:
    UserError: a weight that peft has no place for, or ``out`` cannot be written.
  """
  family = FAMILIES[decoder_block].huggingface
  fused = bool(family.stacked) and any(layer.cfg.ffn.experts for layer in decoder.layers)
  found: list[tuple[str, Tensor, Piece]] = []
  refused: dict[str, None] = {}
  for tensor in tensor_table(decoder, family):
    for piece in tensor.pieces:
      if piece.path not in adapter.weights or _name(decoder, piece) not in adapter.names:
        continue
      own = ".".join(piece.path[2:])
      # Beside fused experts peft 0.21 takes every gate_proj, up_proj and down_proj for theirs, and leaves out the others.
      taken = fused and re.search(r"(gate|up|down)_proj\.weight$", tensor.name) is not None
      if tensor.rule.kind not in _LINEAR or own in family.stacked or taken or "router" in piece.path:
        refused[re.sub(r"\d+", "N", tensor.name)] = None
      else:
        found.append((_module(tensor, nested), tensor, piece))
  if refused:
    raise UserError(
      f"{printable(out)}: peft has no place for additions to {', '.join(refused)} in this family\n"
      "  fix: export the weights with the additions added, or train with other lora_modules, as the projections of attention"
    )
  sources = []
  for module, _, piece in found:
    ab = _at(factors, piece.path)
    shapes = piece.hf_shape()
    sources.append(Source(f"{_PREFIX}{module}.lora_A.weight", "F32", (adapter.rank, shapes[1]), _a(ab, piece)))
    sources.append(Source(f"{_PREFIX}{module}.lora_B.weight", "F32", (shapes[0], adapter.rank), _b(ab, piece)))
  alpha = adapter.scale * (math.sqrt(adapter.rank) if rslora else adapter.rank)
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": adapter.rank,
    "lora_alpha": alpha,
    "lora_dropout": 0.0,
    "use_rslora": rslora,
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    # Whole paths: a tower may have modules of the same names.
    "target_modules": sorted(module for module, _, _ in found),
  }
  with new_directory(out) as part:
    write(part, sources, shard_size=2**62, single=WEIGHTS)
    write_json(part / CONFIG, config)
  return len(found)


def _name(decoder: Decoder, piece: Piece) -> str:
  names = row_names(decoder, piece.path)
  return names[piece.index[0]] if len(names) > 1 else names[0]


def _module(tensor: Tensor, nested: bool) -> str:
  """The path of a tensor's module in transformers' class."""
  name = tensor.name.removesuffix(".weight")
  return name if tensor.name == HEAD else f"model.{'language_model.' if nested and not tensor.vision else ''}{name}"


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
  for key in path:
    tree = tree[key]
  return tree


def _a(ab: dict[str, Any], piece: Piece) -> Any:
  """A as peft has it, [R, in]."""

  def values() -> np.ndarray:
    a = np.asarray(ab["lora_a"][piece.index], np.float32)
    return a.reshape(-1, a.shape[-1]).T

  return values


def _b(ab: dict[str, Any], piece: Piece) -> Any:
  """B as peft has it, [out, R]."""

  def values() -> np.ndarray:
    b = np.asarray(ab["lora_b"][piece.index], np.float32)
    return b.reshape(b.shape[0], -1).T

  return values


@dataclass(frozen=True)
class PeftAdapter:
  """An adapter that peft wrote, matched with a model.

  Attributes:
    directory: of it.
    pairs: (tensor of the model, A [R, in], B [out, R], scale) each.
  """

  directory: Path
  pairs: tuple[tuple[Tensor, np.ndarray, np.ndarray, float], ...]

  def additions(self) -> Iterator[tuple[Piece, np.ndarray]]:
    """What is added to each of our parameters: its place, and float32 in our layout."""
    for tensor, a, b, scale in self.pairs:
      product = scale * (b.astype(np.float32) @ a.astype(np.float32))
      for piece in tensor.pieces:
        yield piece, piece.to_ours(product)


def is_adapter(directory: Path) -> bool:
  """Whether peft wrote it."""
  return (directory / CONFIG).is_file()


def read_adapter(directory: Path, decoder: Decoder, decoder_block: str) -> PeftAdapter:
  """Reads an adapter of peft's.

  Raises:
    UserError: malformed, of another kind than LoRA, of another model, or with parts that are not for linear maps.
  """
  where = printable(directory / CONFIG)
  config = parse_file(directory / CONFIG, limit=4 << 20)
  if not isinstance(config, dict) or config.get("peft_type") != "LORA":
    raise UserError(
      f"{where}: not a LoRA adapter (peft_type {printable(config.get('peft_type')) if isinstance(config, dict) else '?'})"
    )
  for key in ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "fan_in_fan_out", "target_parameters"):
    if config.get(key):
      raise UserError(f"{where}: {key} = {printable(config[key])} is not supported\n  fix: an adapter of plain LoRA or rsLoRA")
  file = SafetensorsFile(directory / WEIGHTS)
  tensors = {_bare(t.name): t for t in tensor_table(decoder, FAMILIES[decoder_block].huggingface) if t.rule.kind in _LINEAR}
  found: dict[str, dict[str, np.ndarray]] = {}
  for name in file.entries:
    match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight", name)
    if match is None:
      raise UserError(f"{printable(file.path)}: tensor '{printable(name)}' is none of a LoRA adapter of linear maps")
    found.setdefault(match[1], {})[match[2]] = file.tensor(name)
  pairs = []
  for module, both in sorted(found.items()):
    tensor = tensors.get(_bare(module))
    if tensor is None or set(both) != {"A", "B"}:
      lacks = "the model has no such map" if tensor is None else "lora_A or lora_B is missing"
      raise UserError(f"{printable(file.path)}: '{printable(module)}': {lacks}")
    a, b = both["A"], both["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != tensor.shape:
      raise UserError(
        f"{printable(file.path)}: '{printable(module)}': lora_A {list(a.shape)} and lora_B {list(b.shape)} make no map of "
        f"{list(tensor.shape)}"
      )
    if not (np.isfinite(a.astype(np.float32)).all() and np.isfinite(b.astype(np.float32)).all()):
      raise UserError(f"{printable(file.path)}: '{printable(module)}' holds numbers that are not finite")
    pairs.append((tensor, a, b, _scale(config, module, a.shape[0], where)))
  if not pairs:
    raise UserError(f"{printable(file.path)}: no tensors of an adapter")
  return PeftAdapter(directory, tuple(pairs))


def _bare(module: str) -> str:
  """A module's or a tensor's name without what comes before the layers, which differs between classes and files."""
  name = module.removesuffix(".weight")
  return re.sub(r"^(?:(?:model|language_model)\.)+", "", name)


def _scale(config: dict[str, Any], module: str, rank: int, where: str) -> float:
  """What multiplies B A; patterns of ranks and alphas are by the end of a module's name, or regular expressions (peft)."""
  alpha = config.get("lora_alpha", 8)
  for pattern, value in (config.get("alpha_pattern") or {}).items():
    try:
      if re.match(rf"(?:.*\.)?({pattern})$", module):
        alpha = value
        break
    except re.error as error:
      raise UserError(f"{where}: alpha_pattern '{printable(pattern)}': {error}") from None
  if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
    raise UserError(f"{where}: lora_alpha = {printable(alpha)} is no number")
  return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
