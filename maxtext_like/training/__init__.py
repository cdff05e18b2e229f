"""The train step and the loop around it."""
