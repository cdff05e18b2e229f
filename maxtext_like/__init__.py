"""Train Gemma 3/4 and DeepSeek V3/V3.2 in JAX in any precision, finite from step 1, and told exactly why when not."""

__version__ = "0.1.0"
