"""Flax NNX modules of every layer: ``nnx.MLP(cfg, precision, rngs=flax.nnx.Rngs(0))(x)``.

One generic module wraps every layer. Every array is an ``nnx.Param`` (trainable) or a ``Frozen`` variable, reachable by its
attribute path: ``decoder.stack_0.layer_1.mlp.down``. ``nnx.to_pure_dict(nnx.state(module))`` equals "params" of the Linen
module.
"""

from typing import Any

import jax
from flax import nnx

from maxtext_like.layers import block, decoder, embedding, mlp, norms, per_layer
from maxtext_like.layers.attention import attention, indexer, mla
from maxtext_like.layers.moe import moe
from maxtext_like.layers.param import Param, abstract, checked, init


class Frozen(nnx.Variable):
  """An array that gradients never change. ``nnx.grad`` and optimizers skip it, because they select ``nnx.Param``."""


class Branch(nnx.Module):
  """A node of the parameter tree. Its attributes are arrays and further nodes."""

  def __init__(self, tree: dict):
    for name, value in tree.items():
      setattr(self, name, Branch(value) if isinstance(value, dict) else value)


class NNX(nnx.Module):
  """A layer as a ``flax.nnx.Module``.

  Args:
    layer: a layer object with ``params()`` and a pure ``__call__(params, *args)``. Mixers and feed-forward layers also have
      ``standalone``, which needs no context and is called instead.
    rngs: its stream "params" seeds the arrays. None: the module holds ``jax.ShapeDtypeStruct`` instead of arrays.
  """

  def __init__(self, layer: Any, *, rngs: nnx.Rngs | None):
    # The layer object is static; its arrays become attributes.
    self.layer = layer
    spec = layer.params()
    # Draw the parameters, and make every array reachable as an attribute.
    tree = jax.tree.map(_box, spec, abstract(spec)) if rngs is None else init(spec, rngs.params(), _box)
    for name, value in tree.items():
      setattr(self, name, Branch(value) if isinstance(value, dict) else value)

  def __call__(self, *args, **kwargs):
    """Call the layer (``standalone`` if it has that method) with the module's parameters."""
    # Convert the module's state to the plain tree that layers read.
    params = checked(self.layer.params(), nnx.to_pure_dict(nnx.state(self)))
    return getattr(self.layer, "standalone", self.layer)(params, *args, **kwargs)


def _box(p: Param, x: Any):
  return (nnx.Param if p.trainable else Frozen)(x, out_sharding=p.axes, eager_sharding=False)


def _wrapper(layer_class):
  def make(*args, rngs: nnx.Rngs | None, **kwargs) -> NNX:
    return NNX(layer_class(*args, **kwargs), rngs=rngs)

  make.__name__ = make.__qualname__ = layer_class.__name__
  make.__doc__ = (
    f"{layer_class.__doc__}\n\nReturns:\n  A ``flax.nnx.Module``. The arguments are those of the layer, and ``rngs``."
  )
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
