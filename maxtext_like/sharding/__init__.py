"""The device mesh, divisibility checks, and the coordination of several processes."""
