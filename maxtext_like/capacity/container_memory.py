"""The memory that the control groups (cgroups) of this process leave free. Containers, systemd units and Slurm jobs set limits
on them.
"""

from pathlib import Path

_FILES = (
  ("memory.max", "memory.current", "inactive_file"),
  ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The limit and the use of a group, and the key of its unused file cache in memory.stat, in version 2 and version 1."""


def left(root: Path, membership: Path) -> list[tuple[int, Path]]:
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
