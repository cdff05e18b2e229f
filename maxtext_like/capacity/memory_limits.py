"""The memory that a device, this machine and its container have, and how much of it is in use.

Containers, systemd units and Slurm jobs limit memory with control groups (cgroups).
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxtext_like.capacity.topologies import memory_of
from maxtext_like.errors import UserError

GB = 1e9

PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable with the host memory in GiB that JAX allows the GPUs of a process to use together; 64 by default."""

_FILES = (
  ("memory.max", "memory.current", "inactive_file"),
  ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The limit and the use of a control group, and the key of its unused file cache in memory.stat, in version 2 and version 1."""


@dataclass(frozen=True)
class Limit:
  """The available memory: bytes that one device may use, and the source of the number."""

  bytes: int
  source: str


def device_limit(device: Any, devices_here: int) -> Limit | None:
  """Return the memory that one jax device may use, or None if it is unknown. CPU devices share the memory of the machine."""
  if device.platform == "cpu":
    limit = host_limit()
    return limit and Limit(limit.bytes // devices_here, limit.source)
  stats = device.memory_stats() or {}
  if "bytes_limit" in stats:
    return Limit(stats["bytes_limit"], f"{device.device_kind}, memory_stats")
  known = memory_of(device.device_kind)  # with an allocator other than JAX's own
  return None if known is None else Limit(known, f"{device.device_kind}, all of it")


def in_use(devices: Iterable[Any]) -> dict[str, float]:
  """Return memory_gb and memory_peak_gb of the fullest device of this process, now and since the start; {} if the device does
  not report them."""
  here = [stats for d in devices if d.process_index == jax.process_index() and (stats := d.memory_stats())]
  names = {"memory_gb": "bytes_in_use", "memory_peak_gb": "peak_bytes_in_use"}
  return {key: max(s[name] for s in here) / GB for key, name in names.items() if here and all(name in s for s in here)}


def host_limit(
  meminfo: Path = Path("/proc/meminfo"),
  cgroup: Path = Path("/sys/fs/cgroup"),
  membership: Path = Path("/proc/self/cgroup"),
) -> Limit | None:
  """Return the memory of this machine that is available now, or that its container may still use; None without /proc."""
  if not meminfo.exists():
    return None
  fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
  found = [Limit(int(fields["MemAvailable"].split()[0]) * 1024, "MemAvailable of /proc/meminfo")]
  found += [Limit(left, f"{file} of the container") for left, file in container_limits(cgroup, membership)]
  return min(found, key=lambda limit: limit.bytes)


def host_room(platform: str) -> Limit | None:
  """Return the host memory that the devices of this process may use together; None if it is unknown.

  Raises:
    UserError: the environment variable for GPUs is not a number.
  """
  found = [host_limit()]
  if platform == "gpu":
    text = os.environ.get(PINNED, "").strip() or "64"
    if not text.isdecimal():
      raise UserError(f"environment variable {PINNED}={text}: not an integer number of GiB\n  fix: unset it, or {PINNED}=64")
    found.append(Limit(int(text) << 30, f"{PINNED}, 64 unless set"))
  return min((limit for limit in found if limit is not None), key=lambda limit: limit.bytes, default=None)


def container_limits(root: Path, membership: Path) -> list[tuple[int, Path]]:
  """Return the bytes that each limited group of this process leaves, and the file of its limit.

  A limit holds for every group below it, so the group of this process and all groups above it count. The use of a group
  contains files that were read, such as data and checkpoints. The kernel frees those that are no longer used before it
  enforces the limit, so they count as free.

  Args:
    root: where the groups are mounted (/sys/fs/cgroup).
    membership: /proc/self/cgroup.
  """
  found = []
  for group in _groups(root, membership):
    for maximum, current, cache in _FILES:
      try:
        text = (group / maximum).read_text().strip()
        used = int((group / current).read_text()) - _statistic(group, cache)
      except (OSError, ValueError):  # no such group or no limit here; a job that ends removes its group
        continue
      if text.isdecimal():
        found.append((max(int(text) - used, 0), group / maximum))
  return found


def _statistic(group: Path, key: str) -> int:
  """Return a number of a group's memory.stat in bytes, or 0 if the kernel does not write it."""
  file = group / "memory.stat"
  lines = file.read_text().splitlines() if file.exists() else []
  return next((int(value) for name, value in map(str.split, lines) if name == key), 0)


def _groups(root: Path, membership: Path) -> list[Path]:
  found = [root, root / "memory"]  # in a container the paths may be those of the host, and the mount is its own group
  try:
    lines = membership.read_text().splitlines()
  except OSError:
    lines = []
  for line in lines:
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
      continue
    base, inside = root / "memory" if controllers else root, Path(path.strip("/"))
    if ".." not in inside.parts:
      found += [base / part for part in (inside, *inside.parents)]
  return list(dict.fromkeys(found))
