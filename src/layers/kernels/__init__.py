"""Kernels: one folder for each computation that has several implementations, with a registry that chooses between them."""
