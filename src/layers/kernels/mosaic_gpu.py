"""Pallas for NVIDIA GPUs. Every kernel gets it here, because JAX 0.11 needs a change to find programs in its cache."""

import functools
import threading
from typing import Any

import jax

_NAME = "mosaic_gpu.dump_basename"
_changing = threading.Lock()


def mosaic() -> Any:
  """Return ``jax.experimental.pallas.mosaic_gpu``, typed as Any because its types changed in JAX 0.11.

  It is imported on use: that takes half a second, and choosing between kernels does not need it."""
  from jax.experimental.pallas import mosaic_gpu

  if (0, 11) <= jax.__version_info__ < (0, 12):
    with _changing:  # threads lower kernels at the same time
      _leave_out_numbers()
  return mosaic_gpu


def _leave_out_numbers() -> None:
  """Keep JAX 0.11 from writing into each kernel how many kernels the process lowered before.

  The first start on a machine lowers the self-tests before the train step. The second start has their verdicts, so its numbers
  would differ, it would not find the step in the compilation cache, and would compile it again."""
  from jax.experimental.mosaic import gpu

  dialect: Any = vars(gpu)["dialect"]  # JAX does not export it
  name_for_dumps = getattr(dialect, "get_or_set_dump_options", None)
  if name_for_dumps is None or hasattr(name_for_dumps, "__wrapped__"):
    return

  @functools.wraps(name_for_dumps)
  def without_number(module: Any) -> Any:
    options = name_for_dumps(module)
    # Files that JAX writes on request (MOSAIC_GPU_DUMP_TO) need different names.
    if not options.dump_path and _NAME in module.operation.attributes:
      del module.operation.attributes[_NAME]
    return options

  dialect.get_or_set_dump_options = without_number
