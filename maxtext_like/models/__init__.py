"""Models: from a configuration to a decoder on a mesh; a folder for each family of them."""
