"""The target id that the loss ignores. Data sets, objectives and imported inputs share this convention."""

IGNORED = -100
"""Marks a position without a target, as in PyTorch and Hugging Face."""
