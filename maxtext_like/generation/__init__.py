"""Text generation: prompts, prefill and decoding with caches, and sampling."""
