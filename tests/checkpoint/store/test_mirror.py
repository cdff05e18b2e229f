"""Tests maxtext_like/checkpoint/store/mirror.py: copies count only when verified, faults end no run, steps are restored."""

import json
import shutil
import sys
import time

import fsspec
import jax
import jax.numpy as jnp
import pytest
from fsspec.registry import _registry

from maxtext_like import storage
from maxtext_like.checkpoint.store import manifest, mirror
from maxtext_like.checkpoint.store.best_steps import recorded_best
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.mirror import Mirror
from maxtext_like.checkpoint.store.steps import StepDirectories
from maxtext_like.checkpoint.weight_sources import find_step
from maxtext_like.errors import RetryableError, UserError

STATE = {"x": jnp.arange(7.0)}
LIKE = {"x": jax.ShapeDtypeStruct((7,), jnp.float32)}


@pytest.fixture(params=["path", "memory"])
def place(request, tmp_path):
  """Yield the place of a mirror on a disk, and of one in an object store."""
  yield str(tmp_path / "m" / "irror") if request.param == "path" else "memory://bucket/runs"
  fsspec.filesystem("memory").store.clear()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(mirror, "_FIRST_RETRY_SECONDS", 0.01)


def save(own, place, *steps, keep=2, wait=60.0, best=None):
  made = Mirror(place, "run", own, keep)
  with CheckpointManager(own, mirror=made, mirror_seconds=wait, max_to_keep=keep, config={"model": {}}) as manager:
    for step in steps:
      manager.save_and_wait(step, STATE, best=best)
      deadline = time.monotonic() + wait
      while made.needed and time.monotonic() < deadline:
        time.sleep(0.005)
  return made


def files_of(place):
  files, root = fsspec.core.url_to_fs(place)
  root = root.rstrip("/") + "/run/checkpoints/"
  return {path[path.index(root) + len(root) :] for path in files.find(root)}


def test_every_whole_step_is_copied_and_the_oldest_are_dropped(place, tmp_path):
  own = tmp_path / "own"
  there = save(own, place, 10, 20, 30)
  assert sorted(there.steps()) == [20, 30]
  expected = {str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()}
  assert files_of(place) == expected
  assert there.steps()[30] == manifest.read(own / "30")


def test_a_lost_run_comes_back(place, tmp_path):
  own = tmp_path / "own"
  save(own, place, 10, 20)
  shutil.rmtree(own)
  made = Mirror(place, "run", own, 2)
  assert made.bring_back(StepDirectories(own), resume=True) == 20
  with CheckpointManager(own, config={"model": {}}) as manager:
    restored = manager.restore(LIKE)
    assert restored is not None
    assert (restored.step, restored.state["x"].tolist()) == (20, STATE["x"].tolist())
    assert manager._run == made.steps()[20].run  # the run keeps its identity
  assert made.bring_back(StepDirectories(own), resume=True) is None
  assert sorted(entry.name for entry in own.iterdir()) == ["20"]


def test_the_best_is_kept_and_named_there_and_comes_back(place, tmp_path):
  own, best = tmp_path / "own", (20, 0.5)
  save(own, place, 10, keep=1, best=(10, 1.0))
  made = save(own, place, 20, 30, 40, keep=1, best=best)
  assert sorted(made.steps()) == StepDirectories(own).complete() == [20, 40]
  assert json.loads(made._files.cat_file(f"{made._root}/best.json")) == {"step": 20, "eval_loss": 0.5}
  if made._local:  # all commands accept the mirror as a run
    assert find_step(tmp_path / "m/irror/run/checkpoints/best") == tmp_path / "m/irror/run/checkpoints/20"
  shutil.rmtree(own)
  assert made.bring_back(StepDirectories(own), resume=True) == 40
  assert find_step(own / "best") == own / "20"
  assert sorted(save(own, place, 50, keep=1, best=best).steps()) == StepDirectories(own).complete() == [20, 50]
  assert sorted(save(own, place, 60, keep=1, best=(60, 0.25)).steps()) == [60]


def test_a_best_that_was_passed_over_or_lost_its_files_there(place, tmp_path, caplog):
  own, best = tmp_path / "own", (20, 0.5)
  with CheckpointManager(own, max_to_keep=1, config={"model": {}}) as manager:
    for step in (20, 30):
      manager.save_and_wait(step, STATE, best=best)
  assert sorted(save(own, place, keep=1).steps()) == [20, 30]  # the best step is copied too
  shutil.rmtree(own)
  flip(place, 20)
  assert Mirror(place, "run", own, 1).bring_back(StepDirectories(own), resume=True) == 30
  assert "step 20 is damaged" in caplog.text
  assert StepDirectories(own).complete() == [30]
  assert recorded_best(own) is None


def test_bringing_back_goes_on_from_a_killed_one_and_not_through_a_link_to_nothing(tmp_path):
  own, place = tmp_path / "own", str(tmp_path / "mirror")
  save(own, place, 10)
  shutil.rmtree(own)
  (own / "10.saving-0123abcd" / "state").mkdir(parents=True)  # left by a copy that was killed
  made = Mirror(place, "run", own, 2)
  assert made.bring_back(StepDirectories(own), resume=True) == 10
  assert sorted(entry.name for entry in own.iterdir()) == ["10"]
  shutil.rmtree(own)
  own.symlink_to(tmp_path / "unmounted")
  with pytest.raises(UserError, match=r"is a link to .*/unmounted, which does not exist"):
    made.bring_back(StepDirectories(own), resume=True)


def flip(place, step):
  files, root = fsspec.core.url_to_fs(place)
  stored = files.cat_file(f"{root}/run/checkpoints/{step}/COMPLETE.json")
  name = max(json.loads(stored)["files"].items(), key=lambda item: item[1]["size"])[0]
  path = f"{root}/run/checkpoints/{step}/{name}"
  content = bytearray(files.cat_file(path))
  content[len(content) // 2] ^= 1
  files.pipe_file(path, bytes(content))


def test_a_damaged_copy_is_never_taken(place, tmp_path, caplog):
  own = tmp_path / "own"
  save(own, place, 10, 20)
  shutil.rmtree(own)
  flip(place, 20)
  assert Mirror(place, "run", own, 2).bring_back(StepDirectories(own), resume=True) == 10
  assert "step 20 is damaged: " in caplog.text
  shutil.rmtree(own)
  flip(place, 10)
  with pytest.raises(UserError, match=r"none of its steps \(10, 20\) is intact"):
    Mirror(place, "run", own, 2).bring_back(StepDirectories(own), resume=True)
  assert not list(own.glob("*"))


def test_a_damaged_own_step_is_replaced(place, tmp_path, caplog):
  own = tmp_path / "own"
  made = save(own, place, 10, 20)
  largest = max((path for path in (own / "20" / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
  largest.write_bytes(bytes(largest.stat().st_size))
  with CheckpointManager(own, mirror=made, config={"model": {}}) as manager:
    restored = manager.restore(LIKE)
    assert restored is not None
    assert restored.step == 20
  assert "step 20 is corrupt: file " in caplog.text
  assert f"restored from checkpoint_mirror {place}" in caplog.text
  assert (own / "20.corrupt").exists()


def test_what_would_be_mixed_is_refused(place, tmp_path):
  save(tmp_path / "one", place, 10)
  with CheckpointManager(tmp_path / "two") as manager:
    manager.save_and_wait(5, STATE)
  there = Mirror(place, "run", tmp_path / "two", 2)
  with pytest.raises(UserError, match=r"(?s)holds step 10, and steps of different runs.*fix: "):
    there.bring_back(StepDirectories(tmp_path / "two"), resume=True)
  with pytest.raises(UserError, match="holds step 10, and resume is false"):
    there.bring_back(StepDirectories(tmp_path / "none"), resume=False)
  assert Mirror(place, "another", tmp_path / "two", 2).bring_back(StepDirectories(tmp_path / "two"), resume=True) is None


def test_faults_are_told_and_tried_again(place, tmp_path, caplog, monkeypatch):
  """Two writes fail in the middle of a step. The partial copy does not count, the run continues, and the copy is made later."""
  own, fails = tmp_path / "own", [2]
  files = fsspec.core.url_to_fs(place)[0]
  real = type(files).open

  def flaky(self, path, mode="rb", **given):
    if "w" in mode and "ocdbt" in path and fails[0]:
      fails[0] -= 1
      raise OSError(5, "Input/output error")
    return real(self, path, mode, **given)

  monkeypatch.setattr(type(files), "open", flaky)
  made = save(own, place, 10)
  assert fails == [0]
  assert caplog.text.count("step 10 is not copied yet: ") == 1
  assert "works again, step 10 is copied" in caplog.text
  assert sorted(made.steps()) == [10]
  fails[0] = 10**9
  made = save(own, place, 20, wait=0.3)
  assert sorted(made.steps()) == [10]
  assert "step 20 is not copied: " in caplog.text
  assert "20/COPYING" in files_of(place)
  fails[0] = 0
  made = save(own, place)  # the next start of the run
  assert sorted(made.steps()) == [10, 20]
  assert not any("COPYING" in name for name in files_of(place))


def test_an_unfinished_copy_that_nobody_needs_goes(place, tmp_path):
  own = tmp_path / "own"
  files, root = fsspec.core.url_to_fs(place)
  files.makedirs(f"{root}/run/checkpoints/5", exist_ok=True)
  files.pipe_file(f"{root}/run/checkpoints/5/COPYING", b"")
  files.makedirs(f"{root}/run/checkpoints/6", exist_ok=True)
  files.pipe_file(f"{root}/run/checkpoints/6/thesis.tex", b"mine")
  save(own, place, 10)
  assert {name.partition("/")[0] for name in files_of(place)} == {"6", "10"}


def test_a_place_that_does_not_answer(place, tmp_path, monkeypatch, caplog):
  own = tmp_path / "own"
  made = Mirror(place, "run", own, 2)

  def away(*_, **__):
    raise OSError(113, "No route to host")

  monkeypatch.setattr(type(made._files), "ls", away)
  with pytest.raises(RetryableError, match=r"cannot be read, and the run directory has no checkpoint: .*No route"):
    made.bring_back(StepDirectories(own), resume=True)

  def refused(*_, **__):
    raise PermissionError("not yours")

  monkeypatch.setattr(type(made._files), "ls", refused)
  with pytest.raises(UserError, match=r"cannot be read, and the run directory has no checkpoint: .*permission denied"):
    made.bring_back(StepDirectories(own), resume=True)
  with CheckpointManager(own) as manager:
    manager.save_and_wait(10, STATE)
  assert made.bring_back(StepDirectories(own), resume=True) is None
  assert "cannot be read: " in caplog.text


def test_unusable_places(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "gcsfs", None)
  monkeypatch.delitem(_registry, "gs", raising=False)  # another test may have loaded it
  with pytest.raises(UserError, match=r"gs:// needs a package that is not installed\n  fix: pip install -e '.\[gcs\]'"):
    storage.require_usable("checkpoint_mirror", "gs://bucket/runs")
  with pytest.raises(UserError, match="unknown protocol nonsense://"):
    storage.require_usable("checkpoint_mirror", "nonsense://bucket")
  with pytest.raises(UserError, match=r"(?s)checkpoint_mirror = .*run's own directory.*fix: "):
    Mirror(str(tmp_path), "run", tmp_path / "run" / "checkpoints", 2)


def test_steps_that_the_run_went_back_past_go_and_never_come_back(place, tmp_path, caplog):
  own = tmp_path / "own"
  save(own, place, 5, 7, keep=3)
  made = Mirror(place, "run", own, 3)
  with CheckpointManager(own, mirror=made, max_to_keep=3, config={"model": {}}) as manager:
    manager.abandon_after(5)
    assert manager.complete_steps() == [5]
    manager.save_and_wait(10, STATE)
  assert f"{own}/7: the run went back to step 5" in caplog.text
  assert "7.abandoned" in caplog.text
  assert sorted(made.steps()) == [5, 10]
  save(own, place, 7, keep=3)  # step 7 exists again, so the abandoned one is removed
  assert not (own / "7.abandoned").exists()


def test_a_kill_before_the_mirror_forgot_brings_nothing_back(place, tmp_path, monkeypatch):
  own = tmp_path / "own"
  made = save(own, place, 5, 7)
  StepDirectories(own).abandon_after(5)
  assert sorted(made.steps()) == [5, 7]
  assert made.bring_back(StepDirectories(own), resume=True) is None
  shutil.rmtree(own / "5")
  assert made.bring_back(StepDirectories(own), resume=True) == 5
  monkeypatch.setattr(made, "_remove_after", lambda *_: (_ for _ in ()).throw(OSError(113, "No route to host")))
  with CheckpointManager(own, mirror=made, mirror_seconds=60, max_to_keep=2, config={"model": {}}) as manager:
    made.forget(5, manager._run)
  assert made.bring_back(StepDirectories(own), resume=True) is None
