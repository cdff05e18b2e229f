"""The manifest of a checkpointed step. A step is complete only if it has a manifest that matches its files.

Orbax stores no checksums, so it restores a flipped byte without an error, and it lists steps that do not exist. Every step
therefore has a ``COMPLETE.json``, written last: size and xxh3_128 of every file, the leaves, the configuration and versions.

In an object store (a ``Place``), the store's own checksums replace the hashes. A listing contains them, so nothing is read
back. Objects cannot be renamed, so each save writes to its own folder, such as ``120/5f0c9a21/state``.
"""

import dataclasses
import errno
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from maxtext_like import atomic, local_copies
from maxtext_like.checkpoint.store import sidecar_files
from maxtext_like.config import former_names
from maxtext_like.storage import Place

FILE_NAME = "COMPLETE.json"
STATE_NAME = "state"  # folder of the arrays, next to the manifest
PARTS = (STATE_NAME, sidecar_files.FOLDER)
SCHEMA_VERSION = 1
_CHUNK_BYTES = 1 << 20  # bytes hashed at a time, few enough to stay in the CPU's cache
_THREADS = 8  # files hashed at a time
_OF_THE_STORE = ("crc32c", "md5")  # checksums of the content
_ETAG = "etag"  # not always a checksum, but it differs if the content differs; s3:// has nothing else
AnyPath = TypeVar("AnyPath", Path, Place, Path | Place)


class DamageError(ValueError):
  """A stored step is damaged: it differs from the written files. The message names the file and the difference."""


ANOTHER = "name another complete step of the run, or copy this one again"
"""What to do about a damaged step."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
  """The contents of a step.

  Attributes:
    step: number of finished training steps.
    finite: True; a state with a non-finite array is never saved.
    config: configuration of the run that wrote the step, by section (JSON values).
    extra: further values that the caller stores with the state, such as the position in the data (JSON values).
    leaves: shape and dtype of every array by name.
    files: size in bytes and xxh3_128 of every file, by path relative to ``home``; for objects in a store, its own checksum.
    versions: versions of maxtext_like and of the libraries that wrote the step.
    run: random id that the run drew at its first start; empty in steps of older versions.
    folder: subfolder of the step's directory that contains the files; empty if there is none.
    schema: version of this format.
  """

  step: int
  finite: bool
  config: dict[str, Any]
  extra: dict[str, Any]
  leaves: dict[str, dict[str, Any]]
  files: dict[str, dict[str, Any]]
  versions: dict[str, str]
  run: str = ""
  folder: str = ""
  schema: int = SCHEMA_VERSION


@functools.cache
def versions() -> dict[str, str]:
  """Returns the versions of the libraries that affect whether a checkpoint can be read."""
  from maxtext_like import __version__

  found = {"maxtext_like": __version__, "python": platform.python_version()}
  for package in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore"):
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def hash_file(path: Path, *, sync: bool = False) -> tuple[int, str]:
  """Returns the size in bytes and the xxh3_128 of a file. With ``sync`` its content is flushed to the disk first."""
  digest, size, chunk = xxhash.xxh3_128(), 0, memoryview(bytearray(_CHUNK_BYTES))
  with open(path, "rb", buffering=0) as file:
    if sync:
      os.fsync(file.fileno())
    while count := file.readinto(chunk):
      digest.update(chunk[:count])
      size += count
  return size, digest.hexdigest()


def hash_files(step_directory: Path) -> dict[str, dict[str, Any]]:
  """Flushes every file of a step to the disk. Returns size and hash of each, by path relative to the step."""
  folders, paths = [], []
  for folder, _, names in itertools.chain.from_iterable(os.walk(step_directory / part) for part in PARTS):
    folders.append(Path(folder))
    paths += [Path(folder, name) for name in names]
  with ThreadPoolExecutor(_THREADS, "hash") as pool:
    found = [*pool.map(functools.partial(hash_file, sync=True), paths)]
  for folder in folders:
    atomic.sync_directory(folder)
  named = zip((path.relative_to(step_directory).as_posix() for path in paths), found, strict=True)
  return {name: {"size": size, "xxh3_128": digest} for name, (size, digest) in sorted(named)}


def describe_objects(home: Place) -> dict[str, dict[str, Any]]:
  """Returns size and checksum of every object of a step, from the listing of the store.

  Raises:
    OSError: the store does not answer, or has no checksum of an object.
  """
  files = {}
  for entry in home.entries():
    name = "/".join(entry.place.parts[len(home.parts) :])
    if name.split("/")[0] not in PARTS:
      continue
    known = {kind: entry.checksums[kind] for kind in _OF_THE_STORE if kind in entry.checksums}
    if not known and _ETAG in entry.checksums:
      known = {_ETAG: entry.checksums[_ETAG]}
    if not known:
      raise OSError(errno.ENOTSUP, "the store provides no checksum of this object", str(entry.place))
    files[name] = {"size": entry.size, **known}
  return files


def home(step_directory: AnyPath, manifest: Manifest) -> AnyPath:
  """Returns the folder that contains the files of a step."""
  return step_directory / manifest.folder if manifest.folder else step_directory


def _digest(fields: dict[str, Any]) -> str:
  return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, allow_nan=False).encode())


def write(step_directory: Path, manifest: Manifest) -> None:
  """Writes the manifest atomically. From then on the step counts.

  Raises:
    ValueError: ``config`` or ``extra`` contains a value that JSON cannot represent (NaN included).
  """
  atomic.write_text(step_directory / FILE_NAME, to_text(manifest))


def to_text(manifest: Manifest) -> str:
  """Returns the text of a manifest, which ``parse`` reads. Raises ValueError as ``write``."""
  fields = dataclasses.asdict(manifest)
  try:
    return json.dumps({**fields, "xxh3_128": _digest(fields)}, indent=1, allow_nan=False) + "\n"
  except (TypeError, ValueError) as error:
    raise ValueError(f"step {manifest.step}: config and extra of a checkpoint must be JSON values: {error}") from error


def read(step_directory: Path | Place) -> Manifest:
  """Reads a manifest and checks it against its own hash.

  A manifest with a newer schema is returned with its ``schema`` and the fields that this version knows; the caller refuses it.

  Raises:
    DamageError: the manifest is missing, unreadable, not JSON, or has changed since it was written.
    OSError: a store does not answer, which says nothing about the step.
  """
  path = step_directory / FILE_NAME
  if isinstance(path, Path) and path.exists() and not path.is_file():
    raise DamageError(f"file {path} is not a regular file")
  try:
    text = path.read_text(encoding="utf-8")
  except FileNotFoundError as error:
    raise DamageError(f"file {path} is missing") from error
  except (OSError, ValueError) as error:
    if isinstance(error, OSError) and isinstance(path, Place):
      raise
    raise DamageError(f"file {path} is not a manifest ({type(error).__name__}: {error})") from error
  return parse(text, str(path))


def parse(text: str, path: str) -> Manifest:
  """Parses the text of a manifest; ``path`` names it in errors.

  Raises:
    DamageError: the text is not JSON or has changed since it was written.
  """
  try:
    fields = json.loads(text)
    written = fields.pop("xxh3_128")
  except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
    raise DamageError(f"file {path} is not a manifest ({type(error).__name__}: {error})") from error
  if written != _digest(fields):
    raise DamageError(f"file {path} does not match its own hash")
  known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(Manifest)}
  if missing := {name for name, required in known.items() if required} - fields.keys():
    raise DamageError(f"file {path} lacks {', '.join(sorted(missing))}")
  manifest = Manifest(**{name: value for name, value in fields.items() if name in known})
  return dataclasses.replace(manifest, config=former_names.renamed(manifest.config))


def check_sizes(step_directory: Path | Place, manifest: Manifest) -> None:
  """Checks that every file exists with its size. Needs one stat per file, or one listing of a store.

  Raises:
    DamageError: names the first file that is missing or has another size.
    OSError: a store does not answer.
  """
  if isinstance(step_directory, Place):
    check_objects(step_directory, manifest)
    return
  for name, expected in manifest.files.items():
    path = home(step_directory, manifest) / name
    try:
      found = path.stat()
    except OSError as error:
      raise DamageError(f"file {path} is missing ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
      raise DamageError(f"file {path} is not a regular file")
    size = found.st_size
    if size != expected["size"]:
      raise DamageError(f"file {path} has {size} bytes, but {expected['size']} were written")


def check_objects(step_directory: Place, manifest: Manifest) -> None:
  """Checks that every object exists with its size and with the checksum that the store reported after the write.

  Raises:
    DamageError: names the first object that is missing or differs.
    OSError: the store does not answer.
  """
  there = {entry.place: entry for entry in step_directory.entries()}
  for name, expected in manifest.files.items():
    place = home(step_directory, manifest) / name
    if (found := there.get(place)) is None:
      raise DamageError(f"object {place} is missing")
    if found.size != expected["size"]:
      raise DamageError(f"object {place} has {found.size} bytes, but {expected['size']} were written")
    # An OCDBT file ends with its own CRC-32C, so the store's CRC-32C of it is a constant. Only md5 detects a change of it.
    kinds = [kind for kind in (*_OF_THE_STORE, _ETAG) if kind in expected and kind in found.checksums]
    if wrong := [kind for kind in kinds if found.checksums[kind] != expected[kind]]:
      raise DamageError(
        f"object {place} has changed since it was written ({wrong[0]} {found.checksums[wrong[0]]}, not {expected[wrong[0]]})"
      )
    if not kinds and any(kind in expected for kind in (*_OF_THE_STORE, _ETAG)):
      raise DamageError(f"object {place}: the store no longer provides its checksum")


def is_complete(step_directory: Path | Place, step: int) -> bool:
  """Returns True if a directory contains this step, judged without reading its arrays. Raises OSError as ``check_sizes``."""
  try:
    stored = read(step_directory)
    check_sizes(step_directory, stored)
  except DamageError:
    return False
  return stored.step == step


def check_hashes(step_directory: Path | Place, manifest: Manifest, below: str = "") -> None:
  """Reads every file and checks its hash, several files at a time; for objects, their checksums.

  Args:
    step_directory: directory of the step.
    manifest: its manifest.
    below: check only files whose names begin with this.

  Raises:
    DamageError: names the first file that is missing, has another size or other content.
    OSError: a store does not answer.
  """
  check_sizes(step_directory, manifest)
  if isinstance(step_directory, Place):
    return

  def check(name: str) -> None:
    path, expected = home(step_directory, manifest) / name, manifest.files[name]
    # Local copies of objects have crc32c or an etag. With an etag, each zarr chunk has its own checksum.
    kind = next(kind for kind in ("xxh3_128", "crc32c", _ETAG) if kind in expected)
    if kind == _ETAG:
      return
    try:
      digest = hash_file(path)[1] if kind == "xxh3_128" else local_copies.crc32c(path)
    except OSError as error:
      raise DamageError(f"file {path} cannot be read ({error.strerror})") from error
    if digest != expected[kind]:
      raise DamageError(f"file {path} has changed since it was written (hash {digest}, not {expected[kind]})")

  with ThreadPoolExecutor(_THREADS, "hash") as pool:
    for checked in pool.map(check, (name for name in manifest.files if name.startswith(below))):
      assert checked is None  # map raises the error of the first damaged file here


def record(config: Any) -> dict[str, Any]:
  """Returns a configuration (dataclass or mapping) or other data as the JSON values that a manifest stores.

  Raises:
    ValueError: a value cannot be represented in JSON.
  """
  values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config
  try:
    return json.loads(json.dumps(values, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(f"cannot be stored in a checkpoint, which holds JSON values: {error}") from error
