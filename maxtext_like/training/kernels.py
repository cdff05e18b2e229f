"""Which attention kernel every layer gets: the one that fits its shapes, once it has passed its self-test on this device.

A verdict holds for a device kind, a shape class and the versions of everything between the layer and the device; it is
kept beside the compiled programs, so that a run tests once and the next one reads.
"""

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like.checkpoint import atomic
from maxtext_like.errors import UserError
from maxtext_like.layers import attention_kernels, masks, splash
from maxtext_like.layers.attention import AttentionConfig
from maxtext_like.layers.attention_kernels import Kernel, choose_kernel
from maxtext_like.layers.blocks import GemmaLayer
from maxtext_like.layers.decoder import Decoder
from maxtext_like.numerics import kernel_test
from maxtext_like.numerics.kernel_test import CaseResult, ShapeClass, self_test, shape_class

_log = logging.getLogger(__name__)
FOLDER = "kernel-self-test"
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclass(frozen=True, kw_only=True)
class KernelUse:
  """What some layers of a model run on, and why.

  Attributes:
    kernel: what they run on.
    layers: how many of them, of ``of`` layers.
    of: layers of the model with attention that a fused kernel could do.
    shape: the class of the fused kernel that was looked at; None: no fused kernel can do these layers.
    tested: on which device; "" where it was not tested, since there is no device.
    seconds: of the test; None: an earlier run's verdict.
    problem: why the fused kernel is not used; "" where it is.
  """

  kernel: Kernel
  layers: int
  of: int
  shape: ShapeClass | None = None
  tested: str = ""
  seconds: float | None = None
  problem: str = ""

  def __str__(self) -> str:
    share = f"{self.layers} of {self.of} layers"
    if self.shape is None:
      return f"{self.kernel} in {share}"
    if self.problem:
      return f"{self.kernel} instead of {self.shape.kernel} in {share}: failed its self-test on {self.tested}: {self.problem}"
    if not self.tested:
      return f"{self.kernel} in {share}, not self-tested: there is no device"
    when = "earlier" if self.seconds is None else f"in {self.seconds:.0f} s"
    return f"{self.kernel} in {share}, self-test passed on {self.tested} {when}"

  def to_json(self) -> dict[str, Any]:
    """As an entry of env.json."""
    return dataclasses.asdict(self)


def settle(
  decoder: Decoder,
  *,
  platform: str,
  length: int,
  images: bool,
  segments: bool = True,
  device: Any = None,
  cache: str | None = None,
  test: Callable[[ShapeClass], list[CaseResult]] = self_test,
) -> tuple[Decoder, tuple[KernelUse, ...]]:
  """The decoder with the kernels that can be trusted, and what each group of layers got.

  Args:
    decoder: the model, as configured.
    platform: "cpu", "gpu" or "tpu", where it will run.
    length: positions of a row.
    images: batches hold images, whose tokens may see each other both ways.
    segments: batches say which document a position belongs to.
    device: where to test; None: there is none (ahead of time), so nothing is tested.
    cache: folder of verdicts; None: none are kept.
    test: the self-test.

  Raises:
    UserError: a kernel that the configuration names cannot do this, or failed; "auto" falls back to dot_product.
  """
  configs = [layer.cfg.attention for layer in decoder.layers if isinstance(layer, GemmaLayer)]
  chosen: dict[AttentionConfig, KernelUse] = {}
  verdicts: dict[ShapeClass, tuple[str, float | None]] = {}
  for cfg in dict.fromkeys(configs):
    use = KernelUse(kernel="dot_product", layers=configs.count(cfg), of=len(configs))
    shape = _fused(cfg, decoder.precision.dtype, platform, length, images, segments)
    if shape is not None:
      if device is None:
        use = dataclasses.replace(use, kernel=shape.kernel, shape=shape)
      else:
        if shape not in verdicts:
          verdicts[shape] = _verdict(shape, device, cache, test)
        problem, seconds = verdicts[shape]
        kernel = "dot_product" if problem else shape.kernel
        use = dataclasses.replace(use, kernel=kernel, shape=shape, tested=device.device_kind, seconds=seconds, problem=problem)
    if use.problem and cfg.kernel != "auto":
      raise UserError(
        f"attention={cfg.kernel} failed its self-test on {use.tested}: {use.problem}\n"
        "  fix: attention=auto, which falls back by itself, or attention=dot_product"
      )
    chosen[cfg] = use
  layers = [
    _written_out(layer) if isinstance(layer, GemmaLayer) and chosen[layer.cfg.attention].problem else layer
    for layer in decoder.layers
  ]
  return dataclasses.replace(decoder, layers=tuple(layers)), _grouped(list(chosen.values()))


def _written_out(layer: GemmaLayer) -> GemmaLayer:
  attention = dataclasses.replace(layer.cfg.attention, kernel="dot_product")
  return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, attention=attention))


def _fused(cfg: AttentionConfig, dtype: str, platform: str, length: int, images: bool, segments: bool):
  try:
    kernel = choose_kernel(
      cfg.kernel, platform=platform, head_dim=cfg.head_dim, value_dim=cfg.head_dim, dtype=dtype,
      blocks=cfg.bidirectional_blocks and images, length=length,
    )  # fmt: skip
  except ValueError as error:
    raise UserError(str(error)) from error
  if kernel == "dot_product":
    return None
  return shape_class(
    kernel, dtype=dtype, head_dim=cfg.head_dim, query_heads=cfg.num_query_heads, kv_heads=cfg.num_kv_heads,
    window=cfg.window is not None, segments=segments, length=length,
  )  # fmt: skip


def _grouped(uses: list[KernelUse]) -> tuple[KernelUse, ...]:
  """One entry for what came out alike."""
  groups: dict[KernelUse, int] = {}
  for use in uses:
    key = dataclasses.replace(use, layers=0)
    groups[key] = groups.get(key, 0) + use.layers
  return tuple(dataclasses.replace(key, layers=layers) for key, layers in groups.items())


def _verdict(shape: ShapeClass, device: Any, cache: str | None, test: Callable[..., Any]) -> tuple[str, float | None]:
  """What is wrong with the kernel ("" is nothing), and the seconds of the test (None: it was tested earlier)."""
  key = {"device": device.device_kind, "shape": dataclasses.asdict(shape)} | versions(device)
  path = None  # a cache in a bucket holds compiled programs only: a test at every start costs less than a client for it
  if cache is not None and "://" not in cache:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    path = Path(os.path.expanduser(cache), FOLDER, f"{digest}.json")
  known = None if path is None else _read(path, key)
  begin, results = time.monotonic(), []
  if known is None:
    with jax.default_device(device):
      results = test(shape)
    known = _told(shape, results)
  together = _together(known)
  if results:
    # A kernel that raised is tried again by the next run: the machine may have been short of memory.
    if path is not None and not any(r.raised for r in results):
      _write(path, key | {"problem": known, "cases": [dataclasses.asdict(r) for r in results]})
    return together, time.monotonic() - begin
  return together, None


def _told(shape: ShapeClass, results: list[CaseResult]) -> str:
  """What is wrong, by case; cases that failed in the same words are named together. "" is nothing."""
  failed: dict[str, list[str]] = {}
  for r in results:
    if r.problem:
      failed.setdefault(r.problem, []).append(r.name)
  said = "; ".join(f"{', '.join(names)}: {problem}" for problem, names in failed.items())
  return f"{shape}: {said}" if failed else ""


def _together(problem: str) -> str:
  """The verdict of all processes: they run one program, so one that cannot trust the kernel decides for all."""
  if jax.process_count() == 1:
    return problem
  from jax.experimental import multihost_utils

  failed = np.atleast_1d(multihost_utils.process_allgather(np.asarray(bool(problem))))
  if failed.any() and not problem:
    return f"it failed in process {int(np.argmax(failed))} of this run"
  return problem


def versions(device: Any) -> dict[str, Any]:
  """Everything between a layer and a device: packages, driver, flags of the compiler, and the sources of the kernels."""
  found = {}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  driver = Path("/proc/driver/nvidia/version")
  sources = "".join(inspect.getsource(module) for module in (attention_kernels, splash, masks, kernel_test))
  return {
    "packages": found,
    "platform": device.client.platform_version,
    "driver": driver.read_text().splitlines()[0] if device.platform in ("gpu", "cuda") and driver.is_file() else "",
    "flags": {name: os.environ.get(name, "") for name in _VARIABLES},
    "sources": hashlib.sha256(sources.encode()).hexdigest(),
  }


def _read(path: Path, key: dict[str, Any]) -> str | None:
  """The stored problem ("" is a pass); None when there is no verdict for exactly this key."""
  try:
    stored = json.loads(path.read_text("utf-8"))
    if {name: stored[name] for name in key} == key and isinstance(stored["problem"], str):
      return stored["problem"]
    _log.warning("%s: is not the verdict that its name says; the kernel is tested again", path)
  except FileNotFoundError:
    return None
  except (OSError, ValueError, KeyError, TypeError) as error:
    _log.warning("%s: cannot be read (%s: %s); the kernel is tested again", path, type(error).__name__, error)
  return None


def _write(path: Path, entry: dict[str, Any]) -> None:
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(entry, indent=1) + "\n")
  except OSError as error:
    _log.warning("%s: cannot be written (%s); the next run tests the kernel again", path, error.strerror)
