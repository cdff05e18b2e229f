"""Compiler options of a train step, in addition to the flags of the user."""

import os
import re
from pathlib import Path

from maxtext_like.layers.partition import on_one_gpu
from maxtext_like.training.step.in_backward.step import StepInBackward
from maxtext_like.training.step.train_step import TrainStep

_TRITON = "xla_gpu_enable_triton_gemm"


def flags_given() -> str:
  """Return the flags of ``XLA_FLAGS``, or of the file that it names if it does not start with a dash."""
  value = os.environ.get("XLA_FLAGS", "").strip()
  return value if not value or value.startswith("-") else Path(value).read_text(encoding="utf-8", errors="backslashreplace")


def of_step(step: TrainStep) -> dict[str, bool]:
  """Return the compiler options of a train step on the current mesh. A flag set by the user takes precedence.

  A step that updates layers in its backward pass multiplies by weights that are in stacks, and sums gradients of the head in
  float32 over chunks. With cuBLAS, XLA lets a product read its weight in place and accumulate into a sum. It tries its own
  Triton kernels first, which need a copy of the weight (docs/results/history.md).
  """
  if isinstance(step, StepInBackward) and on_one_gpu() and not re.search(rf"--{_TRITON}(=|\s|$)", flags_given()):
    return {_TRITON: False}
  return {}
