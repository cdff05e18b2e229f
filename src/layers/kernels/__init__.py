"""Kernels: one folder for each thing that can be computed in several ways, with a registry that says which way is taken."""
