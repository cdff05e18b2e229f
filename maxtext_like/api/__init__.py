"""What the package offers to Python code: ``maxtext_like`` itself hands out these names; the command line calls them."""
