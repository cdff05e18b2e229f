"""Text from a model: sampling, and prefill and decoding with caches."""
