"""A file of answers to a file of prompts: one JSON object per line, written as answers end, so that a killed job can continue.

Each line has "index", "prompt", "answers" and "key". The key is a hash of everything that decides the answers: the token ids
and images of the prompt, all options after their defaults and the model's files were applied, the equations and dtypes of the
model, and its weights. A job that finds lines with other keys stops, because they are answers to something else.
"""

import dataclasses
import fcntl
import hashlib
import json
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from maxtext_like.errors import RetryableError, UserError
from maxtext_like.generation.scheduler import Request
from maxtext_like.generation.texts import Options
from maxtext_like.strict_json import NotJsonError, loads, printable


def key_of(*parts: Any) -> str:
  """Return a hash of some values: 16 hexadecimal digits.

  Args:
    parts: JSON values, other numbers, sets, arrays, and dataclasses of these.
  """
  text = json.dumps(parts, sort_keys=True, default=_plain)
  return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain(value: Any) -> Any:
  """Return a value as JSON. Raises TypeError for a type whose text might differ between processes."""
  if isinstance(value, set | frozenset):
    return sorted(value)  # the order of a set differs between processes
  if isinstance(value, np.ndarray):
    return [str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, numbers.Number):
    return str(value)
  if isinstance(value, Mapping):
    return dict(value)
  if dataclasses.is_dataclass(value):
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
  raise TypeError(f"a {type(value).__name__} cannot be a part of a key")


def job_key(options: Options, *model: Any) -> str:
  """Return a hash of everything that decides the answers of a job except the prompts.

  Args:
    options: every field counts, also those of the future, except ``_NOT_DECISIVE``.
    model: the same for the model.
  """
  return key_of({name: value for name, value in _plain(options).items() if name not in _NOT_DECISIVE}, *model)


def prompt_key(job: str, text: str, request: Request) -> str:
  """Return the key of the answers to a prompt.

  Args:
    job: ``job_key``.
    text: text of the prompt, which is stored with the answers.
    request: every field counts except the name.
  """
  return key_of(job, text, {name: value for name, value in _plain(request).items() if name != "name"})


_NOT_DECISIVE = ("slots", "least_slots", "least_tokens", "turn", "continues", "seeds", "numbers")
"""Options that do not change the answers (how many are generated at a time, and what happens if one fails), and those that are
part of each request (its seed and number)."""


class BatchFile:
  """The answers of a job. Use it as a context manager.

  Args:
    path: the file, which may exist.
    keys: key of every prompt.

  Attributes:
    done: indices of the prompts whose answers the file has.

  Raises:
    UserError: the file cannot be opened, or has lines that belong to another job.
  """

  def __init__(self, path: Path, keys: Sequence[str]):
    self._path, self._keys = path, keys
    if path.exists() and not path.is_file():  # a pipe or a device cannot be read again
      raise UserError(
        f"{path}: not a regular file\n  why: the job reads its answers to continue\n  fix: choose another --output"
      )
    try:
      self._file = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
    except OSError as error:
      raise UserError(f"{path}: cannot be written: {error.strerror}", fix="choose another --output") from None
    try:
      try:
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise UserError(f"{path}: another job writes it\n  fix: wait for that job, or choose another --output") from None
      self.done = self._read()
    except BaseException:
      self._file.close()
      raise

  def _read(self) -> set[int]:
    """Return the indices of complete lines, and cut off a line that a killed job did not finish."""
    self._file.seek(0)
    done, end = set(), 0
    for number, line in enumerate(self._file, 1):
      if not line.endswith(b"\n"):
        break
      place = f"{printable(self._path)}:{number}"
      try:
        record = loads(line)
      except NotJsonError as error:
        raise UserError(f"{place}: {error}\n  fix: remove the line, or choose another --output") from None
      index = record.get("index") if isinstance(record, dict) else None
      if not isinstance(index, int) or not 0 <= index < len(self._keys) or record.get("key") != self._keys[index]:
        raise UserError(
          f"{place}: not an answer of this job\n"
          "  why: the prompt, the options, the model, its precision or its weights differ from those of the line\n"
          "  fix: choose another --output, or remove the file"
        )
      done.add(index)
      end += len(line)
    self._file.truncate(end)
    self._file.seek(end)
    return done

  def add(self, index: int, record: Mapping[str, Any]) -> None:
    """Write the answers to a prompt. They are on the disk when this method returns.

    Raises:
      RetryableError: the disk is full or fails. The same command continues after the last complete line.
    """
    line = json.dumps({"index": index, **record, "key": self._keys[index]}, ensure_ascii=False)
    try:
      self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
      self._file.flush()
      os.fsync(self._file.fileno())
    except OSError as error:
      raise RetryableError(
        f"{self._path}: cannot be written: {error.strerror}\n"
        f"  fix: make room, then repeat the command; {len(self.done)} of {len(self._keys)} prompts are done"
      ) from None
    self.done.add(index)

  def __enter__(self) -> "BatchFile":
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    try:
      self._file.close()
    except OSError:
      # Buffered bytes of a line that ``add`` has reported already.
      if kind is None:
        raise
