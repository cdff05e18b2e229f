"""Kernels for Hopper GPUs, written in Pallas (Mosaic GPU). ``mosaic_flash`` calls them."""
