"""Layers: parameters and equations. This package imports jax and flax only.

A ``Decoder`` (decoder.py) embeds tokens, runs stacks of ``Block``s (both in block.py), applies a final norm and computes
logits with a head (embedding.py). A block consists of

- a mixer: ``Attention`` (attention/attention.py) or ``MLA`` (attention/mla.py, with indexer.py),
- a feed-forward layer: ``MLP`` (mlp.py), ``MoE`` or both of them, ``DenseAndMoE`` (moe/moe.py),
- norms (norms.py) and, in some models, a separate input for each layer (per_layer.py).

Mixers and feed-forward layers have the signature ``part(p, x, ctx) -> out``. ``ctx`` is the ``Context`` (context.py). It holds
positions, masks (attention/), caches, probes (probe.py) and sharding rules (sharding_rules.py). Each array is declared as a
``Param`` (param.py). Weights are multiplied through ``product`` (weight.py), in the dtypes that ``Precision`` (precision.py)
selects. kernels/ has a registry for each kind of kernel, quantization/ quantized weights and adapters, vision/ the vision
towers. linen.py and nnx.py wrap every layer as a module of Flax Linen and Flax NNX.
"""
