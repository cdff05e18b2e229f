"""Numerics of models and runs: risk, audit, bisect, the x-ray of a step, and why a step failed."""
