"""Settles the attention kernel of every layer: chooses one that supports the layer, and runs its self-test on this device.

The verdict of a self-test is valid for a kind of device, a class of shapes, and the versions of all software between the layer
and the device. It is stored in the folder of compiled programs, so that later runs need not repeat the test. Verdicts in
``SHIPPED`` are read too, which the users of a Python environment or of a container image share.
"""

import collections
import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like import atomic
from maxtext_like.errors import UserError
from maxtext_like.layers.attention import masks
from maxtext_like.layers.block import Block
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.kernels.attention import registry
from maxtext_like.layers.kernels.attention.registry import Case, Name, choose
from maxtext_like.layers.vision.attention import case_of
from maxtext_like.numerics import attention_selfcheck, grouped_selfcheck, norm_selfcheck
from maxtext_like.numerics.attention_selfcheck import CaseResult, ShapeClass, self_test, shape_class

_log = logging.getLogger(__name__)
Verdicts = Mapping[Any, tuple[str, float | None]]
"""The problem of the kernel of each shape ("" if it passed), and the seconds that its test took (None: tested earlier)."""
FOLDER = "kernel-self-test"
SHIPPED = Path(sys.prefix, "share", "maxtext-like", FOLDER)
"""Folder of verdicts that come with a Python environment or a container image. It is only read."""
_AT_ONCE = 8  # kernels tested at a time: nearly all of the time is compilation, of which one takes one or two cores
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_KERNELS = Path(inspect.getfile(registry)).parents[1]
"""Folder of all kernels and of the code that they share."""


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
  decoder: Decoder,
  *,
  length: int,
  images: bool,
  patches: int | None = None,
  context: int = 1,
  segments: bool = True,
  capability: str | None = None,
  device: Any = None,
  cache: str | None = None,
  test: Callable[[ShapeClass], list[CaseResult]] = self_test,
  known: Verdicts | None = None,
) -> tuple[Decoder, tuple[KernelUse, ...]]:
  """Return the decoder with kernels that passed their self-test, and the kernel of each group of layers.

  Args:
    decoder: the model, as configured.
    length: positions of a row.
    images: batches contain images, whose tokens may see each other in both directions.
    patches: patches of an image, including padding; None: there are no images for a vision tower.
    context: devices that the positions of a row are split over.
    segments: batches have segments (documents or padding).
    capability: CUDA compute capability of the devices, if ``device`` does not have it; None if they are not NVIDIA GPUs or not
      known.
    device: device for the test; None: there is none (ahead of time), so nothing is tested.
    cache: folder of stored verdicts; None: they are not stored.
    test: the self-test.
    known: verdicts of ``first_shapes``; None to test them here.

  Raises:
    UserError: a kernel that the configuration names does not support a layer, or failed. "auto" falls back to the next one.
  """
  capability = getattr(device, "compute_capability", capability)
  if known is None and device is not None:
    shapes = first_shapes(
      decoder, length=length, images=images, patches=patches, context=context, segments=segments, capability=capability
    )
    known = verdict_each([(shape, test) for shape in shapes], device, cache)
  verdicts = dict(known or {})

  def look(asked: registry.Choice, case: Case, *, of: int, segments: bool) -> KernelUse:
    # Choose, test, and with "auto" choose again without the kernels that failed.
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
      if shapes[-1] not in verdicts:  # the first choices are tested together, the others when they are needed
        verdicts.update(verdict_each([(shapes[-1], test)], device, cache))
      problem, seconds = verdicts[shapes[-1]]
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

  # A layer chooses its kernel again when it is traced, for rows of any length, so it must know the device and the failed
  # kernels.
  layers = tuple(_with_mixer(layer, capability=capability) for layer in decoder.layers)
  tower = None if decoder.cfg.vision is None else dataclasses.replace(decoder.cfg.vision, capability=capability)
  cases = {
    layer: layer.mixer.case(length, images=images, documents=segments, context=context) for layer in dict.fromkeys(layers)
  }
  chosen: dict[Block, KernelUse] = {}
  for layer, case in cases.items():
    chosen[layer] = look(layer.cfg.mixer.kernel, case, of=len(layers), segments=segments)
  uses = _grouped([chosen[layer] for layer in layers])
  layers = tuple(_with_mixer(layer, failed=chosen[layer].failed) for layer in layers)
  decoder = dataclasses.replace(decoder, layers=layers)
  if tower is None:
    return decoder, uses
  if patches is not None:
    use = look(tower.kernel, case_of(tower, decoder.precision, patches), of=tower.num_layers, segments=tower.padded)
    uses = (*uses, dataclasses.replace(use, layers=tower.num_layers, tower=True))
    tower = dataclasses.replace(tower, failed=use.failed)
  return _with_tower(decoder, tower), uses


def plain_tower(decoder: Decoder) -> Decoder:
  """Return the decoder with plain XLA attention in its vision tower, if it has one."""
  tower = decoder.cfg.vision
  return decoder if tower is None else _with_tower(decoder, dataclasses.replace(tower, kernel="dot_product"))


def _with_tower(decoder: Decoder, tower: Any) -> Decoder:
  return dataclasses.replace(decoder, cfg=dataclasses.replace(decoder.cfg, vision=tower))


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


def first_shapes(
  decoder: Decoder,
  *,
  length: int,
  images: bool,
  patches: int | None = None,
  context: int = 1,
  segments: bool = True,
  capability: str | None = None,
) -> list[ShapeClass]:
  """Return the classes of the preferred kernels of all layers, without duplicates. Arguments: as for ``settle``."""
  found: dict[ShapeClass, None] = {}

  def add(asked: registry.Choice, case: Case, segments: bool) -> None:
    try:
      kernel = choose(asked, case, ())
    except ValueError:  # no kernel supports the layer, which ``settle`` reports
      return
    if kernel.fused:
      found[shape_of(kernel.name, case, segments)] = None

  for layer in dict.fromkeys(_with_mixer(layer, capability=capability) for layer in decoder.layers):
    add(layer.cfg.mixer.kernel, layer.mixer.case(length, images=images, documents=segments, context=context), segments)
  if (tower := decoder.cfg.vision) is not None and patches is not None:
    case = case_of(dataclasses.replace(tower, capability=capability), decoder.precision, patches)
    add(tower.kernel, case, tower.padded)
  return list(found)


def _grouped(uses: list[KernelUse]) -> tuple[KernelUse, ...]:
  """Merge equal entries, and count their layers."""
  return tuple(dataclasses.replace(use, layers=count) for use, count in collections.Counter(uses).items())


def verdict_each(tests: Sequence[tuple[Any, Callable[..., Any]]], device: Any, cache: str | None) -> Verdicts:
  """Return the verdict of each shape. Shapes without a stored verdict are tested at the same time.

  Args:
    tests: (a dataclass that describes a test and whose str() is printed, the self-test) without duplicates.
    device, cache: as in ``settle``.
  """
  if not tests:
    return {}
  of_machine = versions(device)
  with ThreadPoolExecutor(_AT_ONCE, "self-test") as pool:
    own = [*pool.map(lambda of: _own_verdict(of[0], device, of_machine, cache, of[1]), tests)]
  # The processes combine them in the same order.
  return {shape: (_combined(problem), seconds) for (shape, _), (problem, seconds) in zip(tests, own, strict=True)}


def _own_verdict(
  shape: Any, device: Any, of_machine: dict[str, Any], cache: str | None, test: Callable[..., Any]
) -> tuple[str, float | None]:
  """Return the verdict of this process."""
  key = {"device": device.device_kind, "shape": dataclasses.asdict(shape)} | of_machine
  digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
  path = None  # a cache in a bucket stores compiled programs only: testing at every start is cheaper than a bucket client
  if cache is not None and "://" not in cache:
    path = Path(os.path.expanduser(cache), FOLDER, f"{digest}.json")
  for stored in (path, SHIPPED / f"{digest}.json"):
    if stored is not None and (known := _read(stored, key)) is not None:
      return known, None
  begin = time.monotonic()
  with jax.default_device(device):
    results = test(shape)
  problem = _describe_failures(shape, results)
  # Do not store the verdict of a kernel that raised an error: the machine may have been out of memory.
  if path is not None and not any(r.raised for r in results):
    _write(path, key | {"problem": problem, "cases": [dataclasses.asdict(r) for r in results]})
  return problem, time.monotonic() - begin


def _describe_failures(shape: Any, results: list[CaseResult]) -> str:
  """Describe the failed cases. Cases with the same problem are listed together. Return "" if all passed."""
  failed: dict[str, list[str]] = {}
  for r in results:
    if r.problem:
      failed.setdefault(r.problem, []).append(r.name)
  said = "; ".join(f"{', '.join(names)}: {problem}" for problem, names in failed.items())
  return f"{shape}: {said}" if failed else ""


def _combined(problem: str) -> str:
  """Combine the verdicts of all processes. They run one program, so a failure in one process counts for all."""
  if jax.process_count() == 1:
    return problem
  from jax.experimental import multihost_utils

  failed = np.atleast_1d(multihost_utils.process_allgather(np.asarray(bool(problem))))
  if failed.any() and not problem:
    return f"it failed its self-test in process {int(np.argmax(failed))} of this run"
  return problem


def versions(device: Any) -> dict[str, Any]:
  """Return the versions of everything that a verdict depends on: packages, driver, compiler flags, and sources of the
  kernels."""
  found = {}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  driver = Path("/proc/driver/nvidia/version")
  beside = [Path(inspect.getfile(module)) for module in (masks, attention_selfcheck, grouped_selfcheck, norm_selfcheck)]
  sources = b"".join(path.read_bytes() for path in (*sorted(_KERNELS.rglob("*.py")), *beside))
  return {
    "packages": found,
    "platform": device.client.platform_version,
    "driver": driver.read_text().splitlines()[0] if device.platform in ("gpu", "cuda") and driver.is_file() else "",
    "flags": {name: os.environ.get(name, "") for name in _VARIABLES},
    "sources": hashlib.sha256(sources).hexdigest(),
  }


def _read(path: Path, key: dict[str, Any]) -> str | None:
  """Return the stored problem ("" is a pass), or None if there is no verdict for exactly this key."""
  try:
    stored = json.loads(path.read_text("utf-8"))
    if {name: stored[name] for name in key} == key and isinstance(stored["problem"], str):
      return stored["problem"]
    _log.warning("%s: the stored verdict is for another kernel or version than its name says; testing the kernel again", path)
  except FileNotFoundError:
    return None
  except (OSError, ValueError, KeyError, TypeError) as error:
    _log.warning("%s: cannot read the stored verdict (%s: %s); testing the kernel again", path, type(error).__name__, error)
  return None


def _write(path: Path, entry: dict[str, Any]) -> None:
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(entry, indent=1) + "\n")
  except OSError as error:
    _log.warning("%s: cannot store the verdict (%s); the next run will test the kernel again", path, error.strerror)
