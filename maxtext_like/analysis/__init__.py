"""Tools that analyze models and runs: overflow risk, audit of a program, search for precision keys, X-ray of a step, failed
steps.
"""
