"""Which Hugging Face tensor holds which of our parameters, in both directions.

The table is derived from what the decoder declares: a layer without a k projection expects none in the file, and a
parameter that no rule names is an error here, never a tensor left out in silence. All transforms are views.

E experts, D model. Hugging Face stores a linear map as [out, in]; ours has its input axes first.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxtext_like.checkpoint.huggingface import tensors_vision as vision
from maxtext_like.checkpoint.huggingface.rule import Kind, Rule
from maxtext_like.checkpoint.huggingface.tied import EMBEDDING, HEAD
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import Param
from maxtext_like.layers.vision_gemma3 import SiglipConfig

Path = tuple[str, ...]


def _gated(ours: str, theirs: str) -> dict[str, Rule]:
  return {f"{ours}.{part}": Rule(f"{theirs}.{part}_proj.weight", "linear") for part in ("gate", "up", "down")}


_GEMMA = {
  "pre_attention_norm.scale": Rule("input_layernorm.weight"),
  "attention.q": Rule("self_attn.q_proj.weight", "linear"),
  "attention.k": Rule("self_attn.k_proj.weight", "linear"),
  "attention.v": Rule("self_attn.v_proj.weight", "linear"),
  "attention.o": Rule("self_attn.o_proj.weight", "linear2"),
  "attention.q_norm.scale": Rule("self_attn.q_norm.weight"),
  "attention.k_norm.scale": Rule("self_attn.k_norm.weight"),
  "post_attention_norm.scale": Rule("post_attention_layernorm.weight"),
  "pre_mlp_norm.scale": Rule("pre_feedforward_layernorm.weight"),
  **_gated("mlp", "mlp"),
  "post_mlp_norm.scale": Rule("post_feedforward_layernorm.weight"),
  "post_dense_norm.scale": Rule("post_feedforward_layernorm_1.weight"),
  "pre_moe_norm.scale": Rule("pre_feedforward_layernorm_2.weight"),
  "post_moe_norm.scale": Rule("post_feedforward_layernorm_2.weight"),
  "moe.router.kernel": Rule("router.proj.weight", "linear"),
  "moe.router.scale": Rule("router.scale"),
  "moe.router.per_expert_scale": Rule("router.per_expert_scale"),
  "moe.experts.gate": Rule("experts.gate_up_proj", "experts", 0),
  "moe.experts.up": Rule("experts.gate_up_proj", "experts", 1),
  "moe.experts.down": Rule("experts.down_proj", "experts"),
  "ple.gate": Rule("per_layer_input_gate.weight", "linear"),
  "ple.projection": Rule("per_layer_projection.weight", "linear"),
  "ple.norm.scale": Rule("post_per_layer_input_norm.weight"),
  "layer_scalar": Rule("layer_scalar", "scalar", buffer=True),
}

_DEEPSEEK = {
  "pre_attention_norm.scale": Rule("input_layernorm.weight"),
  "attention.q": Rule("self_attn.q_proj.weight", "linear"),
  "attention.q_a": Rule("self_attn.q_a_proj.weight", "linear"),
  "attention.q_a_bias": Rule("self_attn.q_a_proj.bias"),
  "attention.q_a_norm.scale": Rule("self_attn.q_a_layernorm.weight"),
  "attention.q_b": Rule("self_attn.q_b_proj.weight", "linear"),
  "attention.kv_a": Rule("self_attn.kv_a_proj_with_mqa.weight", "linear"),
  "attention.kv_a_bias": Rule("self_attn.kv_a_proj_with_mqa.bias"),
  "attention.kv_a_norm.scale": Rule("self_attn.kv_a_layernorm.weight"),
  "attention.kv_b": Rule("self_attn.kv_b_proj.weight", "linear"),
  "attention.o": Rule("self_attn.o_proj.weight", "linear2"),
  "attention.o_bias": Rule("self_attn.o_proj.bias"),
  "attention.indexer.q": Rule("self_attn.indexer.wq_b.weight", "linear"),
  "attention.indexer.k": Rule("self_attn.indexer.wk.weight", "linear"),
  "attention.indexer.k_norm.scale": Rule("self_attn.indexer.k_norm.weight"),
  "attention.indexer.k_norm.bias": Rule("self_attn.indexer.k_norm.bias"),
  "attention.indexer.weights": Rule("self_attn.indexer.weights_proj.weight", "linear"),
  "pre_mlp_norm.scale": Rule("post_attention_layernorm.weight"),
  **_gated("mlp", "mlp"),
  "moe.router.kernel": Rule("mlp.gate.weight", "linear"),
  "moe.router.bias": Rule("mlp.gate.e_score_correction_bias", buffer=True),
  **_gated("moe.experts", "mlp.experts.{e}"),
  **_gated("moe.shared", "mlp.shared_experts"),
}

# As transformers holds them in memory: one array for all experts, which it splits again when it saves.
_DEEPSEEK_STACKED = _DEEPSEEK | {
  "moe.experts.gate": Rule("mlp.experts.gate_up_proj", "experts", 0),
  "moe.experts.up": Rule("mlp.experts.gate_up_proj", "experts", 1),
  "moe.experts.down": Rule("mlp.experts.down_proj", "experts"),
}

_TOP = {
  "embedding.table": Rule(EMBEDDING),
  "ple.table": Rule("embed_tokens_per_layer.weight", "rows"),
  "ple.projection": Rule("per_layer_model_projection.weight", "linear"),
  "ple.norm.scale": Rule("per_layer_projection_norm.weight"),
  "final_norm.scale": Rule("norm.weight"),
  "head.kernel": Rule(HEAD, "linear"),
}


@dataclass(frozen=True)
class Piece:
  """Where a tensor, or half of it, stands in our tree: ``params[path][index]``, of this shape."""

  path: Path
  index: tuple[int, ...]
  shape: tuple[int, ...]
  kind: Kind
  half: int | None

  @property
  def _inputs(self) -> int:
    return 2 if self.kind == "linear2" else 1

  def hf_shape(self) -> tuple[int, ...]:
    """The shape of this piece in a file (of the half, where the tensor holds two)."""
    s = self.shape
    if self.kind == "scalar":
      return (1,)
    if self.kind == "rows":
      return s[0], math.prod(s[1:])
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

  def to_ours(self, tensor: Any) -> Any:
    """A view of the file's tensor in our layout."""
    if self.half is not None:
      size = self.shape[2]
      tensor = tensor[:, self.half * size : (self.half + 1) * size]
    if self.kind == "experts":
      return tensor.swapaxes(1, 2)
    if self.kind in ("linear", "linear2"):
      n, rank = self._inputs, len(self.shape)
      split = tensor.reshape(*self.shape[n:], *self.shape[:n])
      return split.transpose(*range(rank - n, rank), *range(rank - n))
    if self.kind == "conv":
      return tensor.reshape(self.shape[::-1]).T
    return tensor.reshape(self.shape)

  def to_hf(self, ours: Any) -> Any:
    """Our array, already indexed, in the file's layout."""
    if self.kind == "experts":
      return ours.swapaxes(1, 2)
    if self.kind in ("linear", "linear2"):
      n, rank = self._inputs, len(self.shape)
      return ours.transpose(*range(n, rank), *range(n)).reshape(self.hf_shape())
    if self.kind == "conv":
      return ours.T.reshape(self.hf_shape())
    return ours.reshape(self.hf_shape())


@dataclass(frozen=True)
class Tensor:
  """One Hugging Face tensor. ``name`` is relative to the text model (``layers.0.mlp.up_proj.weight``), ``HEAD``, or of the
  vision tower (``tensors_vision.is_vision``)."""

  name: str
  pieces: tuple[Piece, ...]
  buffer: bool

  @property
  def shape(self) -> tuple[int, ...]:
    first = self.pieces[0].hf_shape()
    return (first[0], sum(piece.hf_shape()[1] for piece in self.pieces), *first[2:]) if len(self.pieces) > 1 else first

  def from_params(self, leaves: dict[Path, Any]) -> np.ndarray:
    """The tensor's values out of our parameters, given as {path: array}."""
    parts = [piece.to_hf(np.asarray(leaves[piece.path][piece.index])) for piece in self.pieces]
    return np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def flatten(tree: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
  """(path, leaf) of a nested dict."""
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from flatten(value, (*prefix, key))
    else:
      yield (*prefix, key), value


def tensor_table(decoder: Decoder, *, deepseek: bool, stacked_experts: bool = False) -> list[Tensor]:
  """Every tensor of a decoder, in the order of the model.

  Args:
    decoder: the model; what it declares is what is expected.
    deepseek: the family's names, else Gemma's.
    stacked_experts: DeepSeek as transformers holds it in memory, with one array for all experts of a layer.

  Raises:
    ValueError: the decoder declares a parameter that has no name at Hugging Face.
  """
  spec = decoder.params()
  rules = (_DEEPSEEK_STACKED if stacked_experts else _DEEPSEEK) if deepseek else _GEMMA
  found: dict[str, list[Piece]] = {}
  buffers: set[str] = set()

  def add(prefix: str, known: dict[str, Rule], relative: Path, path: Path, param: Param, row: tuple[int, ...]) -> None:
    key = ".".join(relative)
    if key not in known:
      raise ValueError(f"parameter {'.'.join(path)} has no name in a Hugging Face checkpoint")
    rule, shape = known[key], param.shape[len(row) :]
    if rule.buffer:
      buffers.add(prefix + rule.name)
    if "{e}" in rule.name:
      for e in range(shape[0]):
        piece = Piece(path, (*row, e), shape[1:], rule.kind, rule.half)
        found.setdefault(prefix + rule.name.format(e=e), []).append(piece)
    else:
      found.setdefault(prefix + rule.name, []).append(Piece(path, row, shape, rule.kind, rule.half))

  tops = {name: value for name, value in spec.items() if name not in {s.name for s in decoder.stacks}}
  for path, param in flatten({name: value for name, value in tops.items() if name not in ("final_norm", "head", "vision")}):
    add("", _TOP, path, path, param, ())
  for i in range(len(decoder.layers)):
    stack, row, layer = decoder.locate(i)
    for path, param in flatten(spec[stack][layer]):
      add(f"layers.{i}.", rules, path, (stack, layer, *path), param, (row,))
  for path, param in flatten({name: value for name, value in tops.items() if name in ("final_norm", "head")}):
    add("", _TOP, path, path, param, ())
  siglip = isinstance(decoder.cfg.vision, SiglipConfig)
  layer_rules, tower_rules = (vision.SIGLIP_LAYER, vision.SIGLIP) if siglip else (vision.GEMMA4_LAYER, vision.GEMMA4)
  for path, param in flatten(tops.get("vision", {})):
    if path[0] == "layers":
      for row in range(param.shape[0]):
        add(f"{vision.LAYERS}{row}.", layer_rules, path[1:], ("vision", *path), param, (row,))
    else:
      add("", tower_rules, path, ("vision", *path), param, ())
  ordered = {name: tuple(sorted(pieces, key=lambda piece: piece.half or 0)) for name, pieces in found.items()}
  return [Tensor(name, pieces, name in buffers) for name, pieces in ordered.items()]
