"""Known numerical failures. One function for each runs the failing policy in plain JAX, and this project's own code."""
