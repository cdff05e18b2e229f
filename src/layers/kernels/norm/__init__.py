"""Norms of the residual stream: who makes their gradients."""
