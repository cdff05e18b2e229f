"""The identity of weights changes with their content, not with their directory."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.weight_identity import weight_identity
from maxtext_like.errors import UserError


def test_a_run_that_was_trained_further(tmp_path: Path):
  def save(step: int) -> None:
    folder = tmp_path / "run" / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    (folder / "array").write_text(f"{step}")
    files = {"array": {"size": 2, "xxh3_128": f"{step}"}}
    manifest.write(folder, manifest.Manifest(step=step, finite=True, config={}, extra={}, leaves={}, files=files, versions={}))

  save(10)
  first = weight_identity(tmp_path / "run")
  shutil.copytree(tmp_path / "run", tmp_path / "copy")
  save(20)
  assert weight_identity(tmp_path / "copy") == weight_identity(tmp_path / "run" / "checkpoints" / "10") == first
  assert weight_identity(tmp_path / "run") != first
  with pytest.raises(UserError, match="contains no weights"):
    weight_identity(tmp_path)


def test_files_of_hugging_face(tmp_path: Path):
  (tmp_path / "config.json").write_text("{}")
  data = np.random.default_rng(0).integers(0, 255, 9_000_001, np.uint8)
  (tmp_path / "model.safetensors").write_bytes(data.tobytes())
  found = [weight_identity(tmp_path)]
  (tmp_path / "generation_config.json").write_text("{}")
  assert weight_identity(tmp_path) == found[0]
  changes = ["config.json", "adapter_config.json", "model-2.safetensors"]
  for name in changes:
    (tmp_path / name).write_text('{"a": 1}')
    found.append(weight_identity(tmp_path))
  for changed in (
    np.concatenate([data, data[:1]]),
    np.concatenate([data[:-1], data[-1:] ^ 1]),
    data + (np.arange(len(data)) > 5e6),
  ):
    (tmp_path / "model.safetensors").write_bytes(changed.astype(np.uint8).tobytes())
    found.append(weight_identity(tmp_path))
  assert len(set(found)) == len(found)
