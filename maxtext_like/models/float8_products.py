"""Checks whether a device supports ``matmul_dtype: float8``, and lists the layers that use it."""

import re

from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder

_FIRST = (8, 9)  # first CUDA compute capability with float8 matrix units (Ada); Hopper has 9.0


def layers(decoder: Decoder) -> tuple[int, ...]:
  """Return the indices of the layers whose products by weights are in float8."""
  return tuple(i for i, layer in enumerate(decoder.layers) if layer.precision.matmul_dtype == "float8")


def require_units(decoder: Decoder, platform: str, capability: str | None = None) -> None:
  """Refuse a device without float8 units. It would round to float8 and multiply in 16 bits: less exact, and no faster. CPUs are
  accepted.

  Args:
    decoder: the model.
    platform: "cpu", "gpu" or "tpu": where the program will run.
    capability: CUDA compute capability of the devices; None: not known.

  Raises:
    UserError: the device has no float8 matrix units.
  """
  if not layers(decoder):
    return
  numbers = re.fullmatch(r"(\d+)\.(\d+)", capability or "")  # for AMD GPUs it is a name
  old = numbers is not None and tuple(map(int, numbers.groups())) < _FIRST
  if platform == "tpu" or (platform == "gpu" and old):
    which = "a TPU up to v6e" if platform == "tpu" else f"a GPU of compute capability {capability}"
    raise UserError(
      f"matmul_dtype=float8: {which} has no float8 matrix units, so it would multiply numbers rounded to float8 in 16 bits\n"
      "  fix: matmul_dtype=dtype"
    )


def describe(decoder: Decoder) -> str:
  """Return a line for the banner of a run, or "" if no product is in float8."""
  found, count = layers(decoder), len(decoder.layers)
  if not found:
    return ""
  where = "" if len(found) == count else f" in {len(found)} of {count} layers"
  rest = ", routed experts excepted" if any(decoder.layers[i].cfg.ffn.experts is not None for i in found) else ""
  return f"products by weights of attention and MLP in float8 (e4m3, gradients e5m2){where}{rest}"
