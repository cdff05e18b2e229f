"""The input pipeline: documents -> tokens -> packed rows -> batches. Start with ``loader.make_data``."""
