"""Models: building a decoder from a configuration and placing it on a mesh. One folder for each family of models."""
