"""The files that a run writes, except its checkpoints: metrics, samples, TensorBoard events, the report and the terminal
output.

No output may delay a step or end a run: each one has a queue and a thread (``output.Guarded``).
"""
