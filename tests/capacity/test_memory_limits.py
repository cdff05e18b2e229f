"""The memory limits of a device, of this machine and of its container."""

from dataclasses import replace
from pathlib import Path

import pytest

from maxtext_like.capacity import memory_limits
from maxtext_like.capacity.memory_limits import Limit
from maxtext_like.errors import UserError


def test_the_container_counts_when_it_has_less_than_the_machine(tmp_path: Path):
  meminfo = tmp_path / "meminfo"
  meminfo.write_text("MemTotal:       100 kB\nMemAvailable:   80 kB\n")
  nowhere = tmp_path / "none"
  assert memory_limits.host_limit(meminfo, nowhere, nowhere) == Limit(80 * 1024, "MemAvailable of /proc/meminfo")
  (tmp_path / "memory.max").write_text("50000\n")
  (tmp_path / "memory.current").write_text("20000\n")
  limit = memory_limits.host_limit(meminfo, tmp_path, tmp_path / "none")
  assert limit is not None
  assert limit.bytes == 30000
  # Before it enforces the limit, the kernel frees 15 kB of cached files.
  (tmp_path / "memory.stat").write_text("anon 4000\nactive_file 1000\ninactive_file 15000\n")
  assert memory_limits.host_limit(meminfo, tmp_path, tmp_path / "none") == replace(limit, bytes=45000)
  (tmp_path / "memory.max").write_text("max\n")
  assert memory_limits.host_limit(meminfo, tmp_path, tmp_path / "none") == Limit(80 * 1024, "MemAvailable of /proc/meminfo")
  assert memory_limits.host_limit(tmp_path / "absent", tmp_path) is None


@pytest.mark.parametrize(
  ("membership", "group", "names"),
  [
    ("0::/system.slice/job.scope\n", "system.slice", ("memory.max", "memory.current")),
    ("0::/system.slice/job.scope\n", "system.slice/job.scope", ("memory.max", "memory.current")),
    ("4:cpu:/x\n5:memory:/slurm/job_1/step\n", "memory/slurm/job_1", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ("4:cpu,memory:/slurm\n0::/\n", "memory/slurm", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ("0::/../../outside\n", "", ("memory.max", "memory.current")),
  ],
)
def test_a_limit_of_any_group_above_this_process_counts(tmp_path: Path, membership, group, names):
  (meminfo := tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 80 kB\n")
  (own := tmp_path / "cgroup").write_text(membership)
  (place := tmp_path / "fs" / group).mkdir(parents=True)
  (place / names[0]).write_text("50000\n")
  (place / names[1]).write_text("20000\n")
  cache = {"memory.max": "inactive_file 5000\n", "memory.limit_in_bytes": "inactive_file 1\ntotal_inactive_file 5000\n"}
  (place / "memory.stat").write_text(cache[names[0]])
  limit = memory_limits.host_limit(meminfo, tmp_path / "fs", own)
  assert limit == Limit(35000, f"{place / names[0]} of the container")


def test_a_device_that_does_not_say_how_much_it_has_is_known_by_its_name():
  class Device:
    platform, device_kind = "gpu", "NVIDIA H200"

    def memory_stats(self):
      return None

  limit = memory_limits.device_limit(Device(), 1)
  assert limit is not None
  assert (limit.bytes, limit.source) == (150_109_880_320, "NVIDIA H200, all of it")
  Device.device_kind = "NVIDIA GeForce"
  assert memory_limits.device_limit(Device(), 1) is None


@pytest.mark.parametrize("text", ["64GB", "0.5", "-1", "1_000"])
def test_a_limit_that_is_no_number_is_named(text, monkeypatch):
  monkeypatch.setattr(memory_limits, "host_limit", lambda: None)
  monkeypatch.setenv(memory_limits.PINNED, text)
  with pytest.raises(UserError, match=f"{memory_limits.PINNED}={text}: not an integer number of GiB\n  fix: "):
    memory_limits.host_room("gpu")
  assert memory_limits.host_room("tpu") is None


@pytest.mark.parametrize(("text", "gib"), [("", 64), (" 128 ", 128), ("0", 0)])
def test_a_limit_that_is_a_number_counts(text, gib, monkeypatch):
  monkeypatch.setattr(memory_limits, "host_limit", lambda: None)
  monkeypatch.setenv(memory_limits.PINNED, text)
  found = memory_limits.host_room("gpu")
  assert found is not None
  assert found.bytes == gib << 30
