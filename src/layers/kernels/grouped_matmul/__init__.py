"""Products of rows with the matrix of their group, as experts need: a module for each kernel, and ``registry``."""
