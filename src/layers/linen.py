"""Flax Linen modules of every layer: ``linen.MLP(cfg, precision).init(key, x)``.

One generic module wraps every layer. Parameters are boxed with their logical axes (``nn.LogicallyPartitioned``), which Linen's
partitioning tools read. All of them, trainable or not, are in the collection "params", so the tree equals that of the NNX
modules.
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
    layer: a layer object with ``params()`` and a pure ``__call__(params, *args)``. Mixers and feed-forward layers also have
      ``standalone``, which needs no context and is called instead.
  """

  layer: Any

  @nn.compact
  def __call__(self, *args, **kwargs):
    """Call the layer (``standalone`` if it has that method) with the module's parameters."""
    spec = self.layer.params()
    # Use existing parameters, or draw them in ``init``.
    given: Any = self.variables.get("params")
    if given:
      # Not self.param, which would trace the initializer again in every apply even if the value exists.
      params = checked(spec, nn.meta.unbox(unfreeze(given)))
    else:
      params = {name: self.param(name, lambda key, s=s: init(s, key, _box)) for name, s in spec.items()}
    return getattr(self.layer, "standalone", self.layer)(params, *args, **kwargs)


def _box(p: Param, x: jax.Array):
  return nn.LogicallyPartitioned(x, p.axes)


def _wrapper(layer_class):
  def make(*args, name: str | None = None, parent: Any = nn.module._unspecified_parent, **kwargs) -> Linen:
    return Linen(layer_class(*args, **kwargs), name=name, parent=parent)

  # Show the name and the documentation of the layer.
  make.__name__ = make.__qualname__ = layer_class.__name__
  make.__doc__ = f"{layer_class.__doc__}\n\nReturns:\n  A ``flax.linen.Module``. The arguments are those of the layer."
  return make


RMSNorm = _wrapper(norms.RMSNorm)
LayerNorm = _wrapper(norms.LayerNorm)
Embedding = _wrapper(embedding.Embedding)
PerLayerInput = _wrapper(per_layer.PerLayerInput)
Head = _wrapper(embedding.Head)
Attention = _wrapper(attention.Attention)
MLA = _wrapper(mla.MLA)
Indexer = _wrapper(indexer.Indexer)
MLP = _wrapper(mlp.MLP)
Router = _wrapper(moe.Router)
Experts = _wrapper(moe.Experts)
MoE = _wrapper(moe.MoE)
Block = _wrapper(block.Block)
Decoder = _wrapper(decoder.Decoder)
