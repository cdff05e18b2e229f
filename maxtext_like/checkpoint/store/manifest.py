"""The manifest of a checkpointed step: the one file whose presence makes a step count, and what it must match.

Orbax keeps no checksums (a flipped byte restores silently wrong) and lists steps that do not exist, so every step has a
``COMPLETE.json`` of our own: size and xxh3_128 of every file, leaves, configuration, versions. It is written last.

In an object store (a ``Place``) the store's own checksums take the place of the hashes: a listing has them, so nothing is read
back. What was written there lies in a folder of its own, as ``120/5f0c9a21/state``, since nothing can be renamed.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from maxtext_like import atomic, local_copies
from maxtext_like.checkpoint.store import sidecar_files
from maxtext_like.storage import Place

FILE_NAME = "COMPLETE.json"
STATE_NAME = "state"  # what orbax writes, beside the manifest
PARTS = (STATE_NAME, sidecar_files.FOLDER)
SCHEMA_VERSION = 1
_CHUNK_BYTES = 16 << 20
_OF_THE_STORE = ("crc32c", "md5")  # checksums of the content
_ETAG = "etag"  # need not be one, but is another for other content: all that s3:// has
AnyPath = TypeVar("AnyPath", Path, Place, Path | Place)


class DamageError(ValueError):
  """A stored step is not what was written: the message names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
  """What a step holds.

  Attributes:
    step: number of finished training steps.
    finite: every array of the state was finite; a state that is not is never saved.
    config: the configuration that wrote it, by section (JSON values).
    extra: what else the caller keeps with the state, such as the position in the data (JSON values).
    leaves: shape and dtype of every array by name.
    files: size in bytes and xxh3_128 of every file, by path relative to ``home``; of objects the store's checksum instead.
    versions: of the framework and of the libraries that wrote it.
    run: the life of the run that wrote it, drawn at random at its first start; empty: a version that had none.
    folder: in the step's directory, where the files are; empty: in the directory itself.
    schema: version of this layout.
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
  """Returns the versions that decide whether a checkpoint can be read again."""
  from maxtext_like import __version__

  found = {"maxtext_like": __version__, "python": platform.python_version()}
  for package in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore"):
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found[package] = "not installed"
  return found


def hash_file(path: Path, *, sync: bool = False) -> tuple[int, str]:
  """Returns size in bytes and xxh3_128 of a file; with ``sync`` its content is on the disk when this returns."""
  digest = xxhash.xxh3_128()
  size = 0
  with open(path, "rb", buffering=0) as file:
    if sync:
      os.fsync(file.fileno())
    while chunk := file.read(_CHUNK_BYTES):
      digest.update(chunk)
      size += len(chunk)
  return size, digest.hexdigest()


def hash_files(step_directory: Path) -> dict[str, dict[str, Any]]:
  """Makes every file of a step durable and returns size and hash of each, by path relative to the step."""
  files = {}
  for folder, _, names in itertools.chain.from_iterable(os.walk(step_directory / part) for part in PARTS):
    for name in names:
      path = Path(folder, name)
      size, digest = hash_file(path, sync=True)
      files[path.relative_to(step_directory).as_posix()] = {"size": size, "xxh3_128": digest}
    atomic.sync_directory(Path(folder))
  return dict(sorted(files.items()))


def describe_objects(home: Place) -> dict[str, dict[str, Any]]:
  """The same of what was written to a store, by its own listing.

  Raises:
    OSError: the store does not answer, or knows no checksum of an object.
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
      raise OSError(errno.ENOTSUP, "the store gives no checksum of it", str(entry.place))
    files[name] = {"size": entry.size, **known}
  return files


def home(step_directory: AnyPath, manifest: Manifest) -> AnyPath:
  """Where the files of a step lie."""
  return step_directory / manifest.folder if manifest.folder else step_directory


def _digest(fields: dict[str, Any]) -> str:
  return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, allow_nan=False).encode())


def write(step_directory: Path, manifest: Manifest) -> None:
  """Writes the manifest atomically. From here on the step counts.

  Raises:
    ValueError: ``config`` or ``extra`` holds something that JSON cannot (NaN included).
  """
  atomic.write_text(step_directory / FILE_NAME, to_text(manifest))


def to_text(manifest: Manifest) -> str:
  """What ``parse`` reads. ValueError as ``write``."""
  fields = dataclasses.asdict(manifest)
  try:
    return json.dumps({**fields, "xxh3_128": _digest(fields)}, indent=1, allow_nan=False) + "\n"
  except (TypeError, ValueError) as error:
    raise ValueError(f"step {manifest.step}: config and extra of a checkpoint must be JSON: {error}") from error


def read(step_directory: Path | Place) -> Manifest:
  """Reads a manifest and checks it against its own hash.

  A manifest of a newer schema comes back with its ``schema`` and whatever fields we know; the caller refuses it.

  Raises:
    DamageError: missing, unreadable, not JSON, or changed since it was written.
    OSError: a store does not answer, which is no damage.
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
  """The manifest that a text is; ``path`` names it in errors.

  Raises:
    DamageError: not JSON, or changed since it was written.
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
  return Manifest(**{name: value for name, value in fields.items() if name in known})


def check_sizes(step_directory: Path | Place, manifest: Manifest) -> None:
  """Checks that every file is there with its size; costs one stat per file, of a store one listing.

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
      raise DamageError(f"file {path} has {size} bytes, {expected['size']} were written")


def check_objects(step_directory: Place, manifest: Manifest) -> None:
  """Checks that every object is there with its size, and with the checksum that the store gave when it was written.

  Raises:
    DamageError: names the first that is not.
    OSError: the store does not answer.
  """
  there = {entry.place: entry for entry in step_directory.entries()}
  for name, expected in manifest.files.items():
    place = home(step_directory, manifest) / name
    if (found := there.get(place)) is None:
      raise DamageError(f"object {place} is missing")
    if found.size != expected["size"]:
      raise DamageError(f"object {place} has {found.size} bytes, {expected['size']} were written")
    # Of a file that ends with its own CRC-32C, as OCDBT's do, the store's is always the same: md5 tells them apart.
    kinds = [kind for kind in (*_OF_THE_STORE, _ETAG) if kind in expected and kind in found.checksums]
    if wrong := [kind for kind in kinds if found.checksums[kind] != expected[kind]]:
      raise DamageError(
        f"object {place} is not what was written ({wrong[0]} {found.checksums[wrong[0]]}, not {expected[wrong[0]]})"
      )
    if not kinds and any(kind in expected for kind in (*_OF_THE_STORE, _ETAG)):
      raise DamageError(f"object {place}: the store knows no checksum of it any more")


def is_whole(step_directory: Path | Place, step: int) -> bool:
  """Whether a directory holds this step, as far as can be told without reading its arrays. OSError as ``check_sizes``."""
  try:
    stored = read(step_directory)
    check_sizes(step_directory, stored)
  except DamageError:
    return False
  return stored.step == step


def check_hashes(step_directory: Path | Place, manifest: Manifest, below: str = "") -> None:
  """Reads every file and checks its hash (1.5 GB/s from the page cache of a busy test machine); of objects, their checksums.

  Args:
    step_directory: of the step.
    manifest: its own.
    below: only files whose names begin so.

  Raises:
    DamageError: names the first file that is missing, has another size or other content.
    OSError: a store does not answer.
  """
  check_sizes(step_directory, manifest)
  if isinstance(step_directory, Place):
    return
  for name, expected in manifest.files.items():
    if not name.startswith(below):
      continue
    path = home(step_directory, manifest) / name
    # The latter two of a copy from a store; what has an etag alone has a checksum of its own in each chunk.
    kind = next(kind for kind in ("xxh3_128", "crc32c", _ETAG) if kind in expected)
    if kind == _ETAG:
      continue
    try:
      digest = hash_file(path)[1] if kind == "xxh3_128" else local_copies.crc32c(path)
    except OSError as error:
      raise DamageError(f"file {path} cannot be read ({error.strerror})") from error
    if digest != expected[kind]:
      raise DamageError(f"file {path} has changed since it was written (hash {digest}, not {expected[kind]})")
