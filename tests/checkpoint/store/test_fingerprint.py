"""The fingerprint of weight files changes with their numbers, not with the directory's name."""

import shutil

import numpy as np
from safetensors.numpy import save_file

from maxtext_like.checkpoint.store.fingerprint import of_files
from maxtext_like.storage import Place


def write(directory, values):
  directory.mkdir(exist_ok=True)
  (directory / "config.json").write_text("{}")
  save_file({"w": values}, directory / "model.safetensors")
  return of_files(directory)


def test_of_hugging_face_files(tmp_path):
  values = np.random.default_rng(0).standard_normal((300, 2000)).astype(np.float32)
  first = write(tmp_path / "a", values)
  assert first is not None
  assert first.startswith("hf ")
  shutil.copytree(tmp_path / "a", tmp_path / "b")
  assert of_files(tmp_path / "b") == first
  assert write(tmp_path / "b", values + np.float32(1e-3)) != first  # as after further training
  half = values.copy()
  half[150:] *= 2
  assert write(tmp_path / "b", half) != first
  assert write(tmp_path / "b", values.astype(np.float16)) != first


def test_of_what_is_no_weights(tmp_path):
  assert of_files(tmp_path) is None
  assert of_files(Place("memory://bucket/model")) is None
