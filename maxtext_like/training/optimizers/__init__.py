"""Directions of descent: one file a rule, and the optimizer around any of them."""
