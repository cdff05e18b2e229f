"""Tests checkpoints in emulated gs:// and s3:// (remote_steps.py and the manager): a step is complete or does not exist."""

import asyncio
import itertools
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.manager import CheckpointManager
from maxtext_like.checkpoint.store.remote_steps import RemoteSteps
from maxtext_like.checkpoint.weight_sources import find_step, local_directory, readable_step
from maxtext_like.errors import RefusedCredentialsError, RetryableError, UserError
from maxtext_like.local_copies import FOLDER_VARIABLE
from maxtext_like.sharding import processes
from maxtext_like.storage import Place
from tests.gcs_emulator import BUCKET
from tests.s3_emulator import store_of
from tests.tiers import slow

NUMBERS = itertools.count()
CHECKSUMS = {"gs": ("crc32c", "md5"), "s3": ("etag",)}
ARRAYS = {"gs": "/state/_METADATA", "s3": "/state/x/c/"}
LIKE = {"x": jax.ShapeDtypeStruct((7, 3), jnp.float32), "deep": {"y": jax.ShapeDtypeStruct((5,), jnp.bfloat16)}}


def state(step):
  return {"x": jnp.arange(21.0).reshape(7, 3) * step, "deep": {"y": jnp.arange(5, dtype=jnp.bfloat16) + step}}


@pytest.fixture(params=["gs", slow("s3")])
def steps(request, monkeypatch):
  """Return an empty place for a run's steps. Clients retry without a delay."""
  store_of(request.param)

  async def at_once(_):
    return

  monkeypatch.setattr("gcsfs.retry.asyncio", types.SimpleNamespace(sleep=at_once, TimeoutError=asyncio.TimeoutError))
  return Place(f"{request.param}://{BUCKET}/runs/{next(NUMBERS)}/checkpoints")


def save(place, *numbers, **keys):
  config, tokenizer = {"model": {"a": 1}}, {"tokenizer.json": b"{}"}
  with CheckpointManager(place, config=config, backoff_seconds=0.01, tokenizer=tokenizer, **keys) as manager:
    for number in numbers:
      manager.save_and_wait(number, state(number), {"data": number})


def restored(place):
  with CheckpointManager(place, config={"model": {"a": 1}}) as manager:
    found = manager.restore(LIKE)
  if found is None:
    return None
  jax.tree.map(np.testing.assert_array_equal, found.state, state(found.step))
  assert found.extra == {"data": found.step}
  return found.step


def names(place, step):
  return store_of(place).names("/".join([*place.parts[1:], str(step), ""]))


@pytest.mark.parametrize("steps", ["gs", "s3"], indirect=True)
def test_steps_are_saved_kept_and_come_back(steps, monkeypatch, tmp_path):
  assert restored(steps) is None
  save(steps, 10, 20, 30, max_to_keep=2)
  assert RemoteSteps(steps).complete() == [20, 30]
  assert not names(steps, 10)
  assert restored(steps) == 30
  stored = manifest.read(steps / "30")
  assert set(stored.files["tokenizer/tokenizer.json"]) == {"size", *CHECKSUMS[steps.protocol]}
  assert find_step(steps.parent) == steps / "30" == readable_step(steps / "30")
  monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
  copied = local_directory(str(steps))
  manifest.check_hashes(copied, manifest.read(copied))
  (copied / stored.folder / "tokenizer" / "tokenizer.json").write_bytes(b"[]" if steps.protocol == "gs" else b"[")
  with pytest.raises(manifest.DamageError, match=r"has changed since it was written|has 1 bytes, but 2 were"):
    manifest.check_hashes(copied, manifest.read(copied))


@pytest.mark.parametrize("damage", ["other bytes", "gone", "shorter", "manifest"])
@pytest.mark.slow
def test_a_damaged_step_is_set_aside_and_the_one_before_it_used(steps, caplog, damage):
  save(steps, 10, 20)
  store = store_of(steps)
  name = next(n for n in names(steps, 20) if ("COMPLETE" if damage == "manifest" else ARRAYS[steps.protocol]) in n)
  content = store.read(name)
  if damage == "gone":
    store.remove(name)
  else:
    store.write(name, content[:-1] if damage == "shorter" else content[:-1] + b"~")
  assert restored(steps) == 10
  assert "step 20 is corrupt" in caplog.text
  assert "CORRUPT.json" in [n.rpartition("/")[2] for n in names(steps, 20)]
  assert RemoteSteps(steps).complete() == [10]
  save(steps, 20)  # the step is trained again
  assert restored(steps) == 20
  save(steps, 30)
  assert "CORRUPT.json" not in [n.rpartition("/")[2] for n in names(steps, 20)]


def test_what_has_no_manifest_does_not_count_and_goes(steps, caplog):
  save(steps, 10, 20)
  store = store_of(steps)
  store.remove(next(n for n in names(steps, 20) if n.endswith("COMPLETE.json")))  # as after a kill during the save
  store.write("/".join([*steps.parts[1:], "10", "0123abcd.5", "state", "x"]), b"of a process that lost the run")
  store.write("/".join([*steps.parts[1:], "notes", "x"]), b"a person's")
  assert restored(steps) == 10
  assert not names(steps, 20)
  assert not [n for n in names(steps, 10) if "0123abcd" in n]
  assert names(steps, "notes")
  assert "20: leftovers of an interrupted save" in caplog.text


def test_another_step_under_a_name_is_refused(steps):
  save(steps, 10)
  for name in names(steps, 10):
    store_of(steps).write(name.replace("/checkpoints/10/", "/checkpoints/99/"), store_of(steps).read(name))
  with pytest.raises(UserError, match="99 holds step 10"):
    restored(steps)


@pytest.mark.slow
def test_steps_that_the_run_went_back_past_do_not_count(steps):
  with CheckpointManager(steps, config={"model": {"a": 1}}, max_to_keep=1) as manager:
    for number in (10, 20):
      manager.save_and_wait(number, state(number), {"data": number})
    manager.abandon_after(15)
    assert manager.complete_steps() == []
    assert RemoteSteps(steps).abandoned() == {20}
    manager.save_and_wait(20, state(20), {"data": 20})
    assert RemoteSteps(steps).abandoned() == set()
  assert restored(steps) == 20


@pytest.mark.parametrize("wrong", ["lost", slow("503")])
def test_a_store_that_fails_now_and_then_is_asked_again(steps, wrong):
  """Some writes fail, or succeed without an answer, the first one of the manifest among them. No incomplete step remains."""
  count, published = itertools.count(), itertools.count()

  def fault(method, path, query):
    name = query.get("name", "")
    if method not in ("POST", "PUT") or not name or (wrong == "lost" and "/state/" in name):
      return None  # orbax would abort the save, see tests/faults/test_remote.py
    if name.endswith("COMPLETE.json"):
      return wrong if next(published) == 0 else None
    return wrong if next(count) in (1, 4) else None

  with store_of(steps).failing(fault):
    save(steps, 10)
  assert next(published) == 2  # one retry
  assert restored(steps) == 10


@pytest.mark.slow
def test_a_manifest_that_cannot_be_written_makes_no_step(steps, caplog):
  """The failure is reported and the save is retried. After too many failures the run ends. Earlier steps stay complete."""
  save(steps, 10)
  refused = lambda m, path, q: "503" if q.get("name", "").endswith("20/COMPLETE.json") else None
  with store_of(steps).failing(refused), caplog.at_level(logging.ERROR), pytest.raises(RetryableError) as ended:
    save(steps, 20, attempts=2)
  assert "step 20 failed (1 of 2)" in caplog.text
  assert "storage failed" in str(ended.value)
  assert "step 10 is kept" in str(ended.value)
  assert restored(steps) == 10
  assert not names(steps, 20)
  answers = iter([None, "503", "503", "503", "503", "503", "503"])  # all attempts of one save fail, the next save works
  with store_of(steps).failing(lambda m, path, q: next(answers, None) if q.get("name", "").endswith("COMPLETE.json") else None):
    save(steps, 20, attempts=2)
  assert restored(steps) == 20


@pytest.mark.parametrize(
  ("steps", "part", "answer", "told"),
  [
    ("gs", "/20/", (401, "", "Invalid Credentials"), "credentials refused or expired: Invalid Credentials"),
    ("gs", "20/COMPLETE.json", (403, "", "may not write"), "permission denied: may not write"),
    slow("s3", "/20/", (400, "ExpiredToken", "It expired."), "credentials refused or expired: ExpiredToken: It expired"),
    slow("s3", "20/COMPLETE.json", (403, "AccessDenied", "No"), "permission denied: AccessDenied: No"),
  ],
  indirect=["steps"],
)
def test_refused_credentials_end_the_run_at_once(steps, part, answer, told, caplog):
  """A new process reads the credentials again, so the run ends with 42; a start that is refused ends with 2."""
  store, refused = store_of(steps), []

  def refuse(method, path, query):
    if part in f"{path} {query.get('name', '')}" and method in ("PUT", "POST"):
      refused.append(path)
      return answer
    return None

  save(steps, 10)
  with store.failing(refuse), pytest.raises(RefusedCredentialsError) as ended:
    save(steps, 20)
  assert ended.value.exit_code == 42
  expected = (
    rf"{steps}/20: the checkpoint cannot be saved: {told}[^\n]*; step 10 is kept\n  fix: renew the credentials \([^\n]*\n?"
  )
  assert re.fullmatch(expected, str(ended.value))
  assert not [word for word in ("zarr", "http", "[", "MB") if word in str(ended.value)]
  assert not [r for r in caplog.records if not r.name.startswith("google.auth")]  # this machine has no metadata server
  assert len(refused) <= 4  # the arrays are written at the same time
  with (
    store.failing(lambda *_: answer),
    pytest.raises(UserError, match=r"fix: renew the credentials .*that may read and write"),
  ):
    restored(steps)
  only_arrays = lambda method, path, query: answer if method == "GET" and any(a in path for a in ("/c/", "/d/")) else None
  with store.failing(only_arrays), pytest.raises(UserError, match=f"{steps}/10/.*: (permission denied|credentials refused)"):
    restored(steps)
  assert restored(steps) == 10


def test_all_processes_end_if_the_credentials_of_one_are_refused(steps, monkeypatch):
  said = "refused: credentials refused or expired: ExpiredToken"
  monkeypatch.setattr(processes, "everyone", lambda value, *_: [value, said])
  monkeypatch.setattr(processes, "name_of", lambda number: f"process {number}")
  with pytest.raises(RefusedCredentialsError, match="cannot be saved: process 1: credentials refused or expired: ExpiredToken"):
    save(steps, 10)


def test_an_outage_is_no_damage(steps):
  save(steps, 10)
  with store_of(steps).failing(lambda *_: "503"), pytest.raises(RetryableError, match="storage failed"):
    restored(steps)
  assert restored(steps) == 10
