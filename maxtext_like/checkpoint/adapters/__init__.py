"""LoRA adapters in checkpoints: reading, adding, and merging them into the base weights."""
