"""Tests maxtext_like/checkpoint/store/steps.py: which directories are steps, moved aside or refused. No data is lost."""

import contextlib
import os
import shutil

import jax.numpy as jnp
import pytest

from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.checkpoint.weight_sources import find_step
from maxtext_like.errors import UserError

STATE = {"x": jnp.arange(3.0)}


@pytest.fixture
def saved(tmp_path):
  """Save steps 10 and 20, and return their directory."""
  with CheckpointManager(tmp_path / "c", asynchronous=False) as manager:
    manager.save(10, STATE)
    manager.save(20, STATE)
  return tmp_path / "c"


def names(path):
  return sorted(entry.name for entry in path.iterdir())


def contents(path):
  return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_step_without_its_manifest_is_moved_aside_and_kept(saved, caplog):
  for step in ("10", "20"):
    (saved / step / manifest.FILE_NAME).unlink()
  arrays = contents(saved / "20")
  (saved / "20.incomplete").mkdir()
  with CheckpointManager(saved) as manager:
    assert manager.complete_steps() == []
    assert names(saved) == ["10.incomplete", "20.incomplete", "20.incomplete-2"]
    assert contents(saved / "20.incomplete-2") == arrays
    assert f"{saved}/20 has no COMPLETE.json" in caplog.text
    assert "20.incomplete-2" in caplog.text
    assert manager.save_and_wait(20, STATE)
  assert names(saved) == ["10.incomplete", "20", "20.incomplete", "20.incomplete-2"]


def test_a_save_that_only_lacks_its_name_gets_it(saved, caplog):
  (saved / "20").rename(saved / "20.saving-0a1b2c3d")
  with CheckpointManager(saved) as manager:
    assert manager.complete_steps() == [10, 20]
  assert f"{saved}/20.saving-0a1b2c3d was complete" in caplog.text
  shutil.copytree(saved / "20", saved / "20.saving-0a1b2c3d")
  with CheckpointManager(saved):
    assert names(saved) == ["10", "20"]


@pytest.mark.parametrize("place", ["20", "."])
def test_linked_steps_work(saved, tmp_path, caplog, place):
  (saved / place).resolve().rename(tmp_path / "elsewhere")
  (saved / place).symlink_to(tmp_path / "elsewhere")
  with CheckpointManager(saved, max_to_keep=1) as manager:
    assert manager.complete_steps() == [10, 20]
    assert manager.save_and_wait(30, STATE)
    assert manager.complete_steps() == [30]
  if place == "20":
    assert names(saved) == ["30"]
    assert (tmp_path / "elsewhere" / manifest.FILE_NAME).exists()
    assert f"was a link and is removed; its target is kept: {tmp_path / 'elsewhere'}" in caplog.text
  else:
    assert names(tmp_path / "elsewhere") == ["30"]


@pytest.mark.parametrize("place", ["20", "."])
def test_links_to_what_is_not_there_are_refused(saved, tmp_path, place):
  path = (saved / place).resolve()
  shutil.rmtree(path)
  path.symlink_to(tmp_path / "not mounted")
  with pytest.raises(UserError, match=r"is a link to .*not mounted"):
    CheckpointManager(saved)


@pytest.mark.parametrize("where", ["c", "c/.."])
def test_a_step_under_the_name_of_another_is_refused(saved, where):
  (saved / "20").rename(saved / "50")
  if where != "c":
    saved.rename(saved.with_name("checkpoints"))
    saved = saved.with_name("checkpoints")
  with pytest.raises(UserError, match=r"(?s)50 holds step 20 .*fix: rename it to 20"):
    CheckpointManager(saved)
  with pytest.raises(UserError, match="50 holds step 20"):
    find_step(saved if where == "c" else saved.parent)
  assert StepDirectories(saved).complete() == [10]
  assert find_step(saved / "50") == saved / "50"  # a path to the step itself is accepted, whatever its manifest says


def test_no_name_is_given_or_taken_outside_the_fence(saved, monkeypatch):
  """A process that lost the directory to another one writes only under a temporary name and never renames it to a step."""
  inside, lost = [], []

  @contextlib.contextmanager
  def fence():
    if lost:
      raise OSError("not ours any more")
    inside.append(True)
    yield
    inside.pop()

  rename = type(saved).rename

  def guarded(path, target):
    assert inside or ".tmp" in path.name, path
    return rename(path, target)

  with CheckpointManager(saved, fence=fence, max_to_keep=1, attempts=9, backoff_seconds=0) as manager:
    monkeypatch.setattr(type(saved), "rename", guarded)
    assert manager.save_and_wait(30, STATE)
    write = manifest.write
    monkeypatch.setattr(manifest, "write", lambda path, record: (write(path, record), lost.append(True)))
    assert manager.save(40, STATE)
    assert not manager.wait()
  assert names(saved) == ["30"]


def test_steps_that_the_run_went_back_past_are_kept_as_long_as_old_ones(tmp_path):
  with CheckpointManager(tmp_path / "c", asynchronous=False, max_to_keep=2) as manager:
    for step in (5, 7):
      manager.save(step, STATE)
    manager.abandon_after(5)
    assert StepDirectories(tmp_path / "c").abandoned() == {7}
    manager.save(10, STATE)
    assert names(tmp_path / "c") == ["10", "5", "7.abandoned"]
    manager.save(15, STATE)
  assert names(tmp_path / "c") == ["10", "15"]


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "file", "fifo"])
def test_what_has_the_name_of_a_save_and_is_no_directory_is_refused_and_kept(tmp_path, kind):
  (target := tmp_path / "precious").mkdir()
  path = tmp_path / "checkpoints" / "20.saving-0a1b2c3d"
  path.parent.mkdir()
  if kind.startswith("link"):
    path.symlink_to(target if kind == "link" else tmp_path / "gone")
  elif kind == "file":
    path.write_text("")
  else:
    os.mkfifo(path)
  with pytest.raises(UserError, match=r"20\.saving-0a1b2c3d is .*\n  fix: remove it"):
    StepDirectories(path.parent).make()
  assert os.path.lexists(path)
  assert target.is_dir()


def test_a_manifest_or_an_array_file_that_is_a_pipe_is_damage(tmp_path):
  """Reading a pipe would never end."""
  os.mkfifo(tmp_path / manifest.FILE_NAME)
  with pytest.raises(manifest.DamageError, match="not a regular file"):
    manifest.read(tmp_path)
  assert not manifest.is_complete(tmp_path, 1)
  os.mkfifo(tmp_path / "array")
  stored = manifest.Manifest(
    step=1, finite=True, config={}, extra={}, leaves={}, files={"array": {"size": 0, "xxh3_128": ""}}, versions={}
  )
  with pytest.raises(manifest.DamageError, match="not a regular file"):
    manifest.check_hashes(tmp_path, stored)
