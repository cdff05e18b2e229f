"""Arrays on devices that several threads fill with chunks of tensors: equal to reading one tensor after the other."""

import functools
import itertools
import math
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.checkpoint.huggingface import device_fill
from maxtext_like.checkpoint.huggingface import weights as weights_module
from maxtext_like.checkpoint.huggingface.config import read_config
from maxtext_like.checkpoint.huggingface.shards import Shards
from maxtext_like.checkpoint.huggingface.tensor_file import SafetensorsFile
from maxtext_like.checkpoint.huggingface.tensors import Piece, TensorPart, flatten
from maxtext_like.checkpoint.huggingface.weights import Weights
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.config.load import make_section
from maxtext_like.errors import NonFiniteError, UserError
from maxtext_like.layers.precision import Precision
from maxtext_like.models.build import build_decoder
from tests.tiers import slow

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {  # kind: (half, our shape)
  "same": (None, (7, 5)),
  "linear": (None, (5, 3, 4)),
  "linear2": (None, (3, 4, 7)),
  "conv": (None, (12, 5)),
  "experts": (1, (6, 5, 3)),
}


@pytest.mark.parametrize(
  ("shape", "order"), [((3, 5, 7), (2, 0, 1)), ((3, 5, 7), (0, 2, 1)), ((9, 4), (1, 0)), ((4, 3), (0, 1))]
)
def test_axes_are_moved_in_blocks(shape: tuple[int, ...], order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(device_fill, "_BLOCK", 2)
  rows = np.arange(math.prod(shape)).astype(jnp.bfloat16).reshape(shape)[:, 1:]
  ours = device_fill.in_our_order(rows, order)
  assert ours.flags.c_contiguous
  np.testing.assert_array_equal(ours, rows.transpose(order))


class Halves(jax.sharding.Sharding):
  """A sharding over the devices "a" and "b" that splits one axis. Neither device holds the first row of a stack."""

  def __init__(self, axis: int):
    self._axis = axis

  def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
    indices: dict[Any, list[slice]] = {device: [slice(1, None), *(slice(None) for _ in shape[1:])] for device in "ab"}
    size = shape[self._axis]
    indices["a"][self._axis], indices["b"][self._axis] = slice(0, size // 2), slice(size // 2, size)
    return {device: tuple(index) for device, index in indices.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_gets_its_part_and_nothing_else_is_read(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """Every axis is split once, for every layout of a file, with numpy arrays instead of devices."""
  half, shape = KINDS[kind]
  pieces = [Piece(("w",), (row,), shape, kind, half) for row in range(3)]
  stored = pieces[0].hf_shape() if half is None else (shape[0], 2 * shape[2], shape[1])
  values = np.random.default_rng(0).normal(size=(3, *stored)).astype(np.float32)
  write(tmp_path, [Source(f"w{i}", "F32", stored, lambda i=i: values[i]) for i in range(3)], shard_size=values[0].nbytes)
  shards = Shards(tmp_path)
  whole = np.stack([piece.to_ours(value) for piece, value in zip(pieces, values, strict=True)])
  monkeypatch.setattr(device_fill, "_CHUNK_BYTES", values[0].nbytes // 4)
  for axis in range(1, whole.ndim):
    target = device_fill.Target(
      whole.shape, whole.dtype, Halves(axis), [TensorPart(f"w{i}", piece, (i,)) for i, piece in enumerate(pieces)],
      done=lambda array: None,
    )  # fmt: skip  # pyright: ignore[reportArgumentType]
    parts = {device: np.full(target.buffer_shape(device), np.nan, np.float32) for device in "ab"}  # pyright: ignore
    chunks = device_fill.planned(shards, [target])
    assert sum(chunk.bytes for chunk in chunks) == 2 * whole[0].nbytes
    assert len(chunks) >= 4
    for chunk in chunks:
      rows = device_fill.read_rows(shards, chunk.source, chunk.start, chunk.stop, device_fill.Blocks(1 << 20))
      for device in chunk.devices:
        part = rows[chunk.cut(device)].transpose(chunk.source.piece.order)[None]
        into = tuple(slice(o, o + n) for o, n in zip(chunk.offsets(device), part.shape, strict=True))
        parts[device][into] = part  # pyright: ignore
    middle = whole.shape[axis] // 2
    for device, own in {"a": slice(0, middle), "b": slice(middle, None)}.items():
      np.testing.assert_array_equal(parts[device], whole[(slice(1, None), *(slice(None),) * (axis - 1), own)])


def weights_of(directory: Path, weight_dtype: Any) -> Weights:
  config = read_config(directory)
  decoder = build_decoder(make_section("model", config.model), Precision(weight_dtype=weight_dtype))
  weights = Weights(directory, decoder, config)
  weights.finite = True
  return weights


def changed(tmp_path: Path, case: str, change: Any) -> Path:
  """Write a golden checkpoint that ``change`` has edited to several files of unequal sizes."""
  file = SafetensorsFile(GOLDEN / case / "checkpoint/model.safetensors")
  arrays = {name: np.array(file.tensor(name)) for name in file.entries}
  change(arrays)
  dtypes = {"float32": "F32", "bfloat16": "BF16", "float64": "F64", "float8_e4m3fn": "F8_E4M3"}
  write(tmp_path, [Source(n, dtypes[a.dtype.name], a.shape, lambda a=a: a) for n, a in arrays.items()], shard_size=40_000)
  (tmp_path / "config.json").write_bytes((GOLDEN / case / "checkpoint/config.json").read_bytes())
  return tmp_path


def in_other_dtypes(arrays: dict[str, np.ndarray]) -> None:
  """Convert matrices to float8 with block scales or with one scale, and to float64."""
  for i, name in enumerate([n for n in arrays if n.endswith("proj.weight")]):
    if i % 3 == 0:
      arrays[name] = arrays[name].astype(np.float64)
      continue
    arrays[name] = (arrays[name].astype(np.float32) * 30).astype(jnp.float8_e4m3fn)
    arrays[name + ("_scale_inv", "_scale")[i % 2]] = np.full(((1, 1), ())[i % 2], 0.03125 + i / 999, np.float32)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
  """Treat all tensors as large, and make chunks small."""
  monkeypatch.setattr(weights_module, "SMALL_BYTES", 1)
  monkeypatch.setattr(device_fill, "_CHUNK_BYTES", 1500)
  monkeypatch.setattr(device_fill, "_THREADS", 2)


@pytest.mark.parametrize(
  ("case", "change", "dtype"),
  [("gemma4_moe", lambda arrays: None, "float16"), slow("deepseek3_plain", in_other_dtypes, "bfloat16")],
)
def test_it_equals_one_tensor_after_the_other(
  case: str, change: Any, dtype: str, tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
):
  weights = weights_of(changed(tmp_path, case, change), dtype)
  assert len(weights.shards.files) >= 3
  blocks, most, read, lock = [], 0, 0, threading.Lock()
  take, give_back, read_into = device_fill.Blocks.take, device_fill.Blocks.give_back, SafetensorsFile.read_into

  def taken(self, shape, dtype):
    nonlocal most
    with lock:
      blocks.append(out := take(self, shape, dtype))
      most = max(most, sum(x.nbytes for x in blocks))
    return out

  def given_back(self, array):
    with lock:  # the array of a float8 tensor that is in our order is not a block
      blocks[:] = [x for x in blocks if not np.may_share_memory(x, array)]
      give_back(self, array)

  def counted(self, out, start):
    nonlocal read
    with lock:
      read += out.nbytes
    read_into(self, out, start)

  with monkeypatch.context() as patched:
    patched.setattr(device_fill.Blocks, "take", taken)
    patched.setattr(device_fill.Blocks, "give_back", given_back)
    patched.setattr(SafetensorsFile, "read_into", counted)
    found = dict(flatten(weights.load()))
  # Every byte is read once, and the memory of chunks is limited.
  entries = [weights.shards.entry(weights._file_name[tensor.name]) for tensor in weights.table]
  small = sum(4 for tensor in weights.table if not tensor.pieces[0].shape)
  assert sum(entry.stop - entry.start for entry in entries) - small <= read <= sum(e.stop - e.start for e in entries)
  assert 1500 < most <= 8 * 1500
  assert not blocks
  monkeypatch.setattr(weights_module, "SMALL_BYTES", 1 << 40)
  for path, expected in flatten(weights.load()):
    assert (found[path].dtype, found[path].shape) == (expected.dtype, expected.shape)
    assert np.asarray(found[path]).tobytes() == np.asarray(expected).tobytes(), path


@pytest.mark.parametrize("files", [1, 20])
def test_small_tensors_after_large_ones_stay_within_the_memory_of_chunks(files: int, tmp_path: Path, monkeypatch):
  """With 16 threads, the bytes of all blocks, used and free, stay within the limit."""
  rng = np.random.default_rng(0)
  shapes = {f"w{i}": (512, 100) if i < 6 else (24, 9) for i in range(400)}
  arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  size = sum(x.nbytes for x in arrays.values())
  write(tmp_path, [Source(n, "F32", x.shape, lambda x=x: x) for n, x in arrays.items()], shard_size=size // files + 1)
  chunk, bases, most, lock = 1 << 14, weakref.WeakValueDictionary[int, np.ndarray](), 0, threading.Lock()
  monkeypatch.setattr(device_fill, "_CHUNK_BYTES", chunk)
  monkeypatch.setattr(device_fill, "threads", lambda: 16)
  take = device_fill.Blocks.take

  def taken(self, shape, dtype):
    nonlocal most
    with lock:
      base = out = take(self, shape, dtype)
      while base.base is not None:
        base = base.base
      bases[id(base)] = base
      most = max(most, sum(x.nbytes for x in bases.values()))
    return out

  monkeypatch.setattr(device_fill.Blocks, "take", taken)
  found: dict[str, jax.Array] = {}
  shards = Shards(tmp_path)
  targets = [
    device_fill.Target(
      shape[::-1], np.dtype(np.float32), None, [TensorPart(name, Piece((name,), (), shape[::-1], "linear", None), ())],
      done=functools.partial(found.__setitem__, name),
    )
    for name, shape in shapes.items()
  ]  # fmt: skip
  device_fill.fill(shards, targets, check=True, refuse=lambda dtype, name: AssertionError(name), convert=lambda x, *rest: x)
  for name, x in arrays.items():
    np.testing.assert_array_equal(found[name], x.T)
  largest = max(file.size for file in shards.files)
  assert device_fill.budget(shards) == min(4 * 16 * chunk, 2 * largest)
  assert (2 * largest < 4 * 16 * chunk) == (files == 20)
  # A thread may still refer to a block that it has just returned and that another thread has freed.
  assert most <= device_fill.budget(shards) + 16 * device_fill.block_bytes(chunk)


@pytest.mark.slow
def test_damage_is_named(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(weights_module, "SMALL_BYTES", 5000)  # only the table and the three matrices of the MLP are large
  name = "model.layers.2.mlp.up_proj.weight"

  def change(arrays: dict[str, np.ndarray], value: float) -> None:
    arrays[name] = arrays[name].astype(np.float32)
    arrays[name][3, 5] = value

  directories = [tmp_path / "a", tmp_path / "b"]
  for directory, value in zip(directories, (np.nan, 7e4), strict=True):
    directory.mkdir()
    changed(directory, "gemma3_text", functools.partial(change, value=value))
  weights = weights_of(directories[0], "bfloat16")
  with pytest.raises(NonFiniteError, match=rf"{name}' holds 1 NaN of \d+ numbers, the first at \[3, 5\]"):
    weights.load()
  weights.finite = False
  stack, row, layer = weights.decoder.locate(2)
  assert np.isnan(dict(flatten(weights.load()))[stack, layer, "mlp", "up"][row, 5, 3])
  # Numbers that float16 cannot hold, with and without the check for finite numbers.
  weights = weights_of(directories[1], "float16")
  for weights.finite in (True, False):
    with pytest.raises(UserError, match=rf"{name}: contains numbers beyond 65504"):
      weights.load()
  # A file that shrinks after its header was read.
  path = weights.shards.path(name)
  os.truncate(path, path.stat().st_size - 1)
  with pytest.raises(UserError, match="changed while it was being read"):
    weights.load()


def test_one_array_larger_than_the_memory_of_chunks(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch):
  """A row that is larger than the memory of all chunks is read alone."""
  values = np.arange(30.0, dtype=np.float32).reshape(3, 10)
  write(tmp_path, [Source("w", "F32", values.shape, lambda: values)], shard_size=10**6)
  monkeypatch.setattr(device_fill, "_CHUNK_BYTES", 1)
  found: list[jax.Array] = []
  target = device_fill.Target(
    (10, 3), values.dtype, None, [TensorPart("w", Piece(("w",), (), (10, 3), "linear", None), ())], done=found.append
  )
  seen: list[tuple[int, int]] = []
  device_fill.fill(
    Shards(tmp_path), [target], check=True, refuse=lambda dtype, name: AssertionError(name), convert=lambda x, *rest: x,
    progress=lambda done, of: seen.append((done, of)),
  )  # fmt: skip
  np.testing.assert_array_equal(found[0], values.T)
  assert seen == [*itertools.product((40, 80, 120), (120,))]
