"""Settles the grouped kernel of a model's experts: runs the self-test of the chosen kernel, and falls back if it fails."""

import dataclasses
from collections.abc import Callable, Iterable

from maxtext_like.errors import UserError
from maxtext_like.layers.block import Block
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.kernels.grouped_matmul import registry
from maxtext_like.layers.moe.moe import Experts
from maxtext_like.models.kernel_verdicts import Target
from maxtext_like.numerics.attention_selfcheck import CaseResult
from maxtext_like.numerics.grouped_selfcheck import GroupedShape, grouped_shape, self_test


def settle(
  decoder: Decoder,
  target: Target,
  *,
  asked: registry.Choice,
  tokens: int,
  ways: int,
  test: Callable[[GroupedShape], list[CaseResult]] = self_test,
) -> tuple[Decoder, str]:
  """Return the decoder with a kernel that passed its self-test, and a note about the test ("" if there is nothing to report).

  Args:
    decoder: the model, with its kernel.
    target: the devices that it will run on.
    asked: the kernel that the configuration selects.
    tokens: tokens of one device.
    ways: number of devices that share the experts.
    test: the self-test.

  Raises:
    UserError: a kernel that the configuration names failed. "auto" falls back to the next kernel, which is tested too.
  """
  layers = dict.fromkeys(layer for layer in decoder.layers if layer.cfg.ffn.experts is not None)
  name = decoder.cfg.grouped
  if not layers or not registry.kernel(name).fused:
    return decoder, ""
  if (device := target.device) is None:
    return decoder, "not self-tested: there is no device"
  # Test the kernel. With "auto", try the next one until one passes or a kernel needs no test.
  failed: dict[registry.Name, str] = {}
  seconds: list[float] = []
  while registry.kernel(name).fused:
    shapes = _shapes(layers, name, tokens=tokens, ways=ways)
    target = target.tested([(shape, test) for shape in shapes])
    verdicts = [target.known[shape] for shape in shapes]
    seconds += [max(times)] if (times := [s for _, s in verdicts if s is not None]) else []  # they run at the same time
    problem = next((problem for problem, _ in verdicts if problem), "")
    if not problem:
      break
    if asked != "auto":
      raise UserError(
        f"grouped_product={asked} failed its self-test on {device.device_kind}: {problem}\n"
        "  fix: grouped_product=auto, which falls back to another kernel"
      )
    failed[name] = problem
    on = {"platform": target.platform, "capability": target.capability}
    wanted = [registry.Case(dtype=shape.dtype, sums=shape.sums, **on) for shape in shapes]
    name = registry.choose("auto", *wanted, without=tuple(failed)).name
  decoder = dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, grouped=name))
  if failed:
    verb = "which failed its self-test" if len(failed) == 1 else "which failed their self-tests"
    return decoder, f"instead of {' and '.join(failed)}, {verb} on {device.device_kind}: {'; '.join(failed.values())}"
  return decoder, f"self-test passed on {device.device_kind} {f'in {sum(seconds):.0f} s' if seconds else 'earlier'}"


def first_shapes(decoder: Decoder, *, tokens: int, ways: int) -> list[GroupedShape]:
  """Return the shapes to test the chosen kernel with. tokens and ways: as in ``settle``."""
  layers = dict.fromkeys(layer for layer in decoder.layers if layer.cfg.ffn.experts is not None)
  name = decoder.cfg.grouped
  return _shapes(layers, name, tokens=tokens, ways=ways) if layers and registry.kernel(name).fused else []


def _shapes(layers: Iterable[Block], name: registry.Name, *, tokens: int, ways: int) -> list[GroupedShape]:
  """Return the shapes to test a kernel with, without duplicates. tokens and ways: as in ``settle``."""
  shapes: dict[GroupedShape, None] = {}
  for layer in layers:
    cfg = layer.cfg.ffn.experts
    precision = layer.precision
    for summed, columns in ((cfg.emb_dim, cfg.mlp_dim), (cfg.mlp_dim, cfg.emb_dim)):
      shape = grouped_shape(
        name,
        dtype=precision.dtype,
        sums=Experts(cfg, precision).sums,
        precision=precision.matmul_precision,
        summed=summed,
        columns=columns,
        groups=cfg.num_experts // ways,
        rows=tokens * cfg.num_experts_per_tok,
      )
      shapes[shape] = None
  return list(shapes)
