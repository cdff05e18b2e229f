"""Bounds on the values that a Qwen3 computes, for ``risk``; see ``walk``."""

from maxtext_like.analysis.risk.bounds import Signal
from maxtext_like.analysis.risk.parameters import Parameters
from maxtext_like.analysis.risk.walk import Formula, Sizes
from maxtext_like.layers.attention.attention import AttentionConfig
from maxtext_like.layers.block import Block


def _layer(walk: Sizes, place: str, p: Parameters, layer: Block, x: Signal, own_input: Signal | None) -> Signal:
  cfg = layer.cfg.mixer
  assert isinstance(cfg, AttentionConfig)
  return walk.pre_norm_block(place, p, layer.cfg, x, lambda part, y: walk.attention(place, part, cfg, y))


RISK = Formula(_layer)
