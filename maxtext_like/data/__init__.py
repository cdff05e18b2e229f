"""The input pipeline: documents -> tokens -> packed rows -> batches, on grain. Entry point: loader.make_data."""
