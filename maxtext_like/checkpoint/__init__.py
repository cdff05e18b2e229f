"""Checkpoints: what a run stores and how it comes back, and Hugging Face checkpoints in and out."""
