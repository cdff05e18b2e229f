"""The input pipeline: documents -> tokens -> packed rows -> batches. Entry point: loader.make_data."""
