"""Settles the kernel for gradients of norms: uses it if it supports the model and passes its self-test, otherwise XLA."""

import dataclasses
from collections.abc import Callable

from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.kernels.norm import registry
from maxtext_like.models.kernel_verdicts import Target
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.norm_selfcheck import NormShape, self_test


def settle(
  decoder: Decoder,
  target: Target,
  *,
  asked: registry.Choice,
  test: Callable[[NormShape], list[CaseResult]] = self_test,
) -> tuple[Decoder, str]:
  """Return the decoder, and a note about its kernel ("" if it uses XLA and nothing failed).

  Args:
    decoder: the model.
    target: the devices that it will run on.
    asked: the kernel that the configuration selects.
    test: the self-test.

  Raises:
    UserError: the configuration names the kernel, but it does not support the model or failed.
  """
  try:
    name = registry.choose(asked, _case(decoder, target))
  except ValueError as error:
    raise UserError(str(error)) from error
  if name == "xla":
    return decoder, ""
  words = f"{name} for gradients of norms"
  if (device := target.device) is None:
    return _with(decoder, name), f"{words}, not self-tested: there is no device"
  target = target.tested([(shape, test) for shape in _shapes(decoder)])
  verdicts = [target.known[shape] for shape in _shapes(decoder)]
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


def first_shapes(decoder: Decoder, target: Target, *, asked: registry.Choice) -> list[NormShape]:
  """Return the shapes to test the kernel with; none for XLA. Arguments: as for ``settle``."""
  try:
    return [] if registry.choose(asked, _case(decoder, target)) == "xla" else _shapes(decoder)
  except ValueError:  # ``settle`` reports it
    return []


def _case(decoder: Decoder, target: Target) -> registry.Case:
  dim = decoder.layers[0].cfg.norm.dim
  return registry.Case(platform=target.platform, capability=target.capability, devices=target.devices, dim=dim)


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
