"""Training objectives: one file per objective, their common interface and their registry."""
