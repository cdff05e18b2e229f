"""Everything between two steps: the loop, evaluation, samples, progress, signals, time limits and checks of the numbers."""
