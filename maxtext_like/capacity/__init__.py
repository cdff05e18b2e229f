"""Does a run fit, and how fast can it be? Memory estimates, FLOPs, memory traffic, transfers, rooflines, and ahead-of-time
compilation for TPUs and GPUs that are not available.
"""
