"""Tests maxtext_like/checkpoint/store/manager.py: complete saves, max_to_keep, refusals, failures with back-off, restores."""

import json
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtext_like.checkpoint.store import manifest, stored_state
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.errors import RetryableError, UserError

CONFIG = {"model": {"model_name": "a", "num_query_heads": 3, "emb_dim": 7}, "training": {"opt_type": "adamw"}}


def make_state(seed=0, dtype=jnp.float32):
  """Return a state with all kinds of nodes of real states: nested dicts, optax namedtuples, masked leaves, None, scalars."""
  params = {
    "embedding": {"table": jax.random.normal(jax.random.key(seed), (11, 7), dtype)},
    "stack_0": {"layer_0": {"o": jnp.ones((2, 3, 5), jnp.bfloat16), "layer_scalar": jnp.ones((2,))}},
  }
  mask = {"embedding": {"table": True}, "stack_0": {"layer_0": {"o": True, "layer_scalar": False}}}
  optimizer = optax.masked(optax.adamw(1e-3), mask)
  return {"step": jnp.int32(seed), "params": params, "opt_state": optimizer.init(params), "loss_scale": None}


def abstract(state):
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def assert_same(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for (path, left), right in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
    assert left.dtype == right.dtype, path
    assert np.asarray(left).tobytes() == np.asarray(right).tobytes(), path


def test_save_and_restore_are_bitwise(tmp_path):
  state = make_state(5)
  with CheckpointManager(tmp_path / "has space é", config=CONFIG) as manager:
    assert manager.latest_complete() is None
    assert manager.restore(abstract(state)) is None
    assert manager.save(5, state, {"data": {"next_index": 17}})
    assert manager.wait()
    assert manager.latest_complete() == 5
  with CheckpointManager(tmp_path / "has space é", config=CONFIG) as manager:
    restored = manager.restore(abstract(state))
    assert restored is not None
    assert (restored.step, restored.extra, restored.config) == (5, {"data": {"next_index": 17}}, CONFIG)
    assert_same(restored.state, state)
    stored = manifest.read(restored.directory)
  assert stored.finite
  assert stored.versions["orbax-checkpoint"]
  assert "opt_state.inner_state.0.mu.embedding.table" in stored.leaves
  assert stored.leaves["params.stack_0.layer_0.o"] == {"shape": [2, 3, 5], "dtype": "bfloat16"}
  assert all(len(file["xxh3_128"]) == 32 for file in stored.files.values())


def test_donated_arrays_are_saved_as_they_were(tmp_path):
  step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
  make = jax.jit(lambda: {"big": jnp.zeros((1 << 20,)), "small": jnp.zeros((3,)), "scalar": jnp.float32(0)})
  jax.block_until_ready(step(make()))
  state = make()
  with CheckpointManager(tmp_path) as manager:
    assert manager.save(1, state)
    for _ in range(5):
      state = step(state)
    jax.block_until_ready(state)
    restored = (manager.wait(), manager.restore(abstract(state)))[1]
  assert restored is not None
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(restored.state))


def test_keeps_the_newest(tmp_path):
  state = {"x": jnp.arange(3.0)}
  with CheckpointManager(tmp_path, max_to_keep=2, asynchronous=False) as manager:
    for step in (9, 10, 100):  # sorted as numbers, not as names
      assert manager.save(step, state)
    assert manager.complete_steps() == [10, 100]
    assert manager.save(100, state)  # already saved, so nothing is written
    assert manager.statistics.saved == 3
  assert sorted(entry.name for entry in tmp_path.iterdir()) == ["10", "100"]


def test_a_state_that_is_not_finite_is_never_saved(tmp_path, caplog):
  state = {"x": jnp.arange(3.0)}
  with CheckpointManager(tmp_path, max_to_keep=1) as manager:
    assert manager.save_and_wait(1, state)
    assert not manager.save(2, {"x": state["x"] * jnp.nan}, finite=jnp.array(False))
    assert not manager.save_and_wait(3, {"x": state["x"] * jnp.nan}, finite=False)
    assert manager.complete_steps() == [1]
    assert manager.statistics.refused_nonfinite == 2
  assert "checkpoint of step 2 refused: the state is not finite; step 1 is kept" in caplog.text


def test_a_save_during_a_save_is_skipped_and_counted(tmp_path, caplog, monkeypatch):
  original, looked = manifest.hash_files, threading.Event()
  monkeypatch.setattr(manifest, "hash_files", lambda path: (looked.wait(60), original(path))[1])
  with CheckpointManager(tmp_path, patience_seconds=0.1) as manager:
    assert manager.save(1, {"x": jnp.arange(3.0)})
    assert manager.busy
    assert not manager.save(2, {"x": jnp.arange(3.0)})
    assert manager.statistics.skipped_busy == 1
    looked.set()
    assert manager.save_and_wait(3, {"x": jnp.arange(3.0)})
    assert manager.complete_steps() == [1, 3]
  assert "checkpoint of step 2 skipped: step 1 is still being written (1 skipped so far)" in caplog.text


def test_failures_surface_in_poll_and_end_retryable(tmp_path, caplog, monkeypatch):
  state = {"x": jnp.arange(3.0)}
  with CheckpointManager(tmp_path, interval=10, attempts=3, backoff_seconds=60) as manager:
    assert manager.save_and_wait(10, state)

    def full(path):
      raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
      patch.setattr(manifest, "hash_files", full)
      assert manager.save(20, state)
      manager._join()
      manager.poll()
      assert "checkpoint of step 20 failed (1 of 3)" in caplog.text
      assert f"{tmp_path}/20: needs 0.00 MB, " in caplog.text
      assert "No space left on device" in caplog.text
      assert "step 10 is kept" in caplog.text
      assert "in 60 s" in caplog.text
      assert not (tmp_path / "20").exists()
      assert not manager.due(21)
      manager._retry_at = time.monotonic()
      assert manager.due(21)  # a retry is due before the next multiple of the interval
      assert manager.save(21, state)
      assert not manager.wait()
      manager._backoff_seconds = 0.01
      with pytest.raises(RetryableError, match=r"checkpoint of step 22 failed .3 of 3.*step 10 is kept"):
        manager.save_and_wait(22, state)
    assert manager.complete_steps() == [10]
    assert manager.save_and_wait(23, state)  # the disk has space again
    assert manager.complete_steps() == [10, 23]
    assert not manager.due(24)
    assert manager.due(30)


def test_the_last_save_is_tried_again(tmp_path, monkeypatch):
  original, calls = manifest.hash_files, []

  def flaky(path):
    calls.append(path)
    if len(calls) < 3:
      raise OSError(5, "Input/output error")
    return original(path)

  monkeypatch.setattr(manifest, "hash_files", flaky)
  with CheckpointManager(tmp_path, attempts=3, backoff_seconds=0.01) as manager:
    assert manager.save_and_wait(7, {"x": jnp.arange(3.0)})
    assert (manager.complete_steps(), manager.statistics.failures) == ([7], 2)


def test_closing_after_a_failed_save_is_an_error(tmp_path, monkeypatch):
  def broken(path):
    raise OSError(5, "Input/output error")

  monkeypatch.setattr(manifest, "hash_files", broken)
  manager = CheckpointManager(tmp_path)
  manager.save(1, {"x": jnp.arange(3.0)})
  with pytest.raises(RetryableError, match="Input/output error"):
    manager.close()
  with pytest.raises(KeyError, match="the first error"), CheckpointManager(tmp_path) as manager:  # noqa: PT012
    manager.save(1, {"x": jnp.arange(3.0)})
    raise KeyError("the first error")


def test_a_file_in_place_of_the_checkpoint_directory_ends_a_save(tmp_path):
  with CheckpointManager(tmp_path / "c", backoff_seconds=0.01) as manager:
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").write_text("a file in the way")
    with pytest.raises(RetryableError, match=f"checkpoint directory {tmp_path}/c: the directory was removed"):
      manager.save(1, {"x": jnp.arange(3.0)})


def test_leftovers_are_told_and_removed(tmp_path, caplog):
  """Empty directories (fault F11) and unfinished saves (fault F01) are not checkpoints and are removed. Foreign files stay."""
  (tmp_path / "100").mkdir()
  (tmp_path / "90.saving-0a1b2c3d" / "state.orbax-checkpoint-tmp" / "d").mkdir(parents=True)
  (tmp_path / "70.dropping-0a1b2c3d" / "state").mkdir(parents=True)
  (tmp_path / "80").mkdir()
  (tmp_path / "80" / "thesis.tex").write_text("mine")
  (tmp_path / "notes").mkdir()
  with CheckpointManager(tmp_path) as manager:
    assert manager.latest_complete() is None
    assert manager.restore({"x": jax.ShapeDtypeStruct((3,), jnp.float32)}) is None
  assert sorted(entry.name for entry in tmp_path.iterdir()) == ["80", "notes"]
  assert f"{tmp_path}/100 is empty and not a checkpoint" in caplog.text
  assert f"{tmp_path}/90.saving-0a1b2c3d was left by an interrupted save" in caplog.text
  assert f"{tmp_path}/70.dropping-0a1b2c3d was left by an interrupted removal" in caplog.text
  assert f"{tmp_path}/80 is not a checkpoint" in caplog.text
  assert "thesis.tex" in caplog.text


def two_steps(path, state):
  with CheckpointManager(path, config=CONFIG, asynchronous=False) as manager:
    manager.save(10, state)
    manager.save(20, state)


def largest_file(step_directory):
  return max((path for path in (step_directory / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)


def flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


DAMAGES = {
  "flipped byte": lambda step: flip(largest_file(step)),
  "truncated": lambda step: largest_file(step).write_bytes(largest_file(step).read_bytes()[:-5]),
  "emptied": lambda step: largest_file(step).write_bytes(b""),
  "deleted": lambda step: largest_file(step).unlink(),
  "_METADATA garbage": lambda step: (step / "state" / "_METADATA").write_text("garbage"),
  "_METADATA missing": lambda step: (step / "state" / "_METADATA").unlink(),
  "manifest.ocdbt garbage": lambda step: flip(step / "state" / "manifest.ocdbt"),
  "manifest.ocdbt missing": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
  "_sharding garbage": lambda step: flip(step / "state" / "_sharding"),
  "state missing": lambda step: shutil.rmtree(step / "state"),
  "own manifest flipped": lambda step: flip(step / "COMPLETE.json"),
  "own manifest garbage": lambda step: (step / "COMPLETE.json").write_bytes(b"\xff\0{"),
  "own manifest a list": lambda step: (step / "COMPLETE.json").write_text("[1]"),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
  path = tmp_path_factory.mktemp("pristine") / "checkpoints"
  state = make_state(3)
  two_steps(path, state)
  return path, state


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_falls_back_to_the_step_before(pristine, tmp_path, caplog, damage):
  """Faults F08, F09 and F10 within this process. tests/faults covers them with complete programs."""
  source, state = pristine
  path = tmp_path / "c"
  shutil.copytree(source, path)
  DAMAGES[damage](path / "20")
  with CheckpointManager(path, config=CONFIG) as manager:
    restored = manager.restore(abstract(state))
    assert restored is not None
    assert restored.step == 10
    assert_same(restored.state, state)
    assert manager.complete_steps() == [10]
    assert (path / "20.corrupt").exists()
    assert "step 20 is corrupt: file " in caplog.text
    assert "using step 10" in caplog.text
    assert manager.save_and_wait(20, state)
    assert manager.complete_steps() == [10, 20]


def test_a_step_that_was_asked_for_and_is_damaged_gives_the_one_before_it(pristine, tmp_path):
  source, state = pristine
  path = tmp_path / "c"
  shutil.copytree(source, path)
  with CheckpointManager(path, config=CONFIG) as manager:
    assert manager.save_and_wait(30, state)
    flip(largest_file(path / "20"))
    restored = manager.restore(abstract(state), step=20)
    assert restored is not None
    assert restored.step == 10
    assert (path / "20.corrupt").exists()
    assert manager.complete_steps() == [10, 30]


def test_all_steps_damaged_is_a_user_error(pristine, tmp_path):
  source, state = pristine
  path = tmp_path / "c"
  shutil.copytree(source, path)
  DAMAGES["flipped byte"](path / "20")
  DAMAGES["deleted"](path / "10")
  with CheckpointManager(path, config=CONFIG) as manager:
    with pytest.raises(UserError, match=r"no valid checkpoint is left\n  step 20 is corrupt: .*\n  step 10 is corrupt"):
      manager.restore(abstract(state))
    assert sorted(entry.name for entry in path.iterdir()) == ["10", "20"]  # nothing is renamed or removed


def changed_config(**fields):
  return {**CONFIG, "model": {**CONFIG["model"], **fields}}


def test_another_model_is_refused_even_when_all_shapes_agree(pristine):
  source, state = pristine
  other = changed_config(num_query_heads=1, model_name="b")
  refused = pytest.raises(UserError, match="another model configuration")
  with CheckpointManager(source, config=other) as manager, refused as caught:
    manager.restore(abstract(state))
  assert "(a; this run has b)" in str(caught.value)
  assert "model.num_query_heads: checkpoint 3, this run 1" in str(caught.value)
  with CheckpointManager(source, config=changed_config(model_name="renamed")) as manager:
    assert manager.restore(abstract(state)) is not None


def test_other_arrays_are_refused_with_the_list_before_any_read(pristine, monkeypatch):
  """The error lists all arrays that differ, before any file is read (fault F15)."""
  source, state = pristine
  wanted = abstract(state)
  wanted["params"]["embedding"]["table"] = jax.ShapeDtypeStruct((13, 7), jnp.float32)
  wanted["params"]["new"] = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
  del wanted["params"]["stack_0"]
  monkeypatch.setattr(manifest, "hash_file", lambda *_, **__: pytest.fail("a file was read"))
  with CheckpointManager(source, config=CONFIG) as manager, pytest.raises(UserError) as caught:
    manager.restore(wanted)
  message = str(caught.value)
  assert "missing in the checkpoint:\n    params.new.w" in message
  assert "only in the checkpoint:\n    params.stack_0.layer_0.layer_scalar\n    params.stack_0.layer_0.o" in message
  assert "params.embedding.table: checkpoint (11, 7), this run (13, 7)" in message


def test_dtype_changes_are_refused_then_cast_with_a_range_check(tmp_path):
  """A cast needs allow_dtype_change, and values that do not fit the new dtype are an error (fault F13)."""
  state = {"w": jnp.array([1.0, 3.0, 70000.0]), "n": jnp.int32(3)}
  with CheckpointManager(tmp_path, config=CONFIG) as manager:
    assert manager.save_and_wait(1, state)
    half = {"w": jax.ShapeDtypeStruct((3,), jnp.float16), "n": jax.ShapeDtypeStruct((), jnp.int32)}
    with pytest.raises(UserError, match=r"float32 in the checkpoint, float16 in this run: w\n.*\n.*allow_dtype_change=true"):
      manager.restore(half)
    with pytest.raises(UserError, match="w holds 70000, which does not fit float16"):
      manager.restore(half, allow_dtype_change=True)
    brain = {**half, "w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
    restored = manager.restore(brain, allow_dtype_change=True)
    assert restored is not None
    np.testing.assert_array_equal(restored.state["w"], state["w"].astype(jnp.bfloat16))
    byte = {**half, "w": jax.ShapeDtypeStruct((3,), jnp.int8)}
    with pytest.raises(UserError, match=r"float32 in the checkpoint, int8 in this run: w\n.*never cast"):
      manager.restore(byte, allow_dtype_change=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_come_back_into_the_hosts_memory(tmp_path, dtype):
  """Arrays in host memory are saved, and restored to host memory, in the same dtype and cast."""
  place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
  state = {"w": jax.device_put(jnp.array([1.0, 3.0, 0.1]), place)}
  with CheckpointManager(tmp_path, config=CONFIG) as manager:
    assert manager.save_and_wait(1, state)
    restored = manager.restore({"w": jax.ShapeDtypeStruct((3,), dtype, sharding=place)}, allow_dtype_change=True)
  assert restored is not None
  found = restored.state["w"]
  assert found.sharding == place
  assert found.dtype == dtype
  np.testing.assert_array_equal(np.asarray(found), np.array([1.0, 3.0, 0.1], np.float32).astype(dtype))


def test_a_part_of_a_state_from_another_run(pristine):
  source, state = pristine
  part = {"params": abstract(state)["params"]}
  loaded = stored_state.load(source / "20", part, config=CONFIG)
  assert_same(loaded.state, {"params": state["params"]})
  with pytest.raises(UserError, match=r"not a complete checkpoint: file .*COMPLETE.json is missing"):
    stored_state.load(source / "30", part)


def test_a_relative_path_is_read(pristine, monkeypatch):
  source, state = pristine
  monkeypatch.chdir(source)
  loaded = stored_state.load(Path("20"), abstract({"params": state["params"]}), config=CONFIG)
  assert_same(loaded.state, {"params": state["params"]})


def test_a_newer_schema_is_refused(pristine, tmp_path):
  """The error names the version that wrote the checkpoint (fault F17)."""
  source, state = pristine
  path = tmp_path / "c"
  shutil.copytree(source, path)
  fields = json.loads((path / "20" / "COMPLETE.json").read_text())
  del fields["xxh3_128"]
  fields = {**fields, "schema": 2, "versions": {"maxtext_like": "9.1"}, "new_field": 1}
  (path / "20" / "COMPLETE.json").write_text(json.dumps({**fields, "xxh3_128": manifest._digest(fields)}))
  with (
    CheckpointManager(path, config=CONFIG) as manager,
    pytest.raises(UserError, match=r"9.1 with checkpoint schema 2"),
  ):
    manager.restore(abstract(state))


def test_preflight(tmp_path, caplog, monkeypatch):
  """Too little free space for one checkpoint is an error, and too little for all that are kept is a warning (fault F06)."""
  free = 0
  monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, free))
  state = {"x": jax.ShapeDtypeStruct((250_000,), jnp.float32)}
  with CheckpointManager(tmp_path, max_to_keep=3) as manager:
    free = 900_000
    with pytest.raises(UserError, match=r"a checkpoint needs 1.00 MB, 0.90 MB are free"):
      manager.preflight(state)
    free = 3_900_000
    manager.preflight(state)
    assert "keeping 3 checkpoints of 1.00 MB needs 4.00 MB more, 3.90 MB are free" in caplog.text
    caplog.clear()
    free = 4_000_000
    manager.preflight(state)
    assert not caplog.records


def test_a_save_that_cannot_fit_is_not_started(tmp_path, caplog, monkeypatch):
  state = {"x": jnp.zeros((250_000,))}
  with CheckpointManager(tmp_path, backoff_seconds=0.01) as manager:
    assert manager.save_and_wait(1, state)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 900_000))
    assert not manager.save(2, state)
    assert "step 2 failed (1 of 3)" in caplog.text
    assert "needs 1.00 MB, 0.90 MB free: not started: " in caplog.text
    assert "step 1 is kept" in caplog.text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))  # a file system that reports no size
    assert manager.save_and_wait(3, state)


def test_bad_arguments_and_states(tmp_path):
  with pytest.raises(ValueError, match="max_to_keep is 0"):
    CheckpointManager(tmp_path, max_to_keep=0)
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=f"{tmp_path / 'file'}(?s:.*)output_dir"):
    CheckpointManager(tmp_path / "file")
  with CheckpointManager(tmp_path / "c") as manager:
    with pytest.raises(ValueError, match="JSON values"):
      manager.save(1, {"x": jnp.arange(3)}, {"bad": object()})
    with pytest.raises(ValueError, match="x is a int, not"):
      manager.save(1, {"x": 3})
    with pytest.raises(ValueError, match="x is a typed random key"):
      manager.save(1, {"x": jax.random.key(0)})
    with pytest.raises(UserError, match="there is no step 4"):
      manager.restore({"x": jax.ShapeDtypeStruct((), jnp.int32)}, step=4)
  with pytest.raises(ValueError, match=r"two leaves .*'a\.b'"):
    stored_state.flatten({"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
