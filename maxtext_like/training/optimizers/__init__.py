"""Optimizers: one update rule per file, and the optimizer that adds weight decay, precision and sharding to any rule."""
