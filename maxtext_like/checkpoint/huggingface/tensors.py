"""Maps Hugging Face tensors to our parameters and back.

The table is derived from the parameters that the decoder declares. A layer without a k projection expects none in the file, and
a parameter without a rule is an error. All transforms are views.

E experts, D model. Hugging Face stores a linear map as [out, in]; ours has its input axes first.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext_like.checkpoint.huggingface.family import HuggingFace, Kind, Rule
from maxtext_like.checkpoint.huggingface.tied import EMBEDDING, HEAD
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import Param

Path = tuple[str, ...]


_TOP = {
  "embedding.table": Rule(EMBEDDING),
  "ple.table": Rule("embed_tokens_per_layer.weight"),
  "ple.projection": Rule("per_layer_model_projection.weight", "linear"),
  "ple.norm.scale": Rule("per_layer_projection_norm.weight"),
  "final_norm.scale": Rule("norm.weight"),
  "head.kernel": Rule(HEAD, "linear"),
}


@dataclass(frozen=True)
class Piece:
  """The position of a tensor, or of half of it, in our tree: ``params[path][index]`` with this shape."""

  path: Path
  index: tuple[int, ...]
  shape: tuple[int, ...]
  kind: Kind
  half: int | None

  @property
  def _inputs(self) -> int:
    return 2 if self.kind == "linear2" else 1

  def hf_shape(self) -> tuple[int, ...]:
    """Returns the shape of this piece in a file. If the tensor contains two pieces, this is the shape of its half."""
    s = self.shape
    if self.kind == "scalar":
      return (1,)
    if self.kind == "experts":
      return s[0], s[2], s[1]
    if self.kind == "flat":
      return (math.prod(s),)
    if self.kind == "conv":
      side = math.isqrt(s[0] // 3)
      return s[1], 3, side, side
    if self.kind in ("linear", "linear2"):
      return math.prod(s[self._inputs :]), math.prod(s[: self._inputs])
    return s

  @property
  def file_shape(self) -> tuple[int, ...]:
    """The shape of this piece in a file, with one axis for each of our axes, in the order of ``order``."""
    s = self.shape
    return tuple(s[self.order.index(i)] for i in range(len(s)))

  @property
  def order(self) -> tuple[int, ...]:
    """For each of our axes, its position in ``file_shape``."""
    rank = len(self.shape)
    if self.kind == "experts":
      return 0, 2, 1
    if self.kind in ("linear", "linear2"):
      n = self._inputs
      return *range(rank - n, rank), *range(rank - n)
    if self.kind == "conv":
      return tuple(range(rank))[::-1]
    return tuple(range(rank))

  def to_ours(self, tensor: Any) -> Any:
    """Returns a view of the file's tensor in our layout."""
    if self.half is not None:
      size = self.shape[2]
      tensor = tensor[:, self.half * size : (self.half + 1) * size]
    return tensor.reshape(self.file_shape).transpose(self.order)

  def to_hf(self, ours: Any) -> Any:
    """Returns our indexed array in the file's layout."""
    if self.kind == "experts":
      return ours.swapaxes(1, 2)
    if self.kind in ("linear", "linear2"):
      n, rank = self._inputs, len(self.shape)
      return ours.transpose(*range(n, rank), *range(n)).reshape(self.hf_shape())
    if self.kind == "conv":
      return ours.T.reshape(self.hf_shape())
    return ours.reshape(self.hf_shape())


@dataclass(frozen=True)
class TensorPart:
  """A tensor of a file, or half of it, and its position along the stacked axes (layers, experts) of an array to fill."""

  name: str
  piece: Piece
  index: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
  """One Hugging Face tensor.

  Attributes:
    name: relative to the text model (``layers.0.mlp.up_proj.weight``), ``HEAD``, or relative to the tower.
    pieces: the positions in our tree; two if it contains two parameters.
    rule: how it is stored.
    vision: True for a tensor of the vision tower.
  """

  name: str
  pieces: tuple[Piece, ...]
  rule: Rule
  vision: bool

  @property
  def shape(self) -> tuple[int, ...]:
    first = self.pieces[0].hf_shape()
    return (first[0], sum(piece.hf_shape()[1] for piece in self.pieces), *first[2:]) if len(self.pieces) > 1 else first

  def from_params(self, leaves: dict[Path, Any]) -> np.ndarray:
    """Assembles the tensor from our parameters, given as {path: array}."""
    parts = [piece.to_hf(np.asarray(leaves[piece.path][piece.index])) for piece in self.pieces]
    return np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def flatten(tree: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
  """Yields (path, leaf) of a nested dict."""
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from flatten(value, (*prefix, key))
    else:
      yield (*prefix, key), value


def tensor_table(decoder: Decoder, family: HuggingFace, *, stacked: bool = False) -> list[Tensor]:
  """Returns every tensor of a decoder, in model order.

  Args:
    decoder: the model; its declared parameters are expected.
    family: its Hugging Face declarations.
    stacked: use transformers' layout in memory, with one array for all experts of a layer.

  Raises:
    ValueError: the decoder declares a parameter without a Hugging Face name.
  """
  spec = decoder.params()
  rules = {**family.layer, **family.stacked} if stacked else family.layer
  found: dict[str, list[Piece]] = {}
  rule_of: dict[str, Rule] = {}

  def add(prefix: str, known: Mapping[str, Rule], relative: Path, path: Path, param: Param, row: tuple[int, ...]) -> None:
    key = ".".join(relative)
    if key not in known:
      raise ValueError(f"parameter {'.'.join(path)} has no name in a Hugging Face checkpoint")
    rule, shape = known[key], param.shape[len(row) :]
    each = "{e}" in rule.name
    for e in range(shape[0]) if each else [0]:
      name = prefix + rule.name.format(e=e)
      piece = Piece(path, (*row, e) if each else row, shape[each:], rule.kind, rule.half)
      found.setdefault(name, []).append(piece)
      rule_of[name] = rule

  # Embedding, layers, final norm and head, then the vision tower.
  tops = {name: value for name, value in spec.items() if name not in {s.name for s in decoder.stacks}}
  for path, param in flatten({name: value for name, value in tops.items() if name not in ("final_norm", "head", "vision")}):
    add("", _TOP, path, path, param, ())
  for i in range(len(decoder.layers)):
    stack, row, layer = decoder.locate(i)
    for path, param in flatten(spec[stack][layer]):
      add(f"layers.{i}.", rules, path, (stack, layer, *path), param, (row,))
  for path, param in flatten({name: value for name, value in tops.items() if name in ("final_norm", "head")}):
    add("", _TOP, path, path, param, ())
  of_text = len(found)
  if "vision" in tops:
    if family.tower is None:
      raise ValueError("the decoder has a vision tower, but its family declares none for Hugging Face")
    for path, param in flatten(tops["vision"]):
      if path[0] == "layers":
        for row in range(param.shape[0]):
          add(f"{family.tower.layers}{row}.", family.tower.layer, path[1:], ("vision", *path), param, (row,))
      else:
        add("", family.tower.rules, path, ("vision", *path), param, ())
  ordered = {name: tuple(sorted(pieces, key=lambda piece: piece.half or 0)) for name, pieces in found.items()}
  return [Tensor(name, pieces, rule_of[name], i >= of_text) for i, (name, pieces) in enumerate(ordered.items())]
