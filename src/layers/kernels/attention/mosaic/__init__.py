"""Kernels that Pallas' Mosaic GPU makes for Hopper GPUs; ``mosaic_flash`` puts them together."""
