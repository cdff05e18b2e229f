"""The answer file of ``generate --output``: a killed job continues, and a file of another job is rejected."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_like.errors import RetryableError, UserError
from maxtext_like.generation.batch_file import _NOT_DECISIVE, BatchFile, job_key, key_of, prompt_key
from maxtext_like.generation.sampling import Sampling
from maxtext_like.generation.scheduler import Request
from maxtext_like.generation.texts import Options

KEYS = [key_of(prompt, {"seed": 1}, "model") for prompt in ("a", "b", "c")]


def test_an_unfinished_line_is_written_again(tmp_path: Path):
  path = tmp_path / "answers.jsonl"
  with BatchFile(path, KEYS) as file:
    assert file.done == set()
    file.add(1, {"text": "ä\ud800"})
    with pytest.raises(UserError, match="another job writes it"):
      BatchFile(path, KEYS)
  with open(path, "ab") as file:
    file.write(b'{"index": 0, "te')
  with BatchFile(path, KEYS) as file:
    assert file.done == {1}
    file.add(0, {"text": "x"})
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert [(record["index"], record["key"]) for record in records] == [(1, KEYS[1]), (0, KEYS[0])]


@pytest.mark.parametrize("line", ['{"index": 1, "key": "0"}', '{"index": 3, "key": "0"}', "[1]", "{"])
def test_lines_of_another_job_are_refused(line: str, tmp_path: Path):
  path = tmp_path / "answers.jsonl"
  path.write_text(line + "\n")
  with pytest.raises(UserError, match=r"answers.jsonl:1: .*(\n.*)*another --output"):
    BatchFile(path, KEYS)
  assert path.read_text() == line + "\n"
  for place in (tmp_path, Path(os.devnull)):
    with pytest.raises(UserError, match="not a regular file"):
      BatchFile(place, KEYS)
  # The order of a set differs between processes.
  assert key_of({"x", "y", "z"}) == key_of(["x", "y", "z"])
  with pytest.raises(TypeError, match="cannot be a part of a key"):
    key_of(object())


def other(value: Any) -> Any:
  """Returns a valid value of the same field that differs from ``value``."""
  match value:
    case bool():
      return not value
    case int() | float():
      return value * 2 if value else 1
    case Sampling():
      return replace(value, seed=5)
    case frozenset():
      return value | {3}
    case dict():
      return {**value, 3: 1.0}
    case tuple() | list():
      return [*value, 3]
  return (3,)


def test_every_field_of_a_job_is_in_its_key():
  """The test reads the fields from the classes, so it includes fields that are added later."""
  options, request = Options(sampling=Sampling(top_p=0.4)), Request(tokens=[1, 2], limit=3, seed=4, stream=5)
  images = {"pixel_values": np.ones((2, 3))}
  jobs = {"": job_key(options, "model"), "model": job_key(options, "other")}
  for field in fields(Options):
    jobs[field.name] = job_key(replace(options, **{field.name: other(getattr(options, field.name))}), "model")
  for field in fields(Sampling):
    sampling = replace(options.sampling, **{field.name: other(getattr(options.sampling, field.name))})
    jobs[f"sampling.{field.name}"] = job_key(replace(options, sampling=sampling), "model")
  assert {name for name, key in jobs.items() if key == jobs[""]} == {"", *_NOT_DECISIVE}
  distinct = [key for name, key in jobs.items() if name not in (*_NOT_DECISIVE, "sampling.seed")]
  assert len(set(distinct)) == len(distinct)
  prompts = {"": prompt_key("job", "text", request), "text": prompt_key("job", "other", request)}
  prompts["job"] = prompt_key("other", "text", request)
  for field in fields(Request):
    prompts[field.name] = prompt_key("job", "text", replace(request, **{field.name: other(getattr(request, field.name))}))
  for i, changed in enumerate((images, {"pixel_values": np.ones((3, 2))}, {"pixel_values": np.eye(2, 3)})):
    prompts[f"images {i}"] = prompt_key("job", "text", replace(request, images=changed))
  assert {name for name, key in prompts.items() if key == prompts[""]} == {"", "name"}
  assert len(set(prompts.values())) == len(prompts) - 1


def test_a_full_disk_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  path = tmp_path / "answers.jsonl"

  def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")

  with BatchFile(path, KEYS) as file:
    file.add(0, {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RetryableError, match=r"No space left on device\n.*1 of 3 prompts are done"):
      file.add(1, {})
  with pytest.raises(UserError, match="cannot be written"):
    BatchFile(tmp_path / "none" / "answers.jsonl", KEYS)
