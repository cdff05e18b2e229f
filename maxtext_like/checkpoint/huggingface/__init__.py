"""Hugging Face checkpoints: reading and writing their files, their config.json and their tensor names."""
