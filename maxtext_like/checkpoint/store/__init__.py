"""Checkpoints on disk and in object stores: writing, validating, mirroring, pruning and restoring steps."""
