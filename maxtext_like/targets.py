"""What a target says beside the next token: one convention of data, objectives and imported inputs."""

IGNORED = -100
"""The target that does not count, as in PyTorch and Hugging Face."""
