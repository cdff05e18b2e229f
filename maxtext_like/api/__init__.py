"""The Python API: one module per verb of the command line. ``maxtext_like`` exports the names; see ``verbs.py``."""
