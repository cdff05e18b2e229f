"""Messages between processes, with a store in memory instead of JAX's."""

import json
import threading
import time

import pytest

from maxtext_like.errors import ExitError, RetryableError, UserError
from maxtext_like.sharding import processes
from maxtext_like.sharding.processes import Heartbeat

OTHERS = "meeting-0", "meeting-1"


class Store:
  """A key-value store in memory. If ``silent`` is set, it does not answer, as in a frozen process. The other process's
  heartbeat changes at every look."""

  def __init__(self):
    self.values, self.silent, self.looks, self.other_lives = {}, threading.Event(), 0, True

  def key_value_set(self, key, value, *, allow_overwrite):
    if self.silent.is_set():
      time.sleep(3600)
    self.values[key] = value

  def key_value_dir_get(self, prefix):
    self.looks += 1
    if self.other_lives and "beat" in prefix:
      self.values["maxtext_like/beat/0"] = str(self.looks)
    return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

  def blocking_key_value_get(self, key, milliseconds):
    return self.values[key]

  def wait_at_barrier(self, name, milliseconds):
    pass


@pytest.fixture
def store(monkeypatch):
  """Make this process number 1 of 2."""
  store = Store()
  monkeypatch.setattr(processes, "_joined", processes._Joined(1, ("here", "there"), store))
  return store


@pytest.fixture
def heartbeat(store):
  told = []
  heartbeat = Heartbeat(1.0, lambda *what: told.append(what))
  thread = threading.Thread(target=heartbeat._run, daemon=True)
  thread.start()
  yield heartbeat, told
  heartbeat._stop.set()
  thread.join(5)


def wait_for(what):
  deadline = time.monotonic() + 60
  while not what():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def wait_longer_than_the_limit(store):
  """Wait for six periods, each a fifth of the limit. The store is read twice in each."""
  before = store.looks
  wait_for(lambda: store.looks >= before + 12)


def ends(store, code):
  store.values["maxtext_like/ended/0"] = json.dumps([code, "its disk is full"])


def test_one_of_which_nothing_is_heard_is_lost(heartbeat, store):
  _, told = heartbeat
  wait_longer_than_the_limit(store)
  assert not told
  store.other_lives = False
  wait_for(lambda: told)
  ((message, code),) = told
  assert message.startswith("process 0 (host here) is lost: ")
  assert "for 1 s" in message
  assert code == 42


def test_a_frozen_store_is_noticed(heartbeat, store):
  _, told = heartbeat
  store.silent.set()
  wait_for(lambda: told)
  ((message, code),) = told
  assert message.startswith("process 0 (host here)")
  assert "coordinator" in message
  assert "did not answer for 1 s" in message
  assert code == 42


def test_one_that_ends_badly_ends_this_one_with_its_code(heartbeat, store):
  _, told = heartbeat
  ends(store, 2)
  wait_for(lambda: told)
  assert told == [("process 0 (host here) ended: its disk is full", 2)]


@pytest.mark.parametrize(("code", "leaves"), [(0, False), (42, True)])
def test_one_that_is_done_does_not_end_the_last_writes_of_this_one(heartbeat, store, code, leaves):
  beats, told = heartbeat
  if leaves:
    beats.leave()
  store.other_lives = False
  ends(store, code)
  if leaves:
    assert beats._verdict.wait(60)
  else:
    wait_longer_than_the_limit(store)
  assert not told


def test_meetings_leave_little_behind(store):
  for number in range(10):
    for name in OTHERS:
      store.values[f"maxtext_like/{name}/0"] = f"other {number}"
    assert processes.everyone(f"mine {number}", 1) == [f"other {number}", f"mine {number}"]
  assert len(store.values) == 4


def test_what_one_fails_at_nobody_goes_on_waiting_in(store):
  assert processes.together(lambda: 3, "work-1") == 3
  with pytest.raises(OSError, match="no room"):
    processes.together(lambda: (_ for _ in ()).throw(OSError("no room")), "work-2")
  assert store.values["maxtext_like/work-2/1"] == "no room"
  store.values["maxtext_like/work-3/0"] = "its disk is full"
  with pytest.raises(RetryableError, match=r"process 0 \(host here\): its disk is full"):
    processes.together(lambda: time.sleep(3600), "work-3")


@pytest.mark.parametrize(
  ("error", "kind", "code", "said"),
  [
    (OSError(28, "No space left on device"), ExitError, 1, "process 0 (host here) failed: OSError: [Errno 28] No space left"),
    (UserError("no such file"), UserError, 2, "no such file"),
  ],
)
def test_any_error_of_the_first_is_the_error_of_all(monkeypatch, store, error, kind, code, said):
  def fail():
    raise error

  monkeypatch.setattr(processes, "_joined", processes._Joined(0, ("here", "there"), store))
  with pytest.raises(type(error)):
    processes.from_primary(fail, 1)
  (told,) = store.values.values()
  monkeypatch.setattr(processes, "_joined", processes._Joined(1, ("here", "there"), store))
  monkeypatch.setattr(store, "blocking_key_value_get", lambda *_: told)
  with pytest.raises(kind, match=said.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[")) as raised:
    processes.from_primary(fail, 1)
  assert raised.value.exit_code == code


def test_what_differs_between_hosts_is_refused(store):
  for name in OTHERS:
    store.values[f"maxtext_like/{name}/0"] = json.dumps({"train data": {"files": "a1", "split": "train"}})
  processes.require_same({"train data": {"files": "a1", "split": "train"}}, 1)
  with pytest.raises(UserError, match=r"train data of process 1 \(host there\) differ .*: files\n  fix: "):
    processes.require_same({"train data": {"files": "b2", "split": "train"}}, 1)


def test_one_of_several_cannot_join_again(store):
  variables = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
  with pytest.raises(UserError, match=r"(?s)process 1 \(host there\) of a run, and JAX can join only once.*fix: "):
    processes.join({}, 1, variables)
