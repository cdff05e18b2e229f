"""The arrays of a step as plain zarr, version 3, written by TensorStore: for s3://, which orbax does not write to.

``state/<name>/zarr.json`` and its chunks, each of which ends with its own CRC-32C. A process writes the parts of its devices,
of copies the first one's; it reads the parts of its devices, whatever mesh wrote them. Names are those of ``tree``.
"""

import errno
import functools
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_like.checkpoint.store import manifest
from maxtext_like.errors import RetryableError
from maxtext_like.sharding import host_memory, processes
from maxtext_like.storage import Place, endpoint

_CHUNK_BYTES = 64 << 20  # an object of one request (a store takes 5 GB), and what a mesh of smaller parts reads in vain
_AT_ONCE = 8  # arrays that are written, or read, at a time: of these there is a second copy on the host


def are_for(place: Path | Place) -> bool:
  """Whether arrays are written so to a place."""
  return isinstance(place, Place) and place.protocol == "s3"


def are_in(stored: manifest.Manifest) -> bool:
  """Whether the arrays of a step were: orbax leaves a file of its own beside its."""
  return f"{manifest.STATE_NAME}/_METADATA" not in stored.files


class Writer:
  """Writes states one after the other, in two parts as orbax's: what takes the state's memory, and what takes long.

  Args:
    seconds: how long processes wait for each other.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds
    self._place: Place | None = None
    self._parts: list[tuple[str, jax.ShapeDtypeStruct, tuple[int, ...], list[tuple[Any, np.ndarray]]]] = []

  def save(self, place: Place, flat: Mapping[str, jax.Array]) -> None:
    """Copies to the host what this process writes of it; the arrays may be changed then."""
    self._place, self._parts = place, []
    own = {name: [shard for shard in x.addressable_shards if shard.replica_id == 0] for name, x in flat.items()}
    for shard in (shard for shards in own.values() for shard in shards if not host_memory.lies_there(shard.data)):
      shard.data.copy_to_host_async()
    for name, x in flat.items():
      parts = [(shard.index, np.array(host_memory.on_device(shard.data))) for shard in own[name]]
      self._parts.append((name, jax.ShapeDtypeStruct(x.shape, x.dtype), x.sharding.shard_shape(x.shape), parts))

  def wait_until_finished(self) -> None:
    """Writes it, and waits until every process has. Whatever TensorStore raises; RetryableError: another did not come."""
    assert self._place is not None
    if processes.primary():  # all of them first: to open what is being made, in the same process, finds nothing
      of = {name: _metadata(like, part) for name, like, part, _ in self._parts}
      for made in [_open(self._place / name, metadata=metadata, create=True, open=True) for name, metadata in of.items()]:
        made.result()
    processes.gather(f"made {self._place}", self._seconds)  # nobody writes to an array that is not there
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
    """Starts to write an array; returns what is to be waited for."""
    assert self._place is not None
    if not pieces:
      return []
    array = _open(self._place / name, metadata=_metadata(like, part), open=True, assume_metadata=True).result()
    return [array[index].write(data, can_reference_source_data_indefinitely=True) for index, data in pieces]

  def close(self) -> None:
    """There is nothing to close."""


def read(state: Path | Place, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Arrays by name, each device its own part.

  Args:
    state: where they are.
    wanted: shapes, stored dtypes and shardings.

  Raises:
    RetryableError: they cannot be read, or are not what was written.
  """

  def one(name: str) -> jax.Array:
    like = wanted[name]
    array = opened(state / name)
    places = like.sharding.addressable_devices_indices_map(like.shape)
    keys = {device: str(index) for device, index in places.items()}  # slices have no hash
    parts = {keys[device]: array[index].read() for device, index in places.items()}
    where = [jax.sharding.SingleDeviceSharding(device, memory_kind=like.sharding.memory_kind) for device in places]
    arrays = [jax.device_put(np.asarray(parts[keys[device]].result()), to) for device, to in zip(places, where, strict=True)]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)

  try:
    with ThreadPoolExecutor(_AT_ONCE, "read") as pool:
      return dict(zip(wanted, pool.map(one, wanted), strict=True))
  except (ValueError, OSError) as error:  # the former is TensorStore's
    raise RetryableError(f"{state}: cannot be read: {' '.join(str(error).split())[:300]}") from error


def opened(place: Path | Place) -> Any:
  """One array, a ``tensorstore.TensorStore``; ValueError where there is none."""
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
    raise OSError(errno.ENOTSUP, "arrays are not written so", str(place))
  bucket, *names = place.parts
  return {"driver": "s3", "bucket": bucket, "path": f"{'/'.join(names)}/", **endpoint()}


@functools.cache
def _context() -> Any:
  """What all of them share: who we are, above all, which is asked for once."""
  import tensorstore

  kind = "environment" if os.environ.get("AWS_ACCESS_KEY_ID") else "default"
  return tensorstore.Context({"aws_credentials": {"type": kind}})


def _metadata(like: jax.ShapeDtypeStruct, part: tuple[int, ...]) -> dict[str, Any]:
  """Of an array whose devices have parts of this shape."""
  return {
    "shape": list(like.shape),
    "data_type": str(like.dtype),
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk(part, like.dtype.itemsize)}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
  }


def _chunk(part: tuple[int, ...], itemsize: int) -> list[int]:
  """The shape of the chunks, which divides that of a part: no larger than ``_CHUNK_BYTES``, cut along the first axes."""
  chunk = [max(1, size) for size in part]
  for axis, size in enumerate(chunk):
    whole = itemsize * int(np.prod(chunk))
    if whole <= _CHUNK_BYTES:
      break
    wanted = -(-whole // _CHUNK_BYTES)
    chunk[axis] = size // next(pieces for pieces in range(min(wanted, size), size + 1) if size % pieces == 0)
  return chunk
