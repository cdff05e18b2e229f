"""The layers: parameters and equations. Imported as ``maxtext_like.layers``; imports jax and flax only."""
