"""Readers of data files: JSON lines, text, Parquet, Arrow, ArrayRecord, TFRecord examples, and compressed files."""
