"""The manifest of a checkpointed step: the one file whose presence makes a step count, and what it must match.

Orbax keeps no checksums (a flipped byte restores silently wrong) and lists steps that do not exist, so every step has a
``COMPLETE.json`` of our own: size and xxh3_128 of every file, leaves, configuration, versions. It is written last.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from maxtext_like import atomic
from maxtext_like.checkpoint import accompanying_files

FILE_NAME = "COMPLETE.json"
STATE_NAME = "state"  # what orbax writes, beside the manifest
PARTS = (STATE_NAME, accompanying_files.FOLDER)
SCHEMA_VERSION = 1
_CHUNK_BYTES = 16 << 20


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
    files: size in bytes and xxh3_128 of every file, by path relative to the step's directory.
    versions: of the framework and of the libraries that wrote it.
    run: the life of the run that wrote it, drawn at random at its first start; empty: a version that had none.
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


def _digest(fields: dict[str, Any]) -> str:
  return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, allow_nan=False).encode())


def write(step_directory: Path, manifest: Manifest) -> None:
  """Writes the manifest atomically. From here on the step counts.

  Raises:
    ValueError: ``config`` or ``extra`` holds something that JSON cannot (NaN included).
  """
  fields = dataclasses.asdict(manifest)
  try:
    text = json.dumps({**fields, "xxh3_128": _digest(fields)}, indent=1, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(f"step {manifest.step}: config and extra of a checkpoint must be JSON: {error}") from error
  atomic.write_text(step_directory / FILE_NAME, text + "\n")


def read(step_directory: Path) -> Manifest:
  """Reads a manifest and checks it against its own hash.

  A manifest of a newer schema comes back with its ``schema`` and whatever fields we know; the caller refuses it.

  Raises:
    DamageError: missing, unreadable, not JSON, or changed since it was written.
  """
  path = step_directory / FILE_NAME
  try:
    text = path.read_text(encoding="utf-8")
  except FileNotFoundError as error:
    raise DamageError(f"file {path} is missing") from error
  except (OSError, ValueError) as error:
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


def check_sizes(step_directory: Path, manifest: Manifest) -> None:
  """Checks that every file is there with its size; costs one stat per file.

  Raises:
    DamageError: names the first file that is missing or has another size.
  """
  for name, expected in manifest.files.items():
    path = step_directory / name
    try:
      size = path.stat().st_size
    except OSError as error:
      raise DamageError(f"file {path} is missing ({error.strerror})") from error
    if size != expected["size"]:
      raise DamageError(f"file {path} has {size} bytes, {expected['size']} were written")


def check_hashes(step_directory: Path, manifest: Manifest) -> None:
  """Reads every file and checks its hash (1.5 GB/s from the page cache of a busy test machine).

  Raises:
    DamageError: names the first file that is missing, has another size or other content.
  """
  check_sizes(step_directory, manifest)
  for name, expected in manifest.files.items():
    path = step_directory / name
    try:
      _, digest = hash_file(path)
    except OSError as error:
      raise DamageError(f"file {path} cannot be read ({error.strerror})") from error
    if digest != expected["xxh3_128"]:
      raise DamageError(f"file {path} has changed since it was written (hash {digest}, not {expected['xxh3_128']})")
