"""The layers: parameters and equations; imports jax and flax only.

A ``Decoder`` (decoder.py) embeds, runs stacks (stack.py) of ``Block``s (block.py) and leaves through a norm and a head
(embedding.py). A block composes

- a mixer: ``Attention`` (attention.py) or ``MLA`` (mla.py, with indexer.py),
- a feed-forward: ``MLP`` (mlp.py), ``MoE`` (moe.py) or both, ``DenseBesideMoE`` (dense_beside_moe.py),
- norms (norms.py) and, where a model has it, an input of each layer's own (per_layer.py).

Both are ``part(p, x, ctx) -> out``. What travels beside x is the ``Context`` (context.py): positions and masks (masks.py,
rope.py), caches (cache.py), probes (probe.py), sharding rules (rules.py). Arrays are declared as ``Param`` (param.py),
multiply through ``product`` (weight.py) and in the dtypes of ``Precision`` (precision.py). Kernels stand in registries
(kernels/), towers for images in vision_*.py, the two faces in linen.py and nnx.py.
"""
