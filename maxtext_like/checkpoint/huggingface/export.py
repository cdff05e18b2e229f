"""Writes parameters as a directory that transformers and vLLM load: config.json, safetensors and the tokenizer."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from maxtext_like.checkpoint.huggingface.config import export_config, read_config
from maxtext_like.checkpoint.huggingface.tensor_file import DTYPES
from maxtext_like.checkpoint.huggingface.tensors import Tensor, flatten, tensor_table
from maxtext_like.checkpoint.huggingface.tied import HEAD
from maxtext_like.checkpoint.huggingface.writer import Source, new_directory, write
from maxtext_like.checkpoint.store import sidecar_files
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.vision import VisionConfig
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.registry import FAMILIES
from maxtext_like.storage import Place
from maxtext_like.strict_json import parse_file

ExportDtype = Literal["bfloat16", "float16", "float32"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = ("bfloat16", "float16", "float32")
_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Origin:
  """Properties that a model inherits from the Hugging Face checkpoint from which its training started.

  Attributes:
    files: files to copy, such as the tokenizer.
    dtype: dtype of the weights, if it can be exported.
    nested: True if the text model is nested although it has no tower. Its tensor names depend on that in some families.
    token_ids: special token ids that config.json contains outside the text model.
    eos: tokens that end an answer.
  """

  files: tuple[Path, ...] = ()
  dtype: ExportDtype | None = None
  nested: bool = False
  token_ids: dict[str, Any] = field(default_factory=dict)
  eos: int | tuple[int, ...] | None = None


def read_origin(directory: Path) -> Origin:
  """Returns what a model inherits from the checkpoint in ``directory``. Raises UserError for a malformed config.json."""
  config = read_config(directory)
  raw = parse_file(directory / "config.json", limit=4 << 20)
  return Origin(
    files=sidecar_files.find(directory),
    dtype=next((dtype for dtype in EXPORT_DTYPES if dtype == config.dtype), None),
    nested=config.multimodal and not config.has_tower,
    token_ids={key: raw[key] for key in raw if re.fullmatch(r"[a-z]+_token_(id|index)", key)} if config.multimodal else {},
    eos=config.model["eos_token_id"],
  )


def hub_names(table: Sequence[Tensor], model: ModelConfig, *, multimodal: bool) -> dict[str, str]:
  """Returns the name of each tensor of the table in released checkpoints of the family."""
  tower = FAMILIES[model.decoder_block].huggingface.tower if multimodal else None
  prefix, head = (tower.prefix, tower.head_prefix + HEAD) if tower else ("model.", HEAD)
  names = {}
  for tensor in table:
    if tower and tensor.vision:
      names[tensor.name] = tower.spellings(tensor.name)[0]
    else:
      names[tensor.name] = head if tensor.name == HEAD else prefix + tensor.name
  return names


def export_hugging_face(
  out: Path | Place,
  params: dict,
  decoder: Decoder,
  model: ModelConfig,
  *,
  vision: VisionConfig | None = None,
  dtype: ExportDtype = "bfloat16",
  shard_size: int = 5 * 10**9,
  origin: Origin | None = None,
) -> int:
  """Writes a Hugging Face checkpoint, completely or not at all.

  Args:
    out: a directory that does not exist or is empty; in a store, config.json is uploaded last.
    params: the parameters of ``decoder``.
    decoder: the model.
    model: its ``model:`` section.
    vision: its ``vision:`` section; the tower is written if the decoder has one.
    dtype: dtype of the weights, except those that are always float32.
    shard_size: maximum bytes of one file.
    origin: properties inherited from the checkpoint from which training started.

  Returns:
    The number of tensors.

  Raises:
    UserError: transformers has no such model, ``out`` is not empty or cannot be written, or a number does not fit ``dtype``.
    RetryableError: a store does not answer.
  """
  leaves = dict(flatten(params))
  origin = origin or Origin()
  if isinstance(origin.eos, tuple) and set(model.eos_token_ids) <= set(origin.eos):
    # A model file names one end token. The checkpoint's list contains further ones, without which a chat would not end.
    model = dataclasses.replace(model, eos_token_id=origin.eos)
  family, tower = FAMILIES[model.decoder_block].huggingface, decoder.cfg.vision is not None
  nested = family.tower.write_nested if family.tower and origin.nested and not tower else None
  multimodal = tower or nested is not None
  config = export_config(model, dtype, vision if tower else None)  # may refuse the model, so call it before writing
  table = tensor_table(decoder, family)
  names = hub_names(table, model, multimodal=multimodal)
  sources = [_source(tensor, names[tensor.name], leaves, dtype) for tensor in table]
  with new_directory(out, "config.json") as new:
    part = new.path
    write(part, sources, shard_size=shard_size, whole=new.finish_file)
    if multimodal:
      # Nested files of the Hub repeat the end tokens at the top level.
      config = (nested(config) if nested else config) | origin.token_ids | {"eos_token_id": model.eos_token_id}
    write_json(part / "config.json", config)
    sidecar_files.copy(origin.files, part)
    if not (part / "generation_config.json").exists():
      tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
      write_json(part / "generation_config.json", {key: getattr(model, key) for key in tokens})
  return len(sources)


def _source(tensor: Tensor, name: str, leaves: dict, dtype: ExportDtype) -> Source:
  stored = "F32" if tensor.rule.float32 else _STORED[dtype]

  def values() -> np.ndarray:
    array = tensor.from_params(leaves)
    with np.errstate(over="ignore"):
      converted = array.astype(DTYPES[stored])
    if stored == "F16" and np.isinf(converted).any() and np.isfinite(array.astype(np.float32)).all():
      raise UserError(f"{name}: contains numbers beyond 65504, which do not fit float16\n  fix: use dtype bfloat16")
    return converted

  return Source(name, stored, tensor.shape, values)


def write_json(path: Path, values: dict[str, Any]) -> None:
  """Writes values as indented JSON."""
  path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
