"""Does a run fit, and how fast can it be? Memory estimates, FLOPs, traffic, rooflines,
and ahead-of-time compilation for TPU and GPU.
"""
