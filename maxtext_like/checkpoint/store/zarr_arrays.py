"""Reads and writes the arrays of a step as zarr version 3 with TensorStore, for s3://, to which orbax cannot write.

Each array is ``state/<name>/zarr.json`` and its chunks, each with a CRC-32C at its end. A process writes the shards of its
devices (of replicated shards, the first replica) and reads the parts that its devices need, whatever mesh wrote them. Names are
those of ``tree``.
"""

import contextlib
import errno
import functools
import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like.checkpoint.store import manifest
from maxtext_like.errors import RetryableError
from maxtext_like.sharding import host_memory, processes
from maxtext_like.storage import Place, endpoint

_CHUNK_BYTES = 64 << 20  # small enough for one request (limit 5 GB) and for meshes whose shards are smaller than a chunk
_AT_ONCE = 8  # arrays written or read at a time; each has a second copy in host memory meanwhile
_READ_BYTES = 4 << 30  # limit of the parts of arrays that are in host memory while a step is read; one part may be larger


def uses_zarr(place: Path | Place) -> bool:
  """Returns True if arrays in this place are written as zarr."""
  return isinstance(place, Place) and place.protocol == "s3"


def holds_zarr(stored: manifest.Manifest) -> bool:
  """Returns True if TensorStore wrote this step directly. Orbax would have written a _METADATA file."""
  return f"{manifest.STATE_NAME}/_METADATA" not in stored.files


class Writer:
  """Writes states one after the other, each in two phases as orbax does: the copy to the host, and the slow upload.

  Args:
    seconds: how long processes wait for each other.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds
    self._place: Place | None = None
    self._parts: list[tuple[str, jax.ShapeDtypeStruct, tuple[int, ...], list[tuple[Any, np.ndarray]]]] = []

  def save(self, place: Place, flat: Mapping[str, jax.Array]) -> None:
    """Copies the shards that this process writes to the host. Afterwards the arrays may be changed."""
    self._place, self._parts = place, []
    own = {name: [shard for shard in x.addressable_shards if shard.replica_id == 0] for name, x in flat.items()}
    for shard in (shard for shards in own.values() for shard in shards if not host_memory.is_on_host(shard.data)):
      shard.data.copy_to_host_async()
    for name, x in flat.items():
      parts = [(shard.index, np.array(host_memory.on_device(shard.data))) for shard in own[name]]
      self._parts.append((name, jax.ShapeDtypeStruct(x.shape, x.dtype), x.sharding.shard_shape(x.shape), parts))

  def wait_until_finished(self) -> None:
    """Uploads the copied shards, and waits until every process has done so.

    Raises:
      RetryableError: another process did not arrive in time.
      ValueError: TensorStore cannot write.
    """
    assert self._place is not None
    if processes.primary():  # create all arrays first: opening one that is being created in the same process fails
      of = {name: _metadata(like, part) for name, like, part, _ in self._parts}
      for made in [_open(self._place / name, metadata=metadata, create=True, open=True) for name, metadata in of.items()]:
        made.result()
    processes.gather(f"made {self._place}", self._seconds)  # no process may write to an array that does not exist yet
    # Upload several arrays at a time.
    under_way: deque[Any] = deque()
    while self._parts or under_way:
      if self._parts and len(under_way) < _AT_ONCE:
        under_way.append(self._write(*self._parts.pop(0)))
      else:
        for done in under_way.popleft():
          done.result()
    processes.gather(f"written {self._place}", self._seconds)

  def _write(
    self, name: str, like: jax.ShapeDtypeStruct, part: tuple[int, ...], pieces: list[tuple[Any, np.ndarray]]
  ) -> list[Any]:
    """Starts to write an array. Returns the futures to wait for."""
    assert self._place is not None
    if not pieces:
      return []
    array = _open(self._place / name, metadata=_metadata(like, part), open=True, assume_metadata=True).result()
    return [array[index].write(data, can_reference_source_data_indefinitely=True) for index, data in pieces]

  def close(self) -> None:
    """Does nothing; orbax's writer has something to close."""


def read(state: Path | Place, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Reads arrays by name; each device gets its own part.

  Args:
    state: folder of the arrays.
    wanted: shapes, stored dtypes and shardings by name.

  Raises:
    RetryableError: the arrays cannot be read, or a chunk fails its checksum.
  """

  held, room = 0, threading.Condition()

  @contextlib.contextmanager
  def reserved(size: int) -> Iterator[None]:
    nonlocal held
    with room:
      room.wait_for(lambda: not held or held + size <= _READ_BYTES)
      held += size
    try:
      yield
    finally:
      with room:
        held -= size
        room.notify_all()

  def one(name: str) -> jax.Array:
    like = wanted[name]
    array = opened(state / name)
    # The devices with the same part. Tuples of slices are not hashable in Python 3.11.
    parts: dict[str, tuple[Any, list[Any]]] = {}
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
      parts.setdefault(str(index), (index, []))[1].append(device)
    arrays, size = [], math.prod(like.sharding.shard_shape(like.shape)) * like.dtype.itemsize
    for index, devices in parts.values():
      with reserved(size):
        part = np.asarray(array[index].read().result())
        places = [jax.sharding.SingleDeviceSharding(device, memory_kind=like.sharding.memory_kind) for device in devices]
        arrays += jax.block_until_ready([jax.device_put(part, place) for place in places])
        del part
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)

  try:
    with ThreadPoolExecutor(_AT_ONCE, "read") as pool:
      return dict(zip(wanted, pool.map(one, wanted), strict=True))
  except (ValueError, OSError) as error:  # TensorStore raises ValueError
    raise RetryableError(f"{state}: cannot be read: {' '.join(str(error).split())[:300]}") from error


def opened(place: Path | Place) -> Any:
  """Opens one array as a ``tensorstore.TensorStore``. Raises ValueError if it does not exist."""
  return _open(place, open=True, read=True).result()


def _open(place: Path | Place, *, metadata: dict[str, Any] | None = None, assume_metadata: bool = False, **how: Any) -> Any:
  import tensorstore

  spec: dict[str, Any] = {"driver": "zarr3", "kvstore": _store(place)}
  if metadata is not None:
    spec |= {"metadata": metadata, "store_data_equal_to_fill_value": True}
  return tensorstore.open(spec | ({"assume_metadata": True} if assume_metadata else {}), context=_context(), **how)


def _store(place: Path | Place) -> dict[str, Any]:
  if isinstance(place, Path):
    return {"driver": "file", "path": f"{place.absolute()}/"}
  if place.protocol != "s3":
    raise OSError(errno.ENOTSUP, "zarr arrays can only be stored in s3:// or on a disk", str(place))
  bucket, *names = place.parts
  return {"driver": "s3", "bucket": bucket, "path": f"{'/'.join(names)}/", **endpoint()}


@functools.cache
def _context() -> Any:
  """Returns the context shared by all arrays, so that the credentials are requested only once."""
  import tensorstore

  kind = "environment" if os.environ.get("AWS_ACCESS_KEY_ID") else "default"
  return tensorstore.Context({"aws_credentials": {"type": kind}})


def _metadata(like: jax.ShapeDtypeStruct, part: tuple[int, ...]) -> dict[str, Any]:
  """Returns the zarr metadata of an array whose devices hold shards of shape ``part``."""
  return {
    "shape": list(like.shape),
    "data_type": str(like.dtype),
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk(part, like.dtype.itemsize)}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
  }


def _chunk(part: tuple[int, ...], itemsize: int) -> list[int]:
  """Returns the chunk shape: it divides the shard shape and has at most ``_CHUNK_BYTES``; the first axes are cut first."""
  chunk = [max(1, size) for size in part]
  for axis, size in enumerate(chunk):
    whole = itemsize * int(np.prod(chunk))
    if whole <= _CHUNK_BYTES:
      break
    wanted = -(-whole // _CHUNK_BYTES)
    chunk[axis] = size // next(pieces for pieces in range(min(wanted, size), size + 1) if size % pieces == 0)
  return chunk
