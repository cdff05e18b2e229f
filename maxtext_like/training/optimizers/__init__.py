"""Optimizers: one update rule per file. ``optimizer.py`` adds weight decay, precision and sharding to any rule, and has the
learning-rate schedule."""
