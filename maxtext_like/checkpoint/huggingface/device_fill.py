"""Fills arrays on devices with tensors of a checkpoint. Open this file when loading is slow or takes too much memory.

Several threads read chunks of tensors, apply float8 scales, bring the axes into our order and copy the result to the devices.
There, one compiled program for each shape converts the chunk, checks it for NaN and infinity and writes it into its place in
the array, which is donated. No array of a stack exists in host memory, and ``budget`` limits the chunks that do.
"""

import functools
import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.checkpoint.huggingface.shards import Shards
from maxtext_like.checkpoint.huggingface.tensor_file import DTYPES, FLOAT8
from maxtext_like.checkpoint.huggingface.tensors import TensorPart

_CHUNK_BYTES = 32 << 20  # bytes of a file in one chunk
_THREADS = 16
_BUDGET = 4  # bytes of all chunks in host memory, as a multiple of _CHUNK_BYTES for each thread
_FILES = 2  # the same, as a multiple of the largest file
_BLOCK = 128  # rows that are transposed at a time, so that a cache line is read once
_ALIGNMENT = 64  # bytes; JAX copies arrays with another alignment once more on the CPU

Check = Literal["finite", "no infinity", "nothing"]
Place = jax.Device | None


class Target:
  """An array that is filled.

  Args:
    shape, dtype: shape and dtype of the array.
    sharding: where its parts go; None for the default device. Parts of other processes are not read.
    sources: tensors that fill the array completely.
    codes: True to store float8 without its scales.
    together: True to read it without other targets in between, so that few unfinished arrays exist.
    done: called with the array as soon as its last chunk is on the way to the devices.
  """

  def __init__(
    self,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
    sources: Sequence[TensorPart],
    *,
    codes: bool = False,
    together: bool = False,
    done: Callable[[jax.Array], None],
  ):
    self.shape, self.dtype, self.sharding, self.sources = shape, dtype, sharding, sources
    self.codes, self.together, self.done = codes, together, done
    indices: Mapping[Any, Any] = {None: (slice(None),) * len(shape)}
    if sharding is not None:
      indices = sharding.addressable_devices_indices_map(shape)
    self.ranges: dict[Place, tuple[range, ...]] = {
      device: tuple(range(*part.indices(size)) for part, size in zip(index, shape, strict=True))
      for device, index in indices.items()
    }
    self.buffers: dict[Place, jax.Array] = {}
    self.left = 0  # chunks that are not yet written

  def buffer_shape(self, device: Place) -> tuple[int, ...]:
    """Returns the shape of a device's part."""
    return tuple(len(r) for r in self.ranges[device])

  def buffer_keys(self) -> list[tuple[Any, ...]]:
    """Returns the arguments of ``_empty`` for each device."""
    return [(self.buffer_shape(device), self.dtype.name, device) for device in self.ranges]

  def array(self) -> jax.Array:
    """Returns the array of all parts."""
    buffers, self.buffers = self.buffers, {}
    if self.sharding is None:
      return buffers[None]
    return jax.make_array_from_single_device_arrays(self.shape, self.sharding, [buffers[device] for device in self.ranges])


def block_bytes(size: int) -> int:
  """Returns the bytes of the block that an array of ``size`` bytes takes. Similar arrays have blocks of the same size."""
  return max(size, min(_CHUNK_BYTES, 1 << max(size - 1, 0).bit_length())) + _ALIGNMENT


class Blocks:
  """Host memory that chunks use in turn. New memory would cost a page fault for every 4 KiB, as long as the read itself.

  Args:
    limit: free blocks of other sizes are released before all blocks together take more bytes.
  """

  def __init__(self, limit: int):
    self._limit, self._bytes, self._lock = limit, 0, threading.Lock()
    self._free: dict[int, list[np.ndarray]] = {}
    self._used: dict[int, np.ndarray] = {}

  def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array. It is aligned so that JAX can use it on the CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    wanted = block_bytes(size)
    with self._lock:
      if self._free.get(wanted):
        block = self._free[wanted].pop()
      else:
        while self._bytes + wanted > self._limit and (sizes := [n for n, blocks in self._free.items() if blocks]):
          self._bytes -= self._free[max(sizes)].pop().nbytes
        block = np.empty(wanted, np.uint8)
        self._bytes += wanted
      self._used[id(block)] = block
    begin = -block.ctypes.data % _ALIGNMENT
    return block[begin : begin + size].view(dtype).reshape(shape)

  def give_back(self, array: np.ndarray) -> None:
    """Reuses the memory of an array of ``take``, which nothing may read any more. Other arrays are left alone."""
    while array.base is not None:
      array = array.base
    with self._lock:
      if self._used.pop(id(array), None) is not None:
        self._free.setdefault(array.nbytes, []).append(array)


@dataclass(frozen=True, eq=False)
class _Chunk:
  """Rows ``start`` to ``stop`` of a source, counted along the first axis of its shape in the file.

  Attributes:
    position: sort key: file and byte of the first tensor of its target (if that is read together), then of its own tensor.
    bytes: bytes that are read.
    cost: bytes that it may take in host memory.
  """

  target: Target
  source: TensorPart
  start: int
  stop: int
  devices: tuple[Place, ...]
  dtype: np.dtype
  position: tuple[tuple[int, int], ...]
  bytes: int
  cost: int

  def cut(self, device: Place) -> tuple[slice, ...]:
    """Returns the part for a device, with a slice for every axis of the rows in the file."""
    piece, lead = self.source.piece, len(self.source.index)
    own = self.target.ranges[device][lead:]
    slices = [slice(r.start, r.stop) for r in own]
    slices[piece.order.index(0)] = slice(0, self.stop - self.start)
    return tuple(slices[piece.order.index(i)] for i in range(len(slices)))

  def offsets(self, device: Place) -> np.ndarray:
    """Returns the position in the device's part of the target."""
    ranges, piece = self.target.ranges[device], self.source.piece
    lead = len(self.source.index)
    offsets = np.zeros(len(ranges), np.int32)
    offsets[:lead] = [i - r.start for i, r in zip(self.source.index, ranges, strict=False)]
    axis = lead + piece.order.index(0)
    offsets[axis] = self.start - ranges[axis].start
    return offsets

  def program(self, device: Place, check: Check) -> tuple[Any, ...]:
    """Returns the arguments of ``_program``."""
    cut = self.cut(device)
    shape = tuple(cut[i].stop - cut[i].start for i in self.source.piece.order)
    convert = self.target.dtype == np.float16 and self.dtype != np.float16
    if check == "nothing" and convert:
      check = "no infinity"
    lead = (1,) * len(self.source.index)
    return self.target.buffer_shape(device), self.target.dtype.name, (*lead, *shape), self.dtype.name, check, device


def fill(
  shards: Shards,
  targets: Sequence[Target],
  *,
  check: bool,
  refuse: Callable[[np.dtype, str], Exception],
  convert: Callable[[np.ndarray, np.dtype, str], np.ndarray],
  programs: Collection[Callable[[], object]] = (),
  meanwhile: Callable[[], None] = lambda: None,
  progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
  """Fills arrays. They are passed to ``Target.done``.

  Args:
    shards: the tensors.
    targets: the arrays.
    check: True to refuse NaN and infinity. False refuses only numbers that become infinite in float16.
    refuse: (dtype of the target, name of a tensor) -> the error for numbers that are refused.
    convert: converts float64, which devices do not have.
    programs: called at once by other threads: they compile what ``Target.done`` needs.
    meanwhile: called once, after the first reads have begun.
    progress: called with bytes read so far and bytes in total.

  Raises:
    UserError: a file cannot be read, or a scale is malformed.
    Exception: that of ``refuse``.
  """
  todo = deque(planned(shards, targets))
  for chunk in todo:
    chunk.target.left += 1
  total, read = sum(chunk.bytes for chunk in todo), 0
  how: Check = "finite" if check else "nothing"
  limit = budget(shards)
  default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  waiting: deque[tuple[_Chunk, Future[Any]]] = deque()
  written: deque[tuple[_Chunk, list[Any], list[np.ndarray]]] = deque()
  blocks = Blocks(limit)
  held = pending = 0  # cost of all chunks in host memory, and of those in ``written``
  with ThreadPoolExecutor(threads(), "read-weights") as readers, ThreadPoolExecutor(threads(), "compile-writes") as compilers:
    try:
      others = [compilers.submit(program) for program in programs]  # first, because they take longer
      # In the order of use. A program takes a few tenths of a second on a GPU, so none may be compiled by this thread.
      empty: dict[tuple[Any, ...], Future[Any]] = {}
      writes: dict[tuple[Any, ...], Future[Any]] = {}
      for chunk in todo:
        for key in chunk.target.buffer_keys():
          if key not in empty:
            empty[key] = compilers.submit(_empty, *key, default)
        for key in (chunk.program(device, how) for device in chunk.devices):
          if key not in writes:
            writes[key] = compilers.submit(_program, *key, default)
      while todo or waiting or written:
        if todo and (held + todo[0].cost <= limit or not (waiting or written)):
          chunk = todo.popleft()
          waiting.append((chunk, readers.submit(_prepare, shards, chunk, convert, blocks, default)))
          held += chunk.cost
          continue
        meanwhile()
        meanwhile = lambda: None
        if written and (not waiting or 2 * pending > limit or all(ok.is_ready() for ok in written[0][1])):
          chunk, oks, used = written.popleft()
          if not all(oks):  # waits until the chunk is written
            raise refuse(chunk.target.dtype, chunk.source.name)
          for array in used:
            blocks.give_back(array)
          held, pending, read = held - chunk.cost, pending - chunk.cost, read + chunk.bytes
          progress(read, total)
          continue
        chunk, future = waiting.popleft()
        target, oks = chunk.target, []
        if not target.buffers:
          target.buffers |= {key[-1]: empty[key].result()() for key in target.buffer_keys()}
        placed, used = future.result()
        for device, part in placed.items():
          run = writes[chunk.program(device, how)].result()
          target.buffers[device], ok = run(target.buffers[device], part, chunk.offsets(device))
          oks.append(ok)
        del placed, part, future
        written.append((chunk, oks, used))
        pending += chunk.cost
        target.left -= 1
        if not target.left:
          target.done(target.array())
      meanwhile()
      for program in others:
        program.result()  # raises its error
    except BaseException:
      for pool in (readers, compilers):
        pool.shutdown(wait=False, cancel_futures=True)
      raise


def threads() -> int:
  """Returns the number of threads that read, which is that of the processor cores within limits."""
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  return min(_THREADS, max(2, cores))


def budget(shards: Shards) -> int:
  """Returns the limit of the bytes of all chunks in host memory. A single chunk may be larger, because no row is cut."""
  return min(_BUDGET * _CHUNK_BYTES * threads(), _FILES * max(file.size for file in shards.files))


def planned(shards: Shards, targets: Sequence[Target]) -> list[_Chunk]:
  """Returns the chunks that this process reads, in the order of reading."""
  order = {id(file): i for i, file in enumerate(shards.files)}
  return sorted(itertools.chain(*(_chunks(shards, t, order) for t in targets)), key=lambda chunk: chunk.position)


def _chunks(shards: Shards, target: Target, order: dict[int, int]) -> Iterator[_Chunk]:
  """Yields the chunks that this process needs. None crosses the border between the parts of two devices."""
  places = {s.name: (order[id(shards.file(s.name))], shards.entry(s.name).start) for s in target.sources}
  first = (min(places.values()),) if target.together else ()
  for source in target.sources:
    piece, lead, entry = source.piece, len(source.index), shards.entry(source.name)
    axis = lead + piece.order.index(0)
    here = {
      device: ranges[axis]
      for device, ranges in target.ranges.items()
      if all(i in r for i, r in zip(source.index, ranges, strict=False))
    }
    row = math.prod(piece.file_shape[1:]) * DTYPES[entry.dtype].itemsize
    dtype, extra = DTYPES[entry.dtype], 0
    if entry.dtype in FLOAT8 and not target.codes:
      dtype, extra = np.dtype(np.float32), 4  # bytes for each byte that is read, between the codes and the copies
    elif entry.dtype == "F64":
      dtype, extra = target.dtype, 1
    cuts = sorted({edge for r in here.values() for edge in (r.start, r.stop)})
    for low, high in itertools.pairwise(cuts):
      devices = tuple(device for device, r in here.items() if r.start <= low and high <= r.stop)
      step = -(-(high - low) // -(-(high - low) * row * max(extra, 1) // _CHUNK_BYTES))
      for start in range(low, high, step) if devices else ():
        stop = min(start + step, high)
        size = (stop - start) * row
        chunk = _Chunk(target, source, start, stop, devices, dtype, (*first, places[source.name]), size, 0)
        parts = {str(cut): math.prod(s.stop - s.start for s in cut) for cut in map(chunk.cut, devices)}
        copies = sum(block_bytes(count * dtype.itemsize) for count in parts.values())
        yield replace(chunk, cost=block_bytes(size) + (block_bytes(extra * size) if extra else 0) + copies)


def _prepare(
  shards: Shards, chunk: _Chunk, convert: Callable[[np.ndarray, np.dtype, str], np.ndarray], blocks: Blocks, default: Any
) -> tuple[dict[Place, jax.Array], list[np.ndarray]]:
  """Reads a chunk and puts it on its devices. Runs in a thread. Also returns the arrays to give back after their use."""
  source, target, order = chunk.source, chunk.target, chunk.source.piece.order
  stored = rows = read_rows(shards, source, chunk.start, chunk.stop, blocks)
  if rows.dtype.name.startswith("float8") and not target.codes:
    rows = _scaled(shards, source, rows, chunk.start, blocks)
  elif rows.dtype == np.float64:
    rows = convert(rows, target.dtype, source.name)
  copies: dict[str, np.ndarray] = {}  # by the part, because slices are not hashable in Python 3.11
  placed = {}
  with jax.default_device(default):
    for device in chunk.devices:
      part = rows[cut := chunk.cut(device)]
      if (copy := copies.get(str(cut))) is None:
        copy = copies[str(cut)] = part if _is_in_our_order(part, order) else in_our_order(part, order, blocks.take)
      placed[device] = jax.device_put(copy.reshape((1,) * len(source.index) + copy.shape), device)
  # Blocks that no device reads are free now. A copy in our order may be a part of the block that was read.
  used = list(copies.values())
  for block in {id(x): x for x in (stored, rows)}.values():
    if not any(np.may_share_memory(copy, block) for copy in copies.values()):
      blocks.give_back(block)
  return placed, used


def read_rows(shards: Shards, source: TensorPart, start: int, stop: int, blocks: Blocks) -> np.ndarray:
  """Reads rows of a source, [stop - start, *file_shape[1:]]."""
  piece, entry, file = source.piece, shards.entry(source.name), shards.file(source.name)
  dtype, count = DTYPES[entry.dtype], math.prod(piece.file_shape[1:])
  rows = blocks.take((stop - start, *piece.file_shape[1:]), dtype)
  row = count * dtype.itemsize
  if piece.half is None:
    file.read_into(rows, entry.start + start * row)
  else:
    for i in range(start, stop):  # the halves of each row follow each other
      file.read_into(rows[i - start], entry.start + (2 * i + piece.half) * row)
  return rows


def _scaled(shards: Shards, source: TensorPart, codes: np.ndarray, start: int, blocks: Blocks) -> np.ndarray:
  """Returns rows of a float8 source in float32, with their scales. The numbers are those of ``Shards.weight``."""
  piece, shape = source.piece, codes.shape
  numbers = np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)
  # The mode avoids a buffer; no code is out of range.
  result = np.take(numbers, codes.view(np.uint8), out=blocks.take(shape, np.dtype(np.float32)), mode="clip")
  columns, scale = shards.row_scales(source.name)
  if scale.ndim:
    if piece.half is not None:
      size = piece.shape[2]
      scale = scale[:, piece.half * size : (piece.half + 1) * size]
    width = piece.hf_shape()[-1]
    scale = scale.reshape(piece.file_shape[0], -1, scale.shape[-1])[start : start + len(codes)]
    result = result.reshape(len(codes), -1, width)
    for begin in range(0, width, columns):
      result[..., begin : begin + columns] *= scale[..., begin // columns, None]
    return result.reshape(shape)
  result *= scale
  return result


def _is_in_our_order(rows: np.ndarray, order: tuple[int, ...]) -> bool:
  return order == tuple(range(len(order))) and rows.flags.c_contiguous


def in_our_order(
  rows: np.ndarray, order: tuple[int, ...], take: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty
) -> np.ndarray:
  """Returns a contiguous copy of ``rows.transpose(order)``, made in blocks, which is several times faster than by numpy."""
  out = take(tuple(rows.shape[i] for i in order), rows.dtype)
  bits = np.dtype(f"u{rows.dtype.itemsize}")  # numpy copies its own types without holding Python's lock
  # The last axis of ours is split into blocks: it is contiguous in the copy, and the furthest apart in the file.
  axis, read, write = order[-1], rows.view(bits), out.view(bits).transpose(np.argsort(order))
  for lead in np.ndindex(rows.shape[:axis]):
    for i in range(0, rows.shape[axis], _BLOCK):
      here = (*lead, slice(i, i + _BLOCK))
      write[here] = read[here]
  return out


@functools.lru_cache(maxsize=512)
def _program(
  shape: tuple[int, ...], dtype: str, part: tuple[int, ...], part_dtype: str, check: Check, device: Place, default: Any
) -> Any:
  """Returns a compiled (buffer, chunk, offsets) -> (the same buffer with the chunk at the offsets, whether it is accepted)."""

  def write(buffer: jax.Array, chunk: jax.Array, offsets: jax.Array) -> tuple[jax.Array, jax.Array]:
    # float16 is rounded from float32, as numpy does it.
    values = (chunk.astype(jnp.float32) if dtype == "float16" and part_dtype != dtype else chunk).astype(dtype)
    seen = values.astype(jnp.float32) if values.dtype.itemsize == 1 else values
    ok = jnp.bool_(True)
    if check != "nothing":
      ok = jnp.isfinite(seen).all() if check == "finite" else ~jnp.isinf(seen).any()
    return jax.lax.dynamic_update_slice(buffer, values, tuple(offsets)), ok

  sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
  arguments = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in ((shape, dtype), (part, part_dtype))]
  with jax.default_device(default):
    return jax.jit(write, donate_argnums=0).lower(*arguments, jax.ShapeDtypeStruct((len(shape),), jnp.int32)).compile()


@functools.lru_cache(maxsize=512)
def _empty(shape: tuple[int, ...], dtype: str, device: Place, default: Any) -> Any:
  """Returns a compiled () -> an array of zeros on a device."""
  sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
  with jax.default_device(default):
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding).lower().compile()
