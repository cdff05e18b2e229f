"""Overflow risk of a configuration or a checkpoint: bounds of every tensor against the range of its dtype."""
