"""Gradients of the norms of the residual stream: the kernel, and the registry that chooses between it and XLA."""
