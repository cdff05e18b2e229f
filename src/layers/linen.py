"""The Flax Linen face of every layer: ``linen.MLP(cfg, precision).init(key, x)``.

One generic module for all layers. Parameters are boxed with their logical axes (``nn.LogicallyPartitioned``), as Linen's own
partitioning tools expect, and live in the collection "params", trainable or not, so that the tree equals the NNX face's.
"""

from typing import Any

import jax
from flax import linen as nn
from flax.core import unfreeze

from maxtext_like.layers import block, decoder, embedding, mlp, norms, per_layer
from maxtext_like.layers.attention import attention, indexer, mla
from maxtext_like.layers.moe import moe
from maxtext_like.layers.param import Param, checked, init

PARTITION_NAME = "layers"  # the logical axis of nn.scan's metadata_params for stacked layers


class Linen(nn.Module):
  """A layer as a ``flax.linen.Module``.

  Attributes:
    layer: a layer object: ``params()`` and a pure ``__call__(params, *args)``; mixers and feed-forwards, whose call reads a
      context, have ``alone`` for it.
  """

  layer: Any

  @nn.compact
  def __call__(self, *args, **kwargs):
    """The layer's own call (``alone`` where it has one), without its parameters."""
    spec = self.layer.params()
    given: Any = self.variables.get("params")
    if given:
      # Not self.param: with a value at hand it would trace the initialiser again in every apply.
      params = checked(spec, nn.meta.unbox(unfreeze(given)))
    else:
      params = {name: self.param(name, lambda key, s=s: init(s, key, _box)) for name, s in spec.items()}
    return getattr(self.layer, "alone", self.layer)(params, *args, **kwargs)


def _box(p: Param, x: jax.Array):
  return nn.LogicallyPartitioned(x, p.axes)


def _face(layer_class):
  def make(*args, name: str | None = None, parent: Any = nn.module._unspecified_parent, **kwargs) -> Linen:
    return Linen(layer_class(*args, **kwargs), name=name, parent=parent)

  make.__name__ = make.__qualname__ = layer_class.__name__
  make.__doc__ = f"{layer_class.__doc__}\n\nReturns:\n  A ``flax.linen.Module`` of this layer; arguments are the layer's own."
  return make


RMSNorm = _face(norms.RMSNorm)
LayerNorm = _face(norms.LayerNorm)
Embedding = _face(embedding.Embedding)
PerLayerInput = _face(per_layer.PerLayerInput)
Head = _face(embedding.Head)
Attention = _face(attention.Attention)
MLA = _face(mla.MLA)
Indexer = _face(indexer.Indexer)
MLP = _face(mlp.MLP)
Router = _face(moe.Router)
Experts = _face(moe.Experts)
MoE = _face(moe.MoE)
Block = _face(block.Block)
Decoder = _face(decoder.Decoder)
