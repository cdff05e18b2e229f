"""Settles the attention kernel of every layer: chooses one that supports the layer, and runs its self-test on this device."""

import collections
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxtext_like.errors import UserError
from maxtext_like.layers.block import Block
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.kernels.attention import registry
from maxtext_like.layers.kernels.attention.registry import Case, Name, choose
from maxtext_like.layers.vision.attention import case_of
from maxtext_like.models.kernel_verdicts import Target
from maxtext_like.numerics.attention_selfcheck import CaseResult, ShapeClass, self_test, shape_class


@dataclass(frozen=True, kw_only=True)
class Rows:
  """The properties of a batch's rows that the choice of an attention kernel depends on.

  Attributes:
    length: positions of a row.
    images: batches contain images, whose tokens may see each other in both directions.
    patches: patches of an image, including padding; None: there are no images for a vision tower.
    context: devices that the positions of a row are split over.
    segments: batches have segments (documents or padding).
  """

  length: int
  images: bool = False
  patches: int | None = None
  context: int = 1
  segments: bool = True


@dataclass(frozen=True, kw_only=True)
class KernelUse:
  """The kernel of some layers of a model, and the reason.

  Attributes:
    kernel: the kernel.
    layers: number of layers with this kernel, out of ``of`` layers of the model (or of its vision tower, if ``tower`` is set).
    shape: class of the first fused kernel that was considered; None: no fused kernel supports these layers.
    tested: device of the self-test; "" if there was no device, so that nothing was tested.
    seconds: duration of the tests; None: the verdicts are from an earlier run.
    failed: preferred kernels that failed their self-test.
    problem: how they failed; "" if none did.
    surpassed: precision keys that are false but that have no effect, because the kernel computes in float32.
  """

  kernel: Name
  layers: int
  of: int
  shape: ShapeClass | None = None
  tested: str = ""
  seconds: float | None = None
  failed: tuple[Name, ...] = ()
  problem: str = ""
  surpassed: tuple[str, ...] = ()
  tower: bool = False

  def __str__(self) -> str:
    share = f"{self.layers} of {self.of} layers{' of the vision tower' if self.tower else ''}"
    if self.shape is None:
      return f"{self.kernel} in {share}"
    if self.problem:
      instead = f"{self.kernel} instead of {' and '.join(self.failed)} in {share}"
      return f"{instead}: failed its self-test on {self.tested}: {self.problem}"
    asked = " and ".join(f"{key}=false" for key in self.surpassed)
    more = f"; it computes in float32, more exactly than {asked} requires" if asked else ""
    if not self.tested:
      return f"{self.kernel} in {share}, not self-tested: there is no device{more}"
    when = "earlier" if self.seconds is None else f"in {self.seconds:.0f} s"
    return f"{self.kernel} in {share}, self-test passed on {self.tested} {when}{more}"

  @property
  def is_notable(self) -> bool:
    """True if a run prints it at its start: anything other than the reference kernel."""
    return self.shape is not None or self.kernel != "dot_product"

  def to_json(self) -> dict[str, Any]:
    """Return the entry of env.json."""
    return dataclasses.asdict(self)


def settle(
  decoder: Decoder, rows: Rows, target: Target, *, test: Callable[[ShapeClass], list[CaseResult]] = self_test
) -> tuple[Decoder, tuple[KernelUse, ...]]:
  """Return the decoder with kernels that passed their self-test, and the kernel of each group of layers.

  Args:
    decoder: the model, as configured.
    rows: the rows that it will run on.
    target: the devices that it will run on.
    test: the self-test.

  Raises:
    UserError: a kernel that the configuration names does not support a layer, or failed. "auto" falls back to the next one.
  """
  # The first choices of all layers are tested together, the others when they are needed.
  target = target.tested([(shape, test) for shape in first_shapes(decoder, rows, target)])
  device = target.device

  def look(asked: registry.Choice, case: Case, *, of: int, segments: bool) -> KernelUse:
    # Choose, test, and with "auto" choose again without the kernels that failed.
    nonlocal target
    failed: dict[Name, str] = {}
    shapes, times = [], []
    while True:
      try:
        kernel = choose(asked, case, tuple(failed))
      except ValueError as error:
        raise UserError(str(error)) from error
      if kernel.fused:
        shapes.append(shape_of(kernel.name, case, segments))
      if not kernel.fused or device is None:
        break
      target = target.tested([(shapes[-1], test)])
      problem, seconds = target.known[shapes[-1]]
      times += [] if seconds is None else [seconds]
      if not problem:
        break
      if asked != "auto":
        raise UserError(
          f"attention={asked} failed its self-test on {device.device_kind}: {problem}\n"
          "  fix: attention=auto, which falls back to another kernel, or attention=dot_product"
        )
      failed[kernel.name] = problem
    return KernelUse(
      kernel=kernel.name, layers=0, of=of, shape=shapes[0] if shapes else None,
      tested=device.device_kind if shapes and device is not None else "", seconds=sum(times) if times else None,
      failed=tuple(failed), problem="; ".join(failed.values()), surpassed=tuple(kernel.surpasses(case)),
    )  # fmt: skip

  decoder = _with_capability(decoder, target.capability)
  layers = decoder.layers
  chosen: dict[Block, KernelUse] = {}
  for layer, case in _cases(decoder, rows).items():
    chosen[layer] = look(layer.cfg.mixer.kernel, case, of=len(layers), segments=rows.segments)
  uses = _grouped([chosen[layer] for layer in layers])
  layers = tuple(_with_mixer(layer, failed=chosen[layer].failed) for layer in layers)  # each layer chooses again when traced
  decoder = dataclasses.replace(decoder, layers=layers)
  tower = decoder.cfg.vision
  if tower is None or rows.patches is None:
    return decoder, uses
  use = look(tower.kernel, case_of(tower, decoder.precision, rows.patches), of=tower.num_layers, segments=tower.padded)
  uses = (*uses, dataclasses.replace(use, layers=tower.num_layers, tower=True))
  return _with_tower(decoder, dataclasses.replace(tower, failed=use.failed)), uses


def plain_tower(decoder: Decoder) -> Decoder:
  """Return the decoder with plain XLA attention in its vision tower, if it has one."""
  tower = decoder.cfg.vision
  return decoder if tower is None else _with_tower(decoder, dataclasses.replace(tower, kernel="dot_product"))


def _with_tower(decoder: Decoder, tower: Any) -> Decoder:
  return dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, vision=tower))


def _with_capability(decoder: Decoder, capability: str | None) -> Decoder:
  """Return the decoder whose layers and vision tower know the devices' compute capability.

  A layer chooses its kernel again when it is traced, for rows of any length, so it must know the device.
  """
  layers = tuple(_with_mixer(layer, capability=capability) for layer in decoder.layers)
  decoder = dataclasses.replace(decoder, layers=layers)
  tower = decoder.cfg.vision
  return decoder if tower is None else _with_tower(decoder, dataclasses.replace(tower, capability=capability))


def _cases(decoder: Decoder, rows: Rows) -> dict[Block, Case]:
  """Return the attention of each different layer."""
  return {
    layer: layer.mixer.case(rows.length, images=rows.images, documents=rows.segments, context=rows.context)
    for layer in dict.fromkeys(decoder.layers)
  }


def _with_mixer(layer: Block, **values: Any) -> Block:
  mixer: Any = layer.cfg.mixer
  return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, mixer=dataclasses.replace(mixer, **values)))


def shape_of(kernel: Name, case: Case, segments: bool) -> ShapeClass:
  """Return the class of a case for a kernel's self-test. segments: rows contain documents or padding."""
  return shape_class(
    kernel, dtype=case.dtype, head_dim=case.head_dim, value_dim=case.value_dim, query_heads=case.query_heads,
    kv_heads=case.kv_heads, window=case.window is not None, segments=segments, length=case.length,
    images=case.bidirectional_images, causal=case.causal, soft_cap=case.soft_cap is not None,
  )  # fmt: skip


def first_shapes(decoder: Decoder, rows: Rows, target: Target) -> list[ShapeClass]:
  """Return the classes of the preferred kernels of all layers, without duplicates. Arguments: as for ``settle``."""
  found: dict[ShapeClass, None] = {}

  def add(asked: registry.Choice, case: Case, segments: bool) -> None:
    try:
      kernel = choose(asked, case, ())
    except ValueError:  # no kernel supports the layer, which ``settle`` reports
      return
    if kernel.fused:
      found[shape_of(kernel.name, case, segments)] = None

  decoder = _with_capability(decoder, target.capability)
  for layer, case in _cases(decoder, rows).items():
    add(layer.cfg.mixer.kernel, case, rows.segments)
  if (tower := decoder.cfg.vision) is not None and rows.patches is not None:
    add(tower.kernel, case_of(tower, decoder.precision, rows.patches), tower.padded)
  return list(found)


def _grouped(uses: list[KernelUse]) -> tuple[KernelUse, ...]:
  """Merge equal entries, and count their layers."""
  return tuple(dataclasses.replace(use, layers=count) for use, count in collections.Counter(uses).items())
