"""Checkpoints: saving and restoring the state of a run, adapters, and reading and writing Hugging Face checkpoints."""
