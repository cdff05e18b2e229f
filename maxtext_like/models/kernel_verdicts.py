"""Runs the self-tests of kernels on a device, and stores their verdicts.

The verdict of a self-test is valid for a kind of device, a class of shapes, and the versions of all software between the layer
and the device. It is stored in the folder of compiled programs, so that later runs need not repeat the test. Verdicts in
``SHIPPED`` are read too, which the users of a Python environment or of a container image share.
"""

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like import atomic
from maxtext_like.errors import is_out_of_memory
from maxtext_like.layers.attention import masks
from maxtext_like.layers.kernels.attention import registry
from maxtext_like.layers.quantization import codebooks
from maxtext_like.numerics import (
  attention_selfcheck,
  decode_selfcheck,
  grouped_selfcheck,
  norm_selfcheck,
  quantized_selfcheck,
  selfcheck_programs,
)
from maxtext_like.numerics.attention_selfcheck import CaseResult

_log = logging.getLogger(__name__)
Verdicts = Mapping[Any, tuple[str, float | None]]
"""The problem of the kernel of each shape ("" if it passed), and the seconds that its test took (None: tested earlier)."""
Tests = Sequence[tuple[Any, Callable[..., list[CaseResult]]]]
"""Pairs of a shape (a dataclass that describes a test and whose str() is printed) and its self-test, without duplicates."""
FOLDER = "kernel-self-test"
SHIPPED = Path(sys.prefix, "share", "maxtext-like", FOLDER)
"""Folder of verdicts that come with a Python environment or a container image. It is only read."""
_AT_ONCE = 8  # kernels tested at a time: nearly all of the time is compilation, of which one takes one or two cores
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_KERNELS = Path(inspect.getfile(registry)).parents[1]
"""Folder of all kernels and of the code that they share."""


@dataclass(frozen=True, kw_only=True)
class Target:
  """The devices that a program will run on, and what self-tests of kernels found there.

  Attributes:
    platform: "cpu", "gpu" or "tpu".
    devices: number of devices of the mesh.
    capability: CUDA compute capability of the devices; None if they are not NVIDIA GPUs or not known.
    device: device for self-tests; None: there is none (ahead of time), so nothing is tested.
    cache: folder of stored verdicts; None: they are not stored.
    known: verdicts of the tests that ran.
  """

  platform: str
  devices: int = 1
  capability: str | None = None
  device: Any = None
  cache: str | None = None
  known: Verdicts = field(default_factory=dict)

  def tested(self, tests: Tests) -> "Target":
    """Return the target with the verdicts of these tests. Those without a verdict run at the same time."""
    if self.device is None:
      return self
    new = [(shape, test) for shape, test in tests if shape not in self.known]
    return dataclasses.replace(self, known={**self.known, **verdict_each(new, self.device, self.cache)})


def numbers_of(capability: str | None) -> tuple[int, int] | None:
  """Return the two numbers of a CUDA compute capability; None if it is not known, or a name as for GPUs of other vendors."""
  found = re.fullmatch(r"(\d+)\.(\d+)", capability or "")
  return None if found is None else (int(found[1]), int(found[2]))


def verdict_each(tests: Tests, device: Any, cache: str | None) -> Verdicts:
  """Return the verdict of each shape. Shapes without a stored verdict are tested at the same time.

  Tests share the memory of the device and of the host. One that raises an error is repeated alone.

  Args:
    tests: the tests.
    device: device to run them on.
    cache: folder of stored verdicts; None: they are not stored.
  """
  if not tests:
    return {}
  of_machine = versions(device)
  with ThreadPoolExecutor(_AT_ONCE, "self-test") as pool:
    own = [*pool.map(lambda of: _own_verdict(of[0], device, of_machine, cache, of[1]), tests)]
  for i, (shape, test) in enumerate(tests):
    if own[i] is None:
      _log.info("%s: its self-test raised an error; testing it again alone", shape)
      own[i] = _own_verdict(shape, device, of_machine, cache, test, alone=True)
  # The processes combine them in the same order.
  return {shape: (_combined(found[0]), found[1]) for (shape, _), found in zip(tests, own, strict=True) if found is not None}


def _own_verdict(
  shape: Any, device: Any, of_machine: dict[str, Any], cache: str | None, test: Callable[..., Any], *, alone: bool = False
) -> tuple[str, float | None] | None:
  """Return the verdict of this process; None if the test raised an error and was not ``alone``."""
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
    try:
      results = test(shape)
    except Exception as error:
      # Tests at the same time may also lack processes: XLA's "Failed to launch ptxas", seen on an H200.
      if alone and not is_out_of_memory(error):
        raise
      results = [CaseResult.of_error("the reference", error)]
  if not alone and any(r.raised for r in results):
    return None
  problem = _describe_failures(shape, results)
  # Do not store the verdict of a kernel that raised an error: the reason may be the state of the machine, such as its memory.
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
  tests = (attention_selfcheck, decode_selfcheck, grouped_selfcheck, norm_selfcheck, quantized_selfcheck)
  shared = (masks, codebooks, selfcheck_programs)
  beside = [Path(inspect.getfile(module)) for module in (*shared, *tests)]
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
