"""Settles the kernel for products of few rows with quantized weights: uses it if the machine supports it and it passes its
self-test, otherwise XLA."""

import dataclasses
import importlib.util
import logging
from collections.abc import Callable

import jax

from maxtext_like.layers.kernels.quantized_matmul import supports
from maxtext_like.layers.partition import Mesh
from maxtext_like.models.kernel_verdicts import numbers_of, verdict_each
from maxtext_like.models.quantized_base import QuantizedBase
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.quantized_selfcheck import QuantizedShape, self_test

_log = logging.getLogger(__name__)
_OLDEST = {"fp8_block": (8, 9)}
_OLDEST_OF_ALL = (8, 0)
"""Compute capability of the first GPUs with products in bfloat16, and with float8 numbers."""


def settle(
  base: QuantizedBase,
  *,
  dtype: str,
  mesh: Mesh,
  platform: str,
  cache: str | None,
  test: Callable[[QuantizedShape], list[CaseResult]] = self_test,
) -> QuantizedBase:
  """Return the base with the kernel that its products of few rows use, and a note about it.

  Args:
    base: the quantized weights.
    dtype: dtype of the products.
    mesh: the devices. The partitioner cannot split a kernel, so there must be one.
    platform: where the program will run.
    cache: folder of stored verdicts; None: they are not stored.
    test: the self-test.
  """
  form = base.form.name
  if platform != "gpu" or mesh.size > 1 or dtype != "bfloat16" or not supports(form) or not base.weights:
    return base
  if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
    return base
  if isinstance(mesh, jax.sharding.AbstractMesh) or (device := mesh.devices.flat[0]) not in jax.local_devices():
    return dataclasses.replace(base, kernel="pallas_triton", note="quantized_matmul, not self-tested: there is no device")
  if (numbers_of(getattr(device, "compute_capability", None)) or (0, 0)) < _OLDEST.get(form, _OLDEST_OF_ALL):
    return base
  shape = QuantizedShape(form=form, dtype=dtype)
  problem = verdict_each([(shape, test)], device, cache)[shape][0]
  if problem:
    note = f"xla instead of quantized_matmul, which failed its self-test: {problem}"
    _log.warning("%s", note)
    return dataclasses.replace(base, note=note)
  note = f"quantized_matmul, self-test passed on {device.device_kind}"
  return dataclasses.replace(base, kernel="pallas_triton", note=note)
