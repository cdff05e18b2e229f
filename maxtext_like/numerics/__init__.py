"""X-ray and related tools: statistics of every tensor, the first cause of non-finite numbers, probes during training, and
self-tests of kernels. Nothing here knows a model or a trainer.
"""
