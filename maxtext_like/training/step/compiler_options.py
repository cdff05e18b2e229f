"""What XLA is told about a train step, beyond the flags that a user gave it."""

import os
import re
from pathlib import Path

from maxtext_like.layers.partition import on_one_gpu
from maxtext_like.training.step.in_backward.step import StepInBackward
from maxtext_like.training.step.train_step import TrainStep

_TRITON = "xla_gpu_enable_triton_gemm"


def flags_given() -> str:
  """The flags of ``XLA_FLAGS``, or of the file that it names, which it does where it does not begin with a dash."""
  value = os.environ.get("XLA_FLAGS", "").strip()
  return value if not value or value.startswith("-") else Path(value).read_text(encoding="utf-8", errors="backslashreplace")


def of_step(step: TrainStep) -> dict[str, bool]:
  """Compiler options of a train step on the mesh in use; a user's own word on one of them holds.

  A step that updates layers in its backward pass multiplies by weights that lie in stacks, and sums gradients of the head in
  float32 over chunks. By cuBLAS XLA lets a product read its weight where that lies, and add to a sum as it is written; products
  of its own in Triton it tries first, and by then has copied the weight (docs/results/gpu-training.md).
  """
  if isinstance(step, StepInBackward) and on_one_gpu() and not re.search(rf"--{_TRITON}(=|\s|$)", flags_given()):
    return {_TRITON: False}
  return {}
