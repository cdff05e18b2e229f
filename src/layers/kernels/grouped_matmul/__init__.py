"""Grouped products for mixtures of experts: each row is multiplied by the matrix of its group. One module for each kernel."""
