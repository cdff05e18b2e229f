"""Self-attention of rows: one module for each kernel, and ``registry``, which chooses between them."""
