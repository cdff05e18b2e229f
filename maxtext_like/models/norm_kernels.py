"""Settles the kernel for gradients of norms: uses it if it supports the model and passes its self-test, otherwise XLA."""

import dataclasses
from collections.abc import Callable
from typing import Any

from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.kernels.norm import registry
from maxtext_like.models.attention_kernels import Verdicts, verdict_each
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.norm_selfcheck import NormShape, self_test


def settle(
  decoder: Decoder,
  *,
  asked: registry.Choice,
  platform: str,
  devices: int,
  capability: str | None = None,
  device: Any = None,
  cache: str | None = None,
  test: Callable[[NormShape], list[CaseResult]] = self_test,
  known: Verdicts | None = None,
) -> tuple[Decoder, str]:
  """Return the decoder, and a note about its kernel ("" if it uses XLA and nothing failed).

  Args:
    decoder: the model.
    asked: the kernel that the configuration selects.
    platform: where the program will run.
    devices: number of devices of the mesh.
    capability: CUDA compute capability of the devices; None if they are not NVIDIA GPUs or not known.
    device: device for the test; None: there is none (ahead of time), so nothing is tested.
    cache: folder of stored verdicts; None: they are not stored.
    test: the self-test.
    known: verdicts of ``first_shapes``; None to test them here.

  Raises:
    UserError: the configuration names the kernel, but it does not support the model or failed.
  """
  norm = decoder.layers[0].cfg.norm
  case = registry.Case(platform=platform, capability=capability, devices=devices, dim=norm.dim)
  try:
    name = registry.choose(asked, case)
  except ValueError as error:
    raise UserError(str(error)) from error
  if name == "xla":
    return decoder, ""
  words = f"{name} for gradients of norms"
  if device is None:
    return _with(decoder, name), f"{words}, not self-tested: there is no device"
  if known is None:
    known = verdict_each([(shape, test) for shape in _shapes(decoder)], device, cache)
  verdicts = [known[shape] for shape in _shapes(decoder)]
  problem = next((problem for problem, _ in verdicts if problem), "")
  if not problem:
    seconds = [s for _, s in verdicts if s is not None]
    when = f"in {max(seconds):.0f} s" if seconds else "earlier"
    return _with(decoder, name), f"{words}, self-test passed on {device.device_kind} {when}"
  if asked != "auto":
    raise UserError(
      f"norm_kernel={asked} failed its self-test on {device.device_kind}: {problem}\n"
      "  fix: norm_kernel=auto, which falls back to XLA"
    )
  return (
    decoder,
    f"xla for gradients of norms, instead of {name}, which failed its self-test on {device.device_kind}: {problem}",
  )


def first_shapes(
  decoder: Decoder, *, asked: registry.Choice, platform: str, devices: int, capability: str | None = None
) -> list[NormShape]:
  """Return the shapes to test the kernel with; none for XLA. Arguments: as for ``settle``."""
  case = registry.Case(platform=platform, capability=capability, devices=devices, dim=decoder.layers[0].cfg.norm.dim)
  try:
    return [] if registry.choose(asked, case) == "xla" else _shapes(decoder)
  except ValueError:  # ``settle`` reports it
    return []


def _shapes(decoder: Decoder) -> list[NormShape]:
  """Return the dtypes of the norm before a part and, with a sandwich norm, of the one after it."""
  norm, precision = decoder.layers[0].cfg.norm, decoder.precision
  dtypes = {(precision.residual, layer.precision.dtype) for layer in decoder.layers}
  if decoder.layers[0].cfg.sandwich:
    dtypes |= {(layer.precision.branch_dtype, precision.residual) for layer in decoder.layers}
  return [NormShape(dtype=x, gradient=g, dim=norm.dim) for x, g in sorted(dtypes)]


def _with(decoder: Decoder, name: registry.Name) -> Decoder:
  of = lambda cfg: dataclasses.replace(cfg, norm=dataclasses.replace(cfg.norm, kernel=name))
  layers = {layer: dataclasses.replace(layer, cfg=of(layer.cfg)) for layer in dict.fromkeys(decoder.layers)}
  return dataclasses.replace(decoder, layers=tuple(layers[layer] for layer in decoder.layers))
