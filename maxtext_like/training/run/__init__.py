"""One training run from start to exit: checks, directory, lock, restarts, resume state, provenance and report."""
