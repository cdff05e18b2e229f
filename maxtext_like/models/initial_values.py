"""Initial values of a model that is trained from random weights: the schemes of the key ``init_scheme``.

Open this file to see how large scores, branches and the residual stream are before training. The distribution of each array is
declared by its layer; this file sets the few gains that depend on the depth of the model or on the scale of its scores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
      - The residual stream starts with mean square 1. Gemma multiplies its embedding by sqrt(D). An untied table has initial
      standard deviation 1. A tied table without that factor (Qwen3 0.6B) is the output head too and keeps D ** -0.5.
      - If the stream starts with mean square 1, each of the n branches that are added to it is multiplied by n ** -0.5, so that
      all branches together add as much as the embedding. A norm after the branch has the factor (depth-scaled sandwich norm,
      Yin et al. 2025, arXiv 2504.07866). Without one, the output projection (as in Radford et al. 2019, section 2.3) and the
      matrix of the values, or the up projection, have n ** -0.25 each. The outputs are the same as with n ** -0.5 in the output
      projection alone, and the gradient of that projection, which is most of the model's gradient, is multiplied by n ** -0.25.

      Gemma then starts by predicting its input token: half of the stream is the token's own row of the table, which is the head
      too. The first loss is above log(V), 21.9 for the 31B, and below that of ``maxtext`` after 5 steps. A final norm of
      D ** -0.25 avoids the former and was slower over 300 steps of a narrow Gemma 3 (2.28 instead of 2.17 at step 180).
    cfg, layers: result of a family's ``decoder``.

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
    return replace(block, mixer=replace(mixer, branch_gain=gain), ffn=replace(block.ffn, branch_gain=gain))
  per_layer = block.per_layer
  if per_layer is not None:
    per_layer = replace(per_layer, norm=replace(per_layer.norm, initial_scale=gain))
  return replace(block, mixer=mixer, branch_gain=gain, per_layer=per_layer)


@dataclass(frozen=True)
class InitialScores:
  """Attention scores of a run of equal layers before training.

  Attributes:
    first, last: indices of the layers.
    stddev: standard deviation of the scores.
    keys: number of keys that a query sees, at most.
  """

  first: int
  last: int
  stddev: float
  keys: int

  @property
  def saturated(self) -> bool:
    """True if the softmax is nearly one-hot, so that gradients grow from layer to layer.

    The sum of squared probabilities of a softmax over n normal scores is about exp(stddev ** 2) / n, and 1 if one key has all
    the weight. The boundary is where that estimate reaches 1.
    """
    return self.stddev**2 > math.log(max(self.keys, 2))


def initial_scores(layers: Sequence[Block], length: int) -> list[InitialScores]:
  """Return the scores of every run of equal layers, for rows of ``length`` tokens."""
  found: list[InitialScores] = []
  for i, layer in enumerate(layers):
    mixer: Any = layer.cfg.mixer
    keys = min(length, getattr(mixer, "window", None) or length)
    if found and (found[-1].stddev, found[-1].keys) == (mixer.score_stddev, keys):
      found[-1] = replace(found[-1], last=i)
    else:
      found.append(InitialScores(i, i, mixer.score_stddev, keys))
  return found


def saturation(layers: Sequence[Block], length: int) -> str | None:
  """Return a note for a model that would start from random weights with saturated attention; None if it does not.

  Args:
    layers: layers of the decoder.
    length: tokens of a row.
  """
  found = [scores for scores in initial_scores(layers, length) if scores.saturated]
  if not found:
    return None
  count = sum(scores.last - scores.first + 1 for scores in found)
  sizes = sorted({scores.stddev for scores in found})
  size = f"{sizes[0]:.3g}" if len(sizes) == 1 else f"{sizes[0]:.3g} to {sizes[-1]:.3g}"
  return (
    f"attention starts saturated in {count} of {len(layers)} layers: the scores of random weights have a standard deviation of "
    f"{size}, so that the softmax is nearly one-hot and gradients grow from layer to layer\n"
    "  fix: init_scheme=depth_scaled, or start from trained weights with init_from=DIR"
  )
