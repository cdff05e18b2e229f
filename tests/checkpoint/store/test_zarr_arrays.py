"""Tests zarr_arrays.py: arrays come back bit for bit on another mesh, large ones in chunks; damage never becomes a value."""

import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_like.checkpoint.store import zarr_arrays
from maxtext_like.errors import RetryableError
from maxtext_like.storage import Place
from tests.gcs_emulator import BUCKET
from tests.s3_emulator import emulator

SPLIT = {"a": PartitionSpec("x"), "b": PartitionSpec("y", "x"), "c": PartitionSpec(), "scalar": PartitionSpec()}


def mesh(*sizes):
  return jax.make_mesh(sizes, ("x", "y"), devices=jax.devices()[: sizes[0] * sizes[1]])


def values():
  rng = np.random.default_rng(0)
  return {
    "a": rng.standard_normal((8, 3)).astype(jnp.bfloat16),
    "b": rng.standard_normal((4, 6)).astype(np.float32),
    "c": rng.integers(-8, 7, (5,)).astype(np.int8),
    "scalar": np.int32(7),
  }


def written(place):
  """Write arrays that are split over 2 x 2 devices, or over one device if the process has fewer than four."""
  size = 2 if jax.device_count() >= 4 else 1
  own = mesh(size, size)
  flat = {name: jax.device_put(x, NamedSharding(own, SPLIT[name])) for name, x in values().items()}
  writer = zarr_arrays.Writer(60)
  writer.save(place, flat)
  for x in flat.values():
    x.delete()  # training reuses their memory
  writer.wait_until_finished()
  return flat


def read(place, kind=None):
  sharding = NamedSharding(mesh(1, 1), PartitionSpec(), memory_kind=kind)
  like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in values().items()}
  return zarr_arrays.read(place, like)


def test_arrays_come_back(monkeypatch):
  store = emulator()
  monkeypatch.setattr(zarr_arrays, "_CHUNK_BYTES", 16)
  place = Place(f"s3://{BUCKET}/arrays/1/state")
  written(place)
  for kind in (None, "pinned_host"):
    for name, x in read(place, kind).items():
      assert x.dtype == values()[name].dtype
      assert kind in (None, x.sharding.memory_kind)
      np.testing.assert_array_equal(np.asarray(x), values()[name])
  metadata = json.loads(store.read("arrays/1/state/b/zarr.json"))
  assert np.prod(metadata["chunk_grid"]["configuration"]["chunk_shape"]) * 4 <= 16
  chunk = next(name for name in store.names("arrays/1/state/b/c/"))
  content = store.read(chunk)
  store.write(chunk, content[:2] + bytes([content[2] ^ 1]) + content[3:])
  with pytest.raises(RetryableError, match=r"arrays/1/state: cannot be read: .*(CRC|checksum|digest)"):
    read(place)


@pytest.mark.parametrize("part", [(), (0, 3), (62, 5376, 21504), (7, 3 << 22), (5, 1 << 24), (1, 1 << 25)])
def test_chunks_divide_a_part_and_are_no_larger_than_a_request(part):
  found = zarr_arrays._chunk(part, 4)
  assert all(size % piece == 0 for size, piece in zip(part, found, strict=True))
  assert min(2 << 20, int(np.prod(part))) <= 4 * np.prod(found) <= 64 << 20


def test_parts_in_host_memory_are_limited(monkeypatch):
  """The limit is 100 bytes. There are twelve arrays of 40 bytes, and one that is larger than the limit."""
  lock, held, most = threading.Lock(), 0, []

  class Stored:
    def __init__(self, size):
      self.size = size

    def __getitem__(self, index):
      return self

    def read(self):
      nonlocal held
      with lock:
        held += 4 * self.size
        most.append(held)
      time.sleep(0.005)
      return self

    def result(self):
      nonlocal held
      with lock:
        held -= 4 * self.size
      return np.full(self.size, self.size, np.float32)

  sizes = {f"a{i}": 10 for i in range(12)} | {"large": 70}
  monkeypatch.setattr(zarr_arrays, "opened", lambda place: Stored(sizes[place.name]))
  monkeypatch.setattr(zarr_arrays, "_READ_BYTES", 100)
  sharding = NamedSharding(mesh(1, 1), PartitionSpec())
  found = zarr_arrays.read(
    Place(f"s3://{BUCKET}/x"),
    {name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding) for name, size in sizes.items()},
  )
  assert {name: float(x.sum()) for name, x in found.items()} == {name: float(size**2) for name, size in sizes.items()}
  assert len(most) == 13
  assert max(most) == 280, "the large one was read alone"
  assert sorted(most)[-2] <= 80
