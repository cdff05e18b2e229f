"""Initial values of a model that is trained from random weights: the schemes of the key ``init_scheme``.

Open this file to see how large scores, branches and the residual stream are before training. The distribution of each array is
declared by its layer; this file sets the few gains that depend on the depth of the model or on the scale of its scores.
"""

import math
from dataclasses import replace
from typing import Any, Literal

from maxtext_like.layers.block import Block
from maxtext_like.layers.decoder import DecoderConfig

Scheme = Literal["depth_scaled", "maxtext"]


def with_scheme(scheme: Scheme, cfg: DecoderConfig, layers: tuple[Block, ...]) -> tuple[DecoderConfig, tuple[Block, ...]]:
  """Set the gains of a scheme. Shapes, dtypes and equations stay the same.

  Args:
    scheme: ``maxtext`` keeps MaxText's values: normal numbers of variance 1 / fan-in (an untied embedding too), and 1 in norms.
      ``depth_scaled`` changes three of them:

      - Queries are scaled so that scores start with standard deviation 1. Gemma 4 multiplies q.k by 1 instead of
        head_dim ** -0.5, so norms of 1 give scores of standard deviation 16 to 23 and a nearly one-hot softmax.
      - The residual stream starts with mean square 1. Gemma multiplies its embedding by sqrt(D); an untied table is drawn with
        standard deviation 1. A tied table without that factor (Qwen3 0.6B) also is the output head and keeps D ** -0.5.
      - Each of the n branches that join the stream is multiplied by n ** -0.5, where the stream starts with mean square 1: in
        the norm behind the branch if there is one (depth-scaled sandwich norm, Yin et al. 2025, arXiv 2504.07866), otherwise
        in the output projection (Radford et al. 2019, section 2.3). All branches together then add as much as the embedding.
    cfg, layers: what a family's ``decoder`` returned.

  Returns:
    The configuration around the layers, and the layers.
  """
  if scheme == "maxtext":
    return cfg, layers
  embedding = cfg.embedding
  if not cfg.tied and not embedding.scale_by_sqrt_dim:
    embedding = replace(embedding, initial_stddev=1.0)
  unit_stream = not cfg.tied or embedding.scale_by_sqrt_dim
  branches = sum(3 if layer.cfg.per_layer else 2 for layer in layers)
  gain = branches**-0.5 if unit_stream else 1.0
  return replace(cfg, embedding=embedding), tuple(replace(layer, cfg=_scaled(layer.cfg, gain)) for layer in layers)


def _scaled(block: Any, gain: float) -> Any:
  """A layer's configuration with scores of standard deviation 1 and branches multiplied by ``gain``."""
  mixer = replace(block.mixer, query_gain=1 / block.mixer.score_stddev)
  if not block.sandwich:
    return replace(block, mixer=replace(mixer, output_gain=gain), ffn=replace(block.ffn, output_gain=gain))
  per_layer = block.per_layer
  if per_layer is not None:
    per_layer = replace(per_layer, norm=replace(per_layer.norm, initial_scale=gain))
  return replace(block, mixer=mixer, branch_gain=gain, per_layer=per_layer)


def saturated(stddev: float, keys: int) -> bool:
  """Return whether a softmax over ``keys`` normal scores of this standard deviation is nearly one-hot.

  The sum of squared probabilities of such a softmax is about exp(stddev ** 2) / keys, and 1 if all weight is on one key.
  """
  return stddev**2 > math.log(max(keys, 2))
