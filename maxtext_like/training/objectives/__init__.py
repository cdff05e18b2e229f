"""What training minimises: one file an objective, and the registry of them."""
