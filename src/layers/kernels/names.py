"""Names of the kernels. To add one, write its file and add its name here, at its place in the order of preference.

``registry.py`` of each folder loads the files by these names. This module imports no kernel, so that the configuration may use
it.
"""

from typing import Literal

Attention = Literal["splash", "cudnn_flash", "mosaic_flash", "blockwise", "dot_product"]
"""Attention kernels in the order in which "auto" prefers them; ``dot_product`` supports every case."""
AttentionChoice = Literal["auto", Attention]
"""Values of ``attention``. "auto" takes the first kernel that supports the case; "dot_product" any of ``registry.PLAIN``."""

Grouped = Literal["pallas_tpu", "pallas_gpu", "pallas_triton", "rounds", "ragged_dot", "tiles"]
"""Kernels of grouped matrix products, in the order in which "auto" prefers them if they do no unnecessary work."""
GroupedChoice = Literal["auto", Grouped]
"""Values of ``grouped_product``."""

Norm = Literal["pallas_gpu", "xla"]
"""Kernels for the gradients of norms."""
NormChoice = Literal["auto", Norm]
"""Values of ``norm_kernel``."""
