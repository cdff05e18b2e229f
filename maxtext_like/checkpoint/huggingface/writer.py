"""Writes Hugging Face directories: a directory that appears completely or not at all, and safetensors in it.

Tensors are written to one file, or to shards with an index, one tensor in memory at a time.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from maxtext_like.checkpoint.huggingface.shards import INDEX, SINGLE
from maxtext_like.checkpoint.huggingface.tensor_file import DTYPES
from maxtext_like.errors import UserError
from maxtext_like.storage import Place, failed, is_remote
from maxtext_like.strict_json import printable

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass
class NewDirectory:
  """A directory that is being written.

  Attributes:
    path: temporary local directory; every file in it becomes a file of the new directory.
    place: the new directory if it is in a store, else None.
  """

  path: Path
  place: Place | None = None
  _sent: list[Place] = field(default_factory=list)

  def finish_file(self, name: str) -> None:
    """Call it when a file is complete. For a store, uploads the file and deletes it locally, to free disk space for the next.

    Raises:
      OSError: as Place; or the stored object has another size.
    """
    if self.place is None:
      return
    path, to = self.path / name, self.place / name
    self._sent.append(to)
    to.upload(str(path))
    if (entry := to.entry()) is None or entry.size != path.stat().st_size:
      raise OSError(errno.EIO, "the stored object has another size than the file", str(to))
    path.unlink()


@contextlib.contextmanager
def new_directory(out: Path | Place, last: str) -> Iterator[NewDirectory]:
  """Yields a directory to write into. It becomes ``out`` if the with block succeeds, and is removed otherwise.

  Args:
    out: a directory that does not exist or is empty; in a store, a place without objects below it.
    last: the file without which the directory is unusable; in a store it is uploaded last.

  Raises:
    UserError: ``out`` is not empty or cannot be written.
    RetryableError: a store does not answer.
  """
  if isinstance(out, Place):
    with _in_store(out, last) as new:
      yield new
    return
  where = printable(out)
  part = out.with_name(f".{out.name}.{os.getpid()}.part")
  try:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
      raise UserError(f"{where}: already exists\n  fix: name a new directory")
    part.mkdir(parents=True)
  except OSError as error:
    raise UserError(
      f"{where}: cannot be written: {error.strerror}", fix="name a directory that can be written, on a disk with free space"
    ) from None
  try:
    yield NewDirectory(part)
    if out.exists():
      out.rmdir()
    os.rename(part, out)
  except OSError as error:
    raise UserError(
      f"{where}: cannot be written: {error.strerror}", fix="name a directory that can be written, on a disk with free space"
    ) from None
  finally:
    shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _in_store(out: Place, last: str) -> Iterator[NewDirectory]:
  with tempfile.TemporaryDirectory(prefix="maxtext-like-") as folder:
    new = NewDirectory(Path(folder), out)
    try:
      if out.entries():
        raise UserError(f"{printable(out)}: already exists\n  fix: name a new directory")
      yield new
      names = [path.relative_to(new.path).as_posix() for path in new.path.rglob("*") if path.is_file()]
      for name in sorted(names, key=lambda name: (name == last, name)):
        new.finish_file(name)
    except BaseException as error:
      with contextlib.suppress(OSError):  # leftovers lack the last file, so nothing takes them for a directory
        for place in new._sent:
          place.remove()
      if isinstance(error, OSError):
        raise _cannot(error) from error
      raise


def _cannot(error: OSError) -> Exception:
  """Returns the error to raise: ``failed`` for a store, or the local disk's own error."""
  if isinstance(error.filename, str) and is_remote(error.filename):
    return failed(error, writes=True)
  return UserError(f"{tempfile.gettempdir()}: cannot be written: {error.strerror}\n  fix: set TMPDIR to another folder")


@dataclass(frozen=True)
class Source:
  """A tensor to write: name, dtype as in safetensors, shape, and a function that makes its values."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  values: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def parse_size(text: str) -> int:
  """Parses a size such as ``5GB`` or ``500MB`` into bytes (powers of ten, as Hugging Face counts).

  Raises:
    UserError: it is not a positive number with one of the units KB, MB, GB, TB or none.
  """
  upper = text.strip().upper()
  number = upper.rstrip("KMGTB")
  unit = upper[len(number) :]
  try:
    size = int(float(number) * _UNITS[unit])
  except (KeyError, ValueError, OverflowError):
    size = 0
  if size <= 0:
    raise UserError(f"shard size '{text}': expected a size above 0 such as 5GB or 500MB", fix="write a size such as 5GB")
  return size


def plan(sources: list[Source], shard_size: int) -> list[list[Source]]:
  """Splits the tensors, in order, into shards of at most ``shard_size`` bytes. A larger tensor gets a separate shard."""
  shards: list[list[Source]] = []
  filled = 0
  for source in sources:
    if not shards or filled + source.nbytes > shard_size:
      shards.append([])
      filled = 0
    shards[-1].append(source)
    filled += source.nbytes
  return shards


def write(
  directory: Path,
  sources: list[Source],
  *,
  shard_size: int,
  single: str = SINGLE,
  whole: Callable[[str], None] = lambda name: None,
) -> None:
  """Writes the tensors into an existing directory: ``single``, or shards and an index.

  One tensor is in memory at a time. The caller puts the directory in place after everything is written.

  Args:
    directory: the directory.
    sources: the tensors.
    shard_size: maximum bytes of a shard.
    single: file name if one file is enough.
    whole: called with the name of each file when it is complete.

  Raises:
    UserError: the directory cannot be written.
    ValueError: the values of a tensor do not have the declared shape, or a name occurs twice.
  """
  if len({source.name for source in sources}) != len(sources):
    raise ValueError("a tensor name occurs twice")
  shards = plan(sources, shard_size)
  names = [single] if len(shards) <= 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in _from_1(shards)]
  try:
    for name, shard in zip(names, shards or [[]], strict=True):
      with open(directory / name, "wb") as file:
        _write_file(file, shard)
        file.flush()
        os.fsync(file.fileno())
      whole(name)
    if len(shards) > 1:
      index = {
        "metadata": {"total_size": sum(source.nbytes for source in sources)},
        "weight_map": {s.name: name for name, shard in zip(names, shards, strict=True) for s in shard},
      }
      (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
  except OSError as error:
    if isinstance(error.filename, str) and is_remote(error.filename):
      raise
    raise UserError(
      f"{directory}: cannot be written: {error.strerror}", fix="name a directory that can be written, on a disk with free space"
    ) from None


def _from_1(shards: list[list[Source]]) -> Iterator[int]:
  return iter(range(1, len(shards) + 1))


def _write_file(file: BinaryIO, sources: list[Source]) -> None:
  # Wide dtypes first, as the safetensors library orders them, so that every tensor is aligned to its element size.
  ordered = sorted(sources, key=lambda source: (-DTYPES[source.dtype].itemsize, source.name))
  header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
  offset = 0
  for source in ordered:
    header[source.name] = {
      "dtype": source.dtype,
      "shape": list(source.shape),
      "data_offsets": [offset, offset + source.nbytes],
    }
    offset += source.nbytes
  raw = json.dumps(header, separators=(",", ":")).encode("utf-8")
  raw += b" " * (-len(raw) % 8)
  file.write(len(raw).to_bytes(8, "little") + raw)
  for source in ordered:
    values = source.values()
    if values.shape != source.shape:
      raise ValueError(f"{source.name}: the values have shape {values.shape}, but {source.shape} was declared")
    file.write(np.ascontiguousarray(values.astype(DTYPES[source.dtype], copy=False)).view(np.uint8).data)
