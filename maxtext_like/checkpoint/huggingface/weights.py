"""Loads the weights of a checkpoint directory: matches tensors with a decoder by name and shape, without a second copy."""

import functools
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from maxtext_like.checkpoint.huggingface.config import HuggingFaceConfig, read_config, require_same_model
from maxtext_like.checkpoint.huggingface.peft_targets import name_in_transformers
from maxtext_like.checkpoint.huggingface.shards import Shards
from maxtext_like.checkpoint.huggingface.tensor_file import DTYPES, FLOAT8
from maxtext_like.checkpoint.huggingface.tensors import Piece, TensorPart, flatten, tensor_table
from maxtext_like.checkpoint.huggingface.tied import EMBEDDING, HEAD, PREFIXES, find_head, prefixes_with
from maxtext_like.checkpoint.store.finite import all_finite, described
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.vision import VisionConfig
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import Param
from maxtext_like.models.quantized_base import QuantizedBase
from maxtext_like.models.registry import FAMILIES
from maxtext_like.strict_json import printable

if TYPE_CHECKING:
  from maxtext_like.checkpoint.huggingface.device_fill import Target
  from maxtext_like.checkpoint.quantized_rows import QuantizedRows

_log = logging.getLogger(__name__)
_FLOATS = frozenset({"F32", "BF16", "F16", "F64", "F8_E4M3", "F8_E5M2"})
_QUANTIZED_FROM = frozenset({"F32", "BF16", "F16"})  # dtypes that a device converts to float32 itself
_FINAL_NORM = "norm.weight"
_SHOWN = 20
_CHUNK_BYTES = 16 << 20  # bytes of a tensor converted at a time
SMALL_BYTES = 1 << 20  # smaller tensors are put together in host memory: there are many, and each costs a call of a program
_REPORT_SECONDS = 5.0
_REPORTED_BYTES = 10**9  # the speed of a load that reads less is not reported


class Weights:
  """A checkpoint directory whose tensors match the parameters of a decoder one to one.

  Attributes:
    decoder: the model.
    notes: parts of the file that this model does not use, one sentence each.
    table: every tensor, in model order.
    finite: True to refuse non-finite numbers when they are read.
  """

  finite: bool = False

  def __init__(
    self, directory: Path, decoder: Decoder, config: HuggingFaceConfig, *, without: Collection[tuple[str, ...]] = ()
  ):
    """Reads the headers and matches the tensors.

    Args:
      directory, decoder, config: directory, model and configuration of the checkpoint.
      without: paths of parameters that the checkpoint lacks; they are not read.

    Raises:
      UserError: a file is malformed; or tensors are missing, unexpected, of a wrong shape, or float8 without a scale. Lists
        all of them.
    """
    self.shards = Shards(directory)
    self.shards.block = config.float8_block
    self.notes: list[str] = list(config.notes)
    self._whole: tuple[str, np.ndarray] = ("", np.empty(0))
    self.decoder = decoder
    self._config = config
    self._family = FAMILIES[config.model["decoder_block"]].huggingface
    # Find the prefix of the text model and the layout of the experts, then the name of each tensor in the file.
    names = set(self.shards.weights())
    head = find_head(names)
    only_head = decoder.cfg.tied and head is not None and not prefixes_with(EMBEDDING, names)
    prefix = self._prefix(names, _FINAL_NORM if only_head else EMBEDDING)
    endings = tuple(f".{rule.name}" for rule in self._family.stacked.values())
    table = tensor_table(decoder, self._family, stacked=any(name.endswith(endings) for name in names))
    self.table = [tensor for tensor in table if not any(piece.path in without for piece in tensor.pieces)]
    self._without = frozenset(without)
    head = head or HEAD
    self._file_name = {t.name: head if t.name == HEAD else prefix + t.name for t in self.table}
    if tower := self._family.tower:
      self._file_name |= {
        t.name: next((spelling for spelling in tower.spellings(t.name) if spelling in names), f"model.{t.name}")
        for t in self.table
        if t.vision
      }
    if only_head:
      self._file_name[EMBEDDING] = head
      self.notes.append(f"{printable(head)} is used as the embedding too (tie_word_embeddings)")
    self._check(names, prefix, head)

  def _prefix(self, names: set[str], name: str) -> str:
    """Finds the prefix of the text model by the name of one of its tensors."""
    found = prefixes_with(name, names)
    if len(found) != 1:
      what = "no tensor" if not found else " and ".join(f"'{p}{name}'" for p in found)
      is_what = {EMBEDDING: "the token embedding", _FINAL_NORM: "the final norm"}[name]
      raise UserError(
        f"{printable(self.shards.directory)}: {what} can be {is_what}; expected exactly one of "
        + ", ".join(f"'{p}{name}'" for p in PREFIXES),
        fix="use a checkpoint of the model that config.json describes",
      )
    return found[0]

  def _check(self, names: set[str], prefix: str, head: str) -> None:
    expected = {self._file_name[tensor.name]: tensor for tensor in self.table}
    wrong = []
    for name, tensor in expected.items():
      if name in names:
        entry = self.shards.entry(name)
        if entry.shape != tensor.shape:
          wrong.append(f"{printable(name)}: shape {list(entry.shape)}, expected {list(tensor.shape)}")
        elif entry.dtype not in _FLOATS:
          wrong.append(f"{printable(name)}: dtype {entry.dtype} is not supported; supported are {', '.join(sorted(_FLOATS))}")
    unexpected = self._unexpected(sorted(names - set(expected)), prefix, head)
    lists = [
      ("missing", [printable(name) for name in expected if name not in names]),
      ("unexpected", [printable(name) for name in unexpected]),
      ("of the wrong shape or dtype", wrong),
    ]
    if any(found for _, found in lists):
      raise UserError(
        f"{printable(self.shards.directory)}: the tensors do not fit config.json\n"
        + "\n".join(_listing(title, found) for title, found in lists if found),
        fix="download config.json and the tensors again, from one revision of the model",
      )
    self.shards.check_scales(name for name in expected)

  def _unexpected(self, extra: list[str], prefix: str, head: str) -> list[str]:
    """Returns the tensors that the model does not have and that cannot be explained. The explained ones go into the notes."""
    count, tower = len(self.decoder.layers), self._family.tower if self._config.multimodal else None
    groups: dict[str, int] = {}
    left = []
    for name in extra:
      layer = re.fullmatch(re.escape(prefix) + r"layers\.(\d{1,6})\.(.+)", name)
      number, part = (int(layer[1]), layer[2]) if layer else (-1, "")
      if tower and (of_tower := tower.unused(name, self.decoder.cfg.vision is not None)):
        reason = of_tower
      elif name == head and self.decoder.cfg.tied:
        reason = "lm_head.weight is not used: the embedding table is the output head (tie_word_embeddings)"
      elif layer and (of_family := self._family.unused(self._config.model, count, number, part)):
        reason = of_family
      elif part == "self_attn.rotary_emb.inv_freq":
        reason = "rotary tables are computed instead of read"
      elif 0 in self.shards.entry(name).shape:
        reason = "tensors without elements are not used"  # transformers writes empty shared experts for n_shared_experts: 0
      else:
        left.append(name)
        continue
      groups[reason] = groups.get(reason, 0) + 1
    self.notes += [f"{n} {reason}" if reason.startswith("tensors") else f"{reason} ({n})" for reason, n in groups.items()]
    return left

  @functools.cached_property
  def _pieces(self) -> dict[tuple[str, ...], list[tuple[str, Piece]]]:
    """The tensors that make up each parameter."""
    pieces: dict[tuple[str, ...], list[tuple[str, Piece]]] = {}
    for tensor in self.table:
      for piece in tensor.pieces:
        pieces.setdefault(piece.path, []).append((self._file_name[tensor.name], piece))
    return pieces

  def values(self, path: tuple[str, ...], index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """Returns a part of one parameter. Reads only the needed tensors.

    Args:
      path: path of the parameter.
      index: a slice for every axis.
      dtype: dtype to convert to.

    Raises:
      UserError: a number does not fit ``dtype``.
      NonFiniteError: a number is not finite, with ``finite``.
    """
    pieces = self._pieces[path]
    stacked = len(pieces[0][1].index)
    ranges = [range(*part.indices(size)) for part, size in zip(index, _shape(pieces), strict=True)]
    out = np.empty(tuple(len(r) for r in ranges), dtype)
    for name, piece in pieces:
      if all(i in r for i, r in zip(piece.index, ranges, strict=False)):
        where = tuple(i - r.start for i, r in zip(piece.index, ranges, strict=False))
        part = piece.to_ours(self.shards.weight(name))[index[stacked:]]
        self._convert(np.atleast_1d(part), np.atleast_1d(out[(*where, ...)]), name)
        self.shards.release()
    return out

  def _convert(self, part: np.ndarray, out: np.ndarray, name: str) -> None:
    """Fills ``out`` chunk by chunk. A converted copy of a complete table would double the memory."""
    rows = max(1, _CHUNK_BYTES * len(part) // max(out.nbytes, 1))
    for start in range(0, len(part), rows):
      chunk = out[start : start + rows]
      with np.errstate(over="ignore"):
        chunk[...] = _converted(part[start : start + rows], out.dtype, name, refuse=not self.finite)
      if self.finite and not all_finite(chunk):  # the chunk is still in the CPU cache, and contiguous
        raise self._not_finite(out.dtype, name)

  def _refusal(self, dtype: np.dtype, name: str) -> Exception:
    return self._not_finite(dtype, name) if self.finite else _beyond(dtype, name)

  def _not_finite(self, dtype: np.dtype, name: str) -> Exception:
    stored = self.shards.weight(name)
    if all_finite(stored):
      return _beyond(dtype, name)
    return NonFiniteError(
      f"{printable(self.shards.path(name))}: tensor '{printable(name)}' holds {described(stored)}\n"
      "  why: everything computed with it would be non-finite too\n"
      "  fix: download the file again, or create it again from finite weights"
    )

  def part(self, path: tuple[str, ...], index: tuple[int | slice, ...]) -> np.ndarray:
    """Returns ``params[path][index]`` in float32, and reads no more than the file format requires.

    Args:
      path: path of the parameter.
      index: an entry for every axis. Axes along which the file has separate tensors (layers of a stack, experts of DeepSeek)
        take a number. A float8 tensor is dequantized completely, and cached until another tensor is read.
    """
    count = len(self._pieces[path][0][1].index)
    name, piece = self._by_place[path, index[:count]]
    if self._whole[0] != name:
      self._whole = (name, self.shards.weight(name))
    result = np.array(piece.to_ours(self._whole[1])[index[count:]], np.float32)
    if self.shards.entry(name).dtype not in FLOAT8:  # a view of the file
      self._whole = ("", np.empty(0))
      self.shards.release()
    return result

  @functools.cached_property
  def _by_place(self) -> dict[tuple[Any, Any], tuple[str, Piece]]:
    return {(path, piece.index): (name, piece) for path, pieces in self._pieces.items() for name, piece in pieces}

  def is_float8(self, path: tuple[str, ...]) -> bool:
    """Returns True if all tensors of a weight are float8 e4m3, and contain no other parameter."""
    found = self._pieces[path]
    whole = all(piece.kind in ("linear", "linear2") and piece.half is None for _, piece in found)
    return whole and all(self.shards.entry(name).dtype == "F8_E4M3" for name, _ in found)

  def scales(self, path: tuple[str, ...], row: int | None) -> np.ndarray:
    """Returns the scales of one layer of a float8 weight, float32 [*experts, blocks of inputs, blocks of outputs].

    Args:
      path: path of the parameter.
      row: row of a stack; None if the weight is not stacked.

    Raises:
      UserError: a scale has a wrong shape or is not finite.
    """
    scales = {s.index: np.ascontiguousarray(self.shards.scale(s.name).T) for s in self.sources(path, row)}
    self.shards.release()
    return np.stack([scales[index] for index in sorted(scales)]) if () not in scales else scales[()]

  def sources(self, path: tuple[str, ...], row: int | None = None) -> list[TensorPart]:
    """Returns the tensors of a parameter, or of one row of its stack."""
    lead = () if row is None else (row,)
    found = ((name, piece) for name, piece in self._pieces[path] if piece.index[: len(lead)] == lead)
    return [TensorPart(name, piece, piece.index[len(lead) :]) for name, piece in found]

  def load(
    self, shardings: Any = None, *, progress: Callable[[int, int], None] | None = None, base: QuantizedBase | None = None
  ) -> dict:
    """Returns the parameters as JAX arrays. Large tensors are read by several threads straight into the arrays on the devices.

    Args:
      shardings: a tree of ``jax.sharding.Sharding`` with the structure of the parameters; None for the default device. This
        process reads only the parts for its own devices.
      progress: called with (bytes read so far, bytes in total) of the large tensors.
      base: which weights to quantize, layer by layer while reading; ``shardings`` then apply to the quantized arrays.

    Raises:
      UserError: a number does not fit the dtype of the parameter.
      NonFiniteError: a number is not finite, with ``finite``.
    """
    import jax

    from maxtext_like.checkpoint.huggingface import device_fill
    from maxtext_like.checkpoint.quantized_rows import QuantizedRows

    spec = {path: param for path, param in flatten(self.decoder.params()) if path not in self._without}
    wanted = dict(flatten(shardings)) if shardings is not None else {}
    arrays: dict[tuple[str, ...], Any] = {}
    targets, small, programs = [], [], {}
    for path, param in spec.items():
      dtype = np.dtype(jax.numpy.dtype(param.dtype))
      if base is not None and path in base.weights:
        places = {where[-1]: place for where, place in wanted.items() if where[:-1] == path}
        rows = arrays[path] = QuantizedRows(base.form, param, places)
        targets += (layers := [*self._row_targets(path, param, rows)])
        if param.rows is not None and not layers[0].codes:
          programs[rows.program(layers[0].dtype)] = None  # many weights share one
      elif not (own := self._pieces[path][0][1].shape) or math.prod(own) * dtype.itemsize < SMALL_BYTES:
        small.append(path)
      else:
        keep = functools.partial(arrays.__setitem__, path)
        targets.append(device_fill.Target(param.shape, dtype, wanted.get(path), self.sources(path), done=keep))

    # Read the small tensors while the first large ones are on their way.
    def read_small() -> None:
      for path in small:
        shape, dtype = spec[path].shape, np.dtype(jax.numpy.dtype(spec[path].dtype))
        if shardings is None:
          arrays[path] = jax.device_put(self.values(path, tuple(slice(None) for _ in shape), dtype))
        else:
          arrays[path] = self._place(path, shape, dtype, wanted[path])

    device_fill.fill(
      self.shards, targets, check=self.finite, refuse=self._refusal,
      convert=functools.partial(_converted, refuse=not self.finite),
      programs=[program.compiled for program in programs], meanwhile=read_small,
      progress=progress or _logged_progress(),
    )  # fmt: skip
    params: dict = {}
    for path in spec:
      node = params
      for key in path[:-1]:
        node = node.setdefault(key, {})
      node[path[-1]] = found.finished() if isinstance(found := arrays[path], QuantizedRows) else found
    return params

  def _row_targets(self, path: tuple[str, ...], param: Param, rows: "QuantizedRows") -> "Iterator[Target]":
    """Yields a target for every layer of a weight that is quantized as soon as the layer is read."""
    from maxtext_like.checkpoint.huggingface.device_fill import Target
    from maxtext_like.layers.quantization.quantized import CODES, SCALES, Float8BlockForm

    codes = isinstance(rows.form, Float8BlockForm) and self.is_float8(path)
    dtypes = {self.shards.entry(name).dtype for name, _ in self._pieces[path]}
    dtype = DTYPES[dtypes.pop()] if len(dtypes) == 1 and (codes or dtypes <= _QUANTIZED_FROM) else np.dtype(np.float32)
    shape = param.shape if param.rows is None else param.shape[1:]
    for row in [None] if param.rows is None else range(param.rows):

      def put(layer: Any, row: int | None = row) -> None:
        rows.put(row, {CODES: layer, SCALES: self.scales(path, row)} if codes else layer)

      yield Target(shape, dtype, rows.everywhere, self.sources(path, row), codes=codes, together=True, done=put)

  def in_transformers(self, tree: dict) -> Iterator[tuple[str, np.ndarray]]:
    """Calls the function ``in_transformers`` for this model."""
    return in_transformers(self.decoder, self._config.model["decoder_block"], tree, nested=self._config.multimodal)

  def _place(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: np.dtype, sharding: Any) -> Any:
    import jax

    parts: dict[Any, list[Any]] = {}
    slices = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
      key = tuple((part.start, part.stop) for part in index)
      parts.setdefault(key, []).append(device)
      slices[key] = index
    arrays = []
    for key, devices in parts.items():  # one host copy at a time, shared by the devices with the same part
      host = self.values(path, slices[key], dtype)
      arrays += [jax.device_put(host, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def in_transformers(decoder: Decoder, decoder_block: str, tree: dict, *, nested: bool) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the arrays of a tree like the parameters, such as gradients, under transformers' names and in its shapes.

  Buffers (layer_scalar, the router's correction bias) are left out, because transformers has no gradients for them.

  Args:
    decoder, decoder_block: the model.
    tree: the arrays.
    nested: True if transformers nests the text model inside another model.
  """
  leaves = dict(flatten(tree))
  for tensor in tensor_table(decoder, FAMILIES[decoder_block].huggingface, stacked=True):
    if not tensor.rule.buffer:
      yield name_in_transformers(tensor, nested=nested), tensor.from_params(leaves)


def load_hugging_face(
  directory: Path | str,
  decoder: Decoder,
  *,
  model: ModelConfig | None = None,
  vision: VisionConfig | None = None,
  shardings: Any = None,
  finite: bool = False,
  base: QuantizedBase | None = None,
  allow_model_change: bool = False,
  without: Collection[tuple[str, ...]] = (),
) -> dict:
  """Loads the parameters of a Hugging Face checkpoint directory for a decoder.

  Args:
    directory: directory with config.json and safetensors.
    decoder: the model; each array gets the dtype that it declares (``weight_dtype``).
    model: the ``model:`` section of the decoder, to compare with config.json; None skips the comparison.
    vision: its ``vision:`` section, in the same way.
    shardings: as for ``Weights.load``.
    finite: True to refuse non-finite numbers.
    base: as for ``Weights.load``.
    allow_model_change: the key of that name.
    without: as for ``Weights``.

  Raises:
    UserError: as ``Weights``; or config.json describes another model.
    NonFiniteError: with ``finite``; names file and tensor.
  """
  directory = Path(directory)
  config = read_config(directory)
  if model is not None:
    require_same_model(config, model, directory, vision, allow_model_change=allow_model_change, adds=bool(without))
  weights = Weights(directory, decoder, config, without=without)
  weights.finite = finite
  return weights.load(shardings, base=base)


def _shape(pieces: list[tuple[str, Piece]]) -> tuple[int, ...]:
  stacked = zip(*(piece.index for _, piece in pieces), strict=True)
  return (*(max(axis) + 1 for axis in stacked), *pieces[0][1].shape)


def _logged_progress() -> Callable[[int, int], None]:
  """Returns a function (bytes read, bytes in total) that logs the speed."""
  begin = last = time.monotonic()

  def progress(done: int, of: int) -> None:
    nonlocal last
    now = time.monotonic()
    if now - last >= _REPORT_SECONDS or (done == of and of >= _REPORTED_BYTES):
      last, speed = now, done / 1e9 / (now - begin)
      _log.info("weights: %.1f of %.1f GB read, %.2f GB/s", done / 1e9, of / 1e9, speed)

  return progress


def _converted(part: np.ndarray, dtype: np.dtype, name: str, *, refuse: bool) -> np.ndarray:
  if dtype != np.float16 or part.dtype == np.float16:
    return part.astype(dtype, copy=False)
  converted = part.astype(np.float32).astype(dtype)
  if refuse and np.isinf(converted).any():
    raise _beyond(dtype, name)
  return converted


def _beyond(dtype: np.dtype, name: str) -> UserError:
  largest = f"{float(ml_dtypes.finfo(dtype).max):.5g}"
  return UserError(
    f"{printable(name)}: contains numbers beyond {largest}, which do not fit weight_dtype={dtype}\n  fix: use bfloat16"
  )


def _listing(title: str, names: Iterable[str]) -> str:
  listed = list(names)
  more = f"\n    ... and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
  return f"  {title} ({len(listed)}):\n" + "\n".join(f"    {name}" for name in listed[:_SHOWN]) + more
