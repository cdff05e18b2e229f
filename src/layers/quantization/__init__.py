"""Quantized weights, float8 products and low-rank adapters."""
