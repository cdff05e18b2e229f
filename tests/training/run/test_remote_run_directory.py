"""Remote run directories on emulated stores: the lock, files that are copied in the background, and stores that fail."""

import itertools
import json
import threading
import time

import pytest

from maxtext_like.errors import RefusedCredentialsError, RetryableError, UserError
from maxtext_like.local_copies import FOLDER_VARIABLE
from maxtext_like.storage import Place
from maxtext_like.training.run import remote_run_directory, run_directory
from maxtext_like.training.run.remote_run_directory import RemoteLock, RemoteRunDirectory
from tests.gcs_emulator import BUCKET
from tests.s3_emulator import store_of
from tests.tiers import slow

NUMBERS = itertools.count()


@pytest.fixture(params=["gs", slow("s3")])
def place(request, monkeypatch, tmp_path):
  """An empty folder for runs in a store. The local copies of this machine are in ``tmp_path / "copies"``."""
  store_of(request.param)
  monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "copies"))
  monkeypatch.setattr(remote_run_directory, "BEAT_SECONDS", 0.05)
  monkeypatch.setattr(remote_run_directory, "WATCH_SECONDS", 2.0)
  monkeypatch.setattr(remote_run_directory, "_COPY_SECONDS", 0.05)
  return Place(f"{request.param}://{BUCKET}/of-runs/{next(NUMBERS)}")


def wait_for(what):
  deadline = time.monotonic() + 60
  while not what():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def content(place):
  return store_of(place).read("/".join(place.parts[1:]))


def there(place):
  return store_of(place).names("/".join([*place.parts[1:], ""]))


def elsewhere(token="other"):
  return {
    "host": "elsewhere",
    "boot": "b",
    "pid_namespace": "p",
    "pid": 7,
    "started": "then",
    "command": "train",
    "token": token,
  }


@pytest.mark.parametrize("place", ["gs", "s3"], indirect=True)
def test_files_follow_and_are_what_the_next_start_begins_with(place, monkeypatch, tmp_path):
  with RemoteRunDirectory(str(place), "run") as directory:
    assert directory.shown == directory.url == f"{place}/run"
    (directory.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st')
    directory.write_text("config.yml", "a: 1\n")
    wait_for(lambda: len(there(place / "run")) == 3)
    assert content(place / "run" / "metrics.jsonl") == b'{"step": 1}\n'
    (directory.path / "profile").mkdir()
    (directory.path / "profile" / "state").write_bytes(b"large")
    (directory.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n')
  assert content(place / "run" / "metrics.jsonl").count(b"\n") == 2  # the last lines are copied on exit
  assert [name.rpartition("/")[2] for name in there(place / "run")] == ["config.yml", "metrics.jsonl"]
  monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "another machine" / "copies"))
  store_of(place).remove("/".join((place / "run" / "config.yml").parts[1:]))
  with RemoteRunDirectory(str(place), "run") as directory:
    assert sorted(path.name for path in directory.path.glob("[!r]*")) == ["metrics.jsonl"]
    assert (directory.path / "metrics.jsonl").read_text().count("\n") == 2


def test_the_run_of_a_holder_elsewhere_is_refused_while_it_lives_and_taken_over_when_not(place, caplog):
  lost = []
  lock = RemoteLock(place / "run" / "run.lock", elsewhere(), lambda holder: None, lost.append)
  assert lock.acquire() is None
  with pytest.raises(UserError, match="in use by process 7 on elsewhere"), RemoteRunDirectory(str(place), "run"):
    pass
  assert there(place / "run") == ["/".join((place / "run" / "run.lock").parts[1:])]  # nothing else was written
  lock._stop.set()  # no heartbeat any more, as for a stopped process
  with RemoteRunDirectory(str(place), "run") as directory:
    assert json.loads(content(place / "run" / "run.lock"))["token"] == directory.holder
    directory.require_shared(directory.holder)
    assert "taken over" in caplog.text
    lock._stop.clear()
    threading.Thread(target=lock._beat, daemon=True).start()  # the process resumes, and finds that the run was taken over
    wait_for(lambda: lost)
    assert "took it over" in lost[0]
    lock.release()
    with directory.exclusive():
      pass
  assert there(place / "run") == []


@pytest.mark.parametrize("place", ["gs", "s3"], indirect=True)
def test_whoever_lost_the_run_publishes_nothing_more(place, monkeypatch):
  def ended(error):
    raise error

  monkeypatch.setattr(run_directory, "end_now", ended)
  monkeypatch.setattr(remote_run_directory, "BEAT_SECONDS", 60.0)
  with RemoteRunDirectory(str(place), "run") as directory:
    (place / "run" / "run.lock").write_bytes(json.dumps(elsewhere()).encode())
    with pytest.raises(RetryableError, match=f"process 7 on elsewhere took it over; in {place}/run"), directory.exclusive():
      pytest.fail("inside")
  assert json.loads(content(place / "run" / "run.lock"))["token"] == "other"


def test_a_directory_that_is_not_shared(place, monkeypatch):
  monkeypatch.setattr(remote_run_directory, "SHARED_SECONDS", 0.1)
  with pytest.raises(UserError, match="does not contain the lock that process 0 holds"):
    RemoteRunDirectory(str(place), "run").require_shared("token")


def test_a_store_that_fails_is_told_once_and_has_all_in_the_end(place, caplog):
  with RemoteRunDirectory(str(place), "run") as directory:
    with store_of(place).failing(lambda *_: (400, "Unknown", "the test says so")):
      (directory.path / "metrics.jsonl").write_bytes(b"1\n")
      wait_for(lambda: "files of the run cannot be copied" in caplog.text and "heartbeat failed" in caplog.text)
    wait_for(lambda: "files of the run can be copied again" in caplog.text and "heartbeat succeeded again" in caplog.text)
  assert caplog.text.count("files of the run cannot be copied") == 1
  assert content(place / "run" / "metrics.jsonl") == b"1\n"


def test_refused_credentials_are_reported_once_and_not_again_by_the_error_that_ends_the_run(place, caplog):
  store, expired = store_of(place), lambda *_: (401, "Unauthorized", "Invalid Credentials")
  directory = RemoteRunDirectory(str(place), "run").__enter__()
  with store.failing(expired):
    (directory.path / "metrics.jsonl").write_bytes(b"1\n")
    wait_for(lambda: "credentials refused or expired" in caplog.text)
    before = len(store.requests)
    wait_for(lambda: len(store.requests) > before + 4)  # the copies and the heartbeat are tried again
  wait_for(lambda: "files of the run can be copied again" in caplog.text)
  with store.failing(expired):
    (directory.path / "metrics.jsonl").write_bytes(b"2\n")
    wait_for(lambda: caplog.text.count("credentials refused or expired") == 2)
    directory.__exit__(RefusedCredentialsError, RefusedCredentialsError("credentials refused"), None)
  assert caplog.text.count("credentials refused or expired") == 2
  assert "does not respond" not in caplog.text
  assert not [record for record in caplog.records if not record.name.startswith(("maxtext_like", "google.auth"))]


def test_a_store_that_does_not_answer_holds_nobody_up(place, monkeypatch, caplog):
  monkeypatch.setattr(remote_run_directory, "_LEAVE_SECONDS", 0.2)
  directory = RemoteRunDirectory(str(place), "run")
  directory.__enter__()
  answers = threading.Event()
  try:
    store_of(place).fault = lambda *_: "503" if answers.wait(60) else None
    (directory.path / "metrics.jsonl").write_bytes(b"1\n")
    begin = time.monotonic()
    directory.__exit__(None, None, None)
    assert time.monotonic() - begin < 40
  finally:
    store_of(place).fault = None
    answers.set()
  assert "the store does not respond; files it lacks are in" in caplog.text


def test_where_the_store_cannot_be_used_the_start_ends(place):
  with (
    store_of(place).failing(lambda *_: "403"),
    pytest.raises(UserError, match=r"permission denied: (?s:.*)fix: renew the credentials.*that may read and write"),
    RemoteRunDirectory(str(place), "a"),
  ):
    pass
  assert there(place) == []
