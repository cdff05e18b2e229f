"""Compiled programs of a run on CPUs, kept for the next start of the same run, which so neither traces nor lowers them.

JAX's own cache of compiled programs asks for the text of a program, and to make that takes a third of a start of a tiny model
(docs/cpu.md). What the text follows from is asked here: the configuration, the model on its devices, every source file of this
package by its content, every other file that code was loaded from by its size and time, where code is looked for and found,
the versions, the flags and the processor. A change of any of them finds nothing here; the program is lowered, and then found by
its text, or compiled.

That is all only where no other code has had a hand in it: in a process that is the command alone (``own_process``), the only
one of its run. Nothing is kept where a variable of JAX's is set, as whoever sets one may want to see something of the tracing.

XLA gives an executable away whole only once, just compiled: one that was given away before, or comes out of JAX's cache, may
lack functions when it is loaded again (JAX 0.10 and 0.12). So JAX's cache has no part in these programs.
"""

import contextlib
import dataclasses
import enum
import hashlib
import importlib.util
import itertools
import logging
import os
import pickle
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from maxtext_like import own_process
from maxtext_like.atomic import write_bytes
from maxtext_like.models.placed import Model
from maxtext_like.sharding import processes
from maxtext_like.training import compiler_options

_log = logging.getLogger(__name__)

KEPT = 16  # starts; a megabyte each for a tiny model
FOLDER = "starts"
_START, _PROGRAM = ".start", ".program"
_PROGRAMS = 3  # of a start: init, look, step
_PLACES = ("output_dir", "run_name", "compilation_cache_dir")
"""Keys of ``logging`` that no program follows from."""
_PACKAGE = str(Path(__file__).parents[1])
T = TypeVar("T")


class KeptPrograms:
  """What is kept of one start, and what is made in it, to be kept."""

  def __init__(self, folder: Path | None = None, key: str = "", around: str = "", devices: Sequence[Any] = ()):
    """What is kept of a start.

    Args:
      folder: where; None: nothing is kept.
      key: of all that the start follows from.
      around: what its programs follow from beside their texts.
      devices: of the programs.
    """
    self._folder, self._around, self._devices, self._new = folder, around, devices, False
    self._path = Path() if folder is None else folder / f"{key}{_START}"
    files, places, self._parts = (None if folder is None else _read(self._path)) or ({}, {}, {})
    if places != _places(places) or not all(_stamp(name) == stamp for name, stamp in files.items()):
      self._parts = {}

  @classmethod
  def of(cls, model: Model) -> "KeptPrograms":
    """What is kept for the run of a model, whose configuration is the run's."""
    if (folder := _place(model)) is None:
      return cls()
    try:
      around = _around(model)
      return cls(folder, _key(model, around), around, model.devices)
    except (TypeError, OSError) as error:
      _log.warning("the compiled programs are not kept for the next start: %s", error)
      return cls()

  def value(self, name: str, make: Callable[[], T]) -> T:
    """A value that follows from the run alone and can be pickled: as it was kept, or made."""
    if name not in self._parts:
      self._parts[name], self._new = make(), True
    return self._parts[name]

  @contextlib.contextmanager
  def compiling(self) -> Iterator[None]:
    """Around all ``program``: JAX's cache is off where this one is on, so that executables can be had."""
    if self._folder is None:
      yield
      return
    _use_jaxs_cache(False)
    try:
      yield
    finally:
      _use_jaxs_cache(True)

  def program(self, name: str, lower: Callable[[], Any]) -> Callable[[], Any]:
    """What gives the compiled program, in any thread.

    Args:
      name: of the program.
      lower: gives it lowered; called here and now, where it is not kept.
    """
    if self._folder is None:
      return lower().compile
    text = self._parts.get(name)
    if (kept := self._of_text(text)) is None:
      lowered = lower()
      text = _text_key(lowered, self._around)
      self._parts[name], self._new = text, True
      if (kept := self._of_text(text)) is None:
        return lambda: self._compiled(lowered, text)
    return lambda: serialize_executable.deserialize_and_load(*kept, execution_devices=self._devices)

  def _of_text(self, text: str | None) -> Any:
    return None if text is None or self._folder is None else _read(self._folder / f"{text}{_PROGRAM}")

  def _compiled(self, lowered: Any, text: str) -> Any:
    assert self._folder is not None
    made = lowered.compile()
    try:
      _write(self._folder / f"{text}{_PROGRAM}", serialize_executable.serialize(made), KEPT * _PROGRAMS)
    except jax.errors.JaxRuntimeError as error:
      _log.warning("a compiled program is not kept for the next start: %s", str(error).splitlines()[0])
    return made

  def write(self) -> None:
    """Keeps what was made."""
    began = own_process.began()
    if self._folder is None or not self._new or began is None:
      return
    files = _files_of_code()
    if all(_written(name) < began * 1e9 for name in files):  # else what was loaded may not be what is there now
      packages = {name.partition(".")[0] for name in list(sys.modules)}
      _write(self._path, (files, _places(packages), self._parts), KEPT)


def _place(model: Model) -> Path | None:
  settings = jax.config.values
  cache = settings["jax_compilation_cache_dir"] if settings["jax_enable_compilation_cache"] else None
  watched = any(name.startswith("JAX_") and name != "JAX_PLATFORMS" for name in os.environ)
  if cache is None or watched or own_process.began() is None or processes.count() > 1 or model.platform != "cpu":
    return None
  return Path(cache) / FOLDER


def _use_jaxs_cache(used: bool) -> None:
  jax.config.update("jax_enable_compilation_cache", used)
  compilation_cache.reset_cache()  # else it goes on as it found itself first


def _read(path: Path) -> Any:
  """What ``_write`` wrote; None: nothing, or nothing that can be read."""
  try:
    content = zlib.decompress(path.read_bytes())  # which knows by a checksum that nothing of it is damaged
  except FileNotFoundError:
    return None
  except (OSError, zlib.error) as error:
    _log.warning("%s: %s; the programs are made again", path, error)
    return None
  with contextlib.suppress(OSError):  # another user's
    os.utime(path)  # the oldest is the one that was not asked for the longest
  try:
    return pickle.loads(content)
  except Exception as error:  # trees have classes of other packages, which may have moved or gone since then
    _log.warning("%s: %s: %s; the programs are made again", path, type(error).__name__, error)
    return None


def _write(path: Path, content: Any, keep: int) -> None:
  """Writes a file, and removes the oldest of its kind."""
  try:
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, zlib.compress(pickle.dumps(content), level=1))
    ages = {other: stamp[1] for other in path.parent.glob(f"*{path.suffix}") if (stamp := _stamp(other)) is not None}
    for old in sorted(ages, key=ages.__getitem__)[:-keep]:
      with contextlib.suppress(PermissionError):  # another user's, in a folder that all may write to
        old.unlink(missing_ok=True)
  except OSError as error:
    _log.warning("%s: %s; the compiled programs are not kept for the next start", path, error.strerror)


def _around(model: Model) -> str:
  """What compiled programs follow from beside their texts: devices, processor, flags and versions."""
  machine = (platform.machine(), _processor(), os.cpu_count(), _processors())
  variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("JAX_", "XLA_", "TF_"))}
  variables |= {"flags": compiler_options.flags_given()}
  versions = (sys.version, str(sys.flags), jax.__version__, jaxlib.version.__version__)
  settings = {k: repr(v) for k, v in sorted(jax.config.values.items())}
  return repr((_plain(model.mesh), machine, variables, versions, settings))


def _text_key(lowered: Any, around: str) -> str:
  """A name for a program: its text, and how it takes and gives trees."""
  trees = repr((lowered.args_info, lowered.in_tree, lowered.out_tree))
  return hashlib.sha256("\n".join((around, trees, lowered.as_text())).encode()).hexdigest()


def _key(model: Model, around: str) -> str:
  """A name for everything that the programs of a run follow from, but for the files of others."""
  config = _plain(model.config)
  for name in _PLACES:
    del config["logging"][name]
  own = {field.name: _plain(getattr(model, field.name)) for field in dataclasses.fields(model) if field.name != "config"}
  return hashlib.sha256(repr((config, own, around, sys.path, _sources(_PACKAGE))).encode()).hexdigest()


def _plain(x: Any) -> Any:
  """A value in dicts, tuples and what has one ``repr`` in every process.

  Raises:
    TypeError: something else is in it.
  """
  if x is None or isinstance(x, bool | int | float | str | bytes | enum.Enum | np.dtype):
    return x
  if dataclasses.is_dataclass(x) and not isinstance(x, type):
    return {"": type(x).__qualname__} | {field.name: _plain(getattr(x, field.name)) for field in dataclasses.fields(x)}
  if isinstance(x, dict):
    return {key: _plain(value) for key, value in x.items()}
  if isinstance(x, tuple | list):
    return tuple(_plain(value) for value in x)
  if isinstance(x, set | frozenset):
    return tuple(sorted(repr(_plain(value)) for value in x))
  if isinstance(x, jax.sharding.Mesh):
    return tuple(x.shape.items()), str(x.axis_types), tuple((d.id, d.platform, d.device_kind) for d in x.devices.flat)
  raise TypeError(f"a {type(x).__qualname__}: what of it a program follows from is not known here")


def _processor() -> str:
  """What code is compiled for: its model and what it can do."""
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      first = itertools.takewhile(str.strip, file)  # one of them: a blank line follows each, but some files have none
      return "".join(line for line in first if line.startswith(("model name", "flags", "Features", "CPU ")))
  except OSError:  # no Linux
    return platform.processor()


def _processors() -> int | None:
  """How many it may run on, by which XLA divides loops among threads; None: the system does not say."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _sources(folder: str) -> str:
  """A name for the content of every source file in a folder."""
  found, folders = hashlib.sha256(), [folder]
  while folders:
    with os.scandir(folders.pop()) as entries:
      for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.is_dir():  # the layers are behind a link
          folders.append(entry.path)
        elif entry.name.endswith(".py") and entry.is_file():  # Emacs' lock of a file is a link to nowhere beside it
          with open(entry.path, "rb") as file:
            content = file.read()
          found.update(f"{entry.path} {len(content)}\n".encode() + content)
  return found.hexdigest()


def _files_of_code() -> dict[str, tuple[int, int]]:
  """Every file that this process has loaded code from, as it is now."""
  # Not getattr: it makes some modules import more.
  names = {file for module in list(sys.modules.values()) if (file := getattr(module, "__dict__", {}).get("__file__"))}
  return {name: stamp for name in names if (stamp := _stamp(name)) is not None}


def _places(packages: Iterable[str]) -> dict[str, Any]:
  """Where each of some packages was imported from, or would be: another one of the same name may have come before it."""
  found: dict[str, Any] = {}
  for name in packages:
    try:
      spec = importlib.util.find_spec(name)
    except ValueError:  # a module that something has made, and the command itself
      spec = None
    found[name] = None if spec is None else spec.origin or list(spec.submodule_search_locations or ())
  return found


def _stamp(name: str | Path) -> tuple[int, int] | None:
  """(size, time of the last change in ns) of a file, of a module in an archive the archive's; None: there is none."""
  try:
    found = os.stat(name)
  except NotADirectoryError:
    return _stamp(os.path.dirname(name))
  except OSError:
    return None
  return found.st_size, found.st_mtime_ns


def _written(name: str) -> int:
  """When a file came to be what it is, in ns; now, where there is none any more.

  The time of its last change may be that of a file that it is a copy of (rsync, cp -p), or that was moved here.
  """
  try:
    found = os.stat(name)
  except NotADirectoryError:
    return _written(os.path.dirname(name))
  except OSError:
    return time.time_ns()
  return max(found.st_mtime_ns, found.st_ctime_ns)
