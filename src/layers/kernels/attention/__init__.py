"""Attention of rows over themselves: a module for each kernel, and ``registry``, which chooses between them."""
