"""Everything a run writes beside its checkpoints: metrics, samples, events, whole files, the report and the screen.

None of it may hold up a step or end a run: each place has a queue and a thread of its own (``guarded``).
"""
