"""Tests maxtext_like/storage.py and local_copies.py on an emulated gs:// and s3://, and on memory://."""

import asyncio
import errno
import itertools
import os
import re
import types

import botocore.exceptions
import fsspec
import google.auth.exceptions
import pytest
from s3fs.errors import translate_boto_error

from maxtext_like import local_copies, storage
from maxtext_like.errors import RetryableError, UserError
from maxtext_like.storage import Place
from tests.gcs_emulator import BUCKET, emulator
from tests.s3_emulator import store_of

NUMBERS = itertools.count()


@pytest.fixture(params=["gs", "s3", "memory"])
def place(request):
  """An empty place."""
  store_of(request.param)
  yield Place(f"{request.param}://{BUCKET}/storage-{next(NUMBERS)}")
  fsspec.filesystem("memory").store.clear()


@pytest.fixture
def copies(monkeypatch, tmp_path):
  monkeypatch.setenv(local_copies.FOLDER_VARIABLE, str(tmp_path / "copies"))
  return tmp_path / "copies"


@pytest.fixture
def impatient(monkeypatch):
  """Makes clients and copies retry without waiting."""
  emulator()  # sets variables that clients read when they are imported

  async def at_once(_):
    return

  monkeypatch.setattr("gcsfs.retry.asyncio", types.SimpleNamespace(sleep=at_once, TimeoutError=asyncio.TimeoutError))
  monkeypatch.setattr(local_copies, "_FIRST_WAIT_SECONDS", 0.0)


def test_what_is_there_is_listed_and_read(place):
  assert place.entries() == place.children() == place.folders() == []
  assert place.entry() is None
  for name in ("b.txt", "a.txt", "deep/er/c.txt"):
    (place / name).write_bytes(name.encode())
  assert [entry.place for entry in place.entries()] == [place / "a.txt", place / "b.txt", place / "deep/er/c.txt"]
  assert [entry.place.name for entry in place.children()] == ["a.txt", "b.txt"]
  assert place.folders() == ["deep"]
  assert [entry.place.name for entry in place.glob("**/*.txt")] == ["a.txt", "b.txt", "c.txt"]
  assert (place / "deep/er/c.txt").read_text() == "deep/er/c.txt"
  entry = (place / "a.txt").entry()
  assert entry is not None
  assert entry.size == 5
  (place / "a.txt").write_bytes(b"again")
  again = (place / "a.txt").entry()
  assert again is not None
  assert again.version != entry.version
  (place / "a.txt").remove()
  (place / "a.txt").remove()
  with pytest.raises(FileNotFoundError) as gone:
    (place / "a.txt").read_bytes()
  assert gone.value.filename == str(place / "a.txt")


@pytest.mark.parametrize("url", ["gs://", "gs://b//x", "gs://b/../x", "gs://b/./x"])
def test_names_that_no_directory_has(url):
  with pytest.raises(UserError, match=r"(?s)'\.\.'.*between slashes.*fix: "):
    Place(url)


@pytest.mark.parametrize(
  ("wrong", "kind", "told"),
  [
    ("503", RetryableError, "storage failed: .*(the test says so|Service Unavailable)"),
    ("403", UserError, "permission denied: .*\n  fix: renew the credentials .*that may read this place"),
    ((401, "Unauthorized", "said"), UserError, "credentials refused or expired: (said|Unauthorized)"),
    ("404", UserError, "no such object"),
  ],
)
@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_an_error_names_the_url_and_whether_a_retry_mends_it(impatient, protocol, wrong, kind, told):
  store = store_of(protocol)
  place = Place(f"{protocol}://{BUCKET}/x")
  with store.failing(lambda *_: wrong), pytest.raises(OSError, match=str(place)) as raised:
    place.read_bytes()
  assert raised.value.filename == str(place)
  error = storage.failed(raised.value)
  assert isinstance(error, kind)
  with pytest.raises(kind, match=f"(?s)^{place}: {told}"):
    raise error


@pytest.mark.parametrize(
  ("variable", "value", "said"),
  [
    ("AWS_PROFILE", "nonesuch", "nonesuch"),
    ("AWS_ENDPOINT_URL", "notaurl", "Invalid endpoint"),
    ("AWS_ACCESS_KEY_ID", "half", "AWS_SECRET_ACCESS_KEY"),
  ],
)
def test_settings_of_this_machine_that_are_wrong_are_no_fault_that_a_retry_mends(monkeypatch, variable, value, said):
  for name in [name for name in os.environ if name.startswith("AWS_")]:
    monkeypatch.delenv(name)
  monkeypatch.setenv(variable, value)
  monkeypatch.setattr("fsspec.config.conf", {})
  fsspec.filesystem("s3").clear_instance_cache()
  try:
    with pytest.raises(OSError, match="not configured correctly") as raised:
      Place("s3://a-bucket/x").read_bytes()
  finally:
    fsspec.filesystem("s3").clear_instance_cache()
  error = storage.failed(raised.value)
  assert isinstance(error, UserError)
  assert said in str(error)


def test_a_client_tries_again(impatient):
  store, place = emulator(), Place(f"gs://{BUCKET}/tried")
  answers = iter(["503", "503"])
  with store.failing(lambda *_: next(answers, None)):
    place.write_bytes(b"in the end")
  assert store.read("tried") == b"in the end"


# Copies.


def test_a_copy_is_taken_once_and_again_when_the_object_is_another(place, copies, monkeypatch):
  (place / "x.txt").write_bytes(b"one")
  path = local_copies.copy_file(f"{place}/x.txt")
  assert path == copies / place.protocol / "/".join(place.parts) / "x.txt"
  downloads = []
  plain = Place.download
  monkeypatch.setattr(Place, "download", lambda self, to: (downloads.append(self.name), plain(self, to)))
  assert local_copies.copy_file(f"{place}/x.txt").read_bytes() == b"one"
  assert not downloads
  (place / "x.txt").write_bytes(b"two")
  assert local_copies.copy_file(f"{place}/x.txt").read_bytes() == b"two"
  path.write_bytes(b"cut")
  path.write_bytes(b"cut short")
  assert local_copies.copy_file(f"{place}/x.txt").read_bytes() == b"two"  # the size of the copy is wrong
  with pytest.raises(UserError, match=r"y\.txt: no such object"):
    local_copies.copy_file(f"{place}/y.txt")


def test_every_host_has_the_time_of_the_object(copies):
  place = Place(f"gs://{BUCKET}/timed")
  place.write_bytes(b"x")
  entry = place.entry()
  assert entry is not None
  assert os.stat(local_copies.copy_file(str(place))).st_mtime == pytest.approx(entry.modified, abs=1e-3)


def test_of_a_folder_what_is_gone_goes(place, copies):
  for name in ("a.json", "b.json", "c.bin"):
    (place / name).write_bytes(b"{}")
  wanted = lambda entry: entry.place.name.endswith(".json")
  folder = local_copies.copy_folder(place, wanted)
  assert sorted(path.name for path in folder.glob("[!.]*")) == ["a.json", "b.json"]
  (place / "a.json").remove()
  local_copies.copy_folder(place, wanted)
  assert [path.name for path in folder.glob("[!.]*")] == ["b.json"]
  (place / "more" / "d.json").write_bytes(b"{}")
  (place / "other" / "e.json").write_bytes(b"{}")
  copied = lambda: {path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*.json")}
  local_copies.copy_folder(place, wanted, below=("more",))
  assert copied() == {"b.json", "more/d.json"}
  (place / "more" / "d.json").remove()
  local_copies.copy_folder(place, wanted, below=("more",))
  assert copied() == {"b.json"}
  with pytest.raises(UserError, match="no such object, and none directly below"):
    local_copies.copy_folder(place / "none", wanted)


@pytest.mark.parametrize("wrong", ["cut", "503"])
def test_what_breaks_off_is_taken_again_and_never_used(copies, impatient, wrong):
  store, place = emulator(), Place(f"gs://{BUCKET}/broken")
  place.write_bytes(bytes(range(256)) * 100)
  fault = lambda method, path, query: wrong if query.get("alt") == "media" and next(answers, 1) else None
  answers = iter([1, 1, 0])
  with store.failing(fault):
    assert local_copies.copy_file(str(place)).read_bytes() == bytes(range(256)) * 100
  place.write_bytes(b"longer than before" * 1000)
  answers = iter([])
  with store.failing(fault), pytest.raises(RetryableError, match=str(place)):
    local_copies.copy_file(str(place))
  left = [path.name for path in copies.rglob("*.part")]
  assert not left


def test_a_copy_without_room_says_what_it_needs(place, copies, monkeypatch):
  place.write_bytes(b"x" * 1000)
  monkeypatch.setattr(local_copies.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=999))
  with pytest.raises(UserError, match=f"(?s)disk space.*0.00 GB.*fix: .*{local_copies.FOLDER_VARIABLE}"):
    local_copies.copy_file(str(place))


@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_of_two_who_write_on_a_condition_one_does(protocol):
  store_of(protocol)
  place = Place(f"{protocol}://{BUCKET}/of-two")
  with pytest.raises(FileExistsError):
    place.replace(b"there is none", "0123")
  first = place.create(b"of the first")
  assert place.create(b"of the first") == first  # a retry after a lost answer
  with pytest.raises(FileExistsError):
    place.create(b"of the second")
  entry = place.entry()
  assert entry is not None
  assert entry.version == first
  assert place.replace(b"new", first) != first
  with pytest.raises(FileExistsError):
    place.replace(b"late", first)
  assert place.read_bytes() == b"new"


@pytest.mark.parametrize("answer", [(401, "Unauthorized", "Invalid Credentials"), (400, "InvalidToken", "It is malformed.")])
@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_refused_credentials_are_not_tried_again(copies, caplog, protocol, answer):
  """Without ``impatient``, gcsfs would take minutes."""
  store, place, asked = store_of(protocol), Place(f"{protocol}://{BUCKET}/refused-{answer[0]}.txt"), []
  if answer[1] == "InvalidToken" and protocol == "gs":
    answer = (401, "", "Anonymous caller does not have storage.objects.get access")
  place.write_bytes(b"x")
  entry = place.entry()
  assert entry is not None
  with store.failing(lambda *_: asked.append(1) or answer), pytest.raises(UserError) as raised:
    local_copies.copy([entry])
  assert len(asked) < 5  # gcsfs looks for an object and for a folder; with its retries it sent 36 requests
  assert not [r for r in caplog.records if not r.name.startswith("google.auth")]  # this machine has no metadata server
  how = {"gs": "gcloud auth application-default login", "s3": "AWS_SESSION_TOKEN"}[protocol]
  what, fix = str(raised.value).split("\n")
  assert re.fullmatch(f"{place}: credentials refused or expired: .*{answer[2]}.*", what)
  assert re.fullmatch(rf"  fix: renew the credentials \(.*{how}.*, or use credentials that may read this place", fix)


def client_error(code, status, operation="GetObject"):
  answer = {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}}
  return botocore.exceptions.ClientError(answer, operation)


def caused(error, cause):
  error.__cause__ = cause
  return error


TENSORSTORE = (
  """Error opening "zarr3" driver: Error reading "a b/zarr.json": {} [tensorstore_spec='x'] [http_response_code='400']"""
)
REFUSED, DENIED, WRONG, OUTAGE = "credentials refused or expired", "permission denied", "not configured", "storage failed"


@pytest.mark.parametrize(
  ("error", "said"),
  [
    *(
      (client_error(code, 400), f"{REFUSED}: {code}: said") for code in ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
    ),
    *((client_error(code, 403), f"{REFUSED}: {code}: said") for code in ("InvalidAccessKeyId", "SignatureDoesNotMatch")),
    *((client_error(code, 403), f"{REFUSED}: {code}: said") for code in ("InvalidClientTokenId", "RequestExpired")),
    (client_error("AccessDenied", 403), f"{DENIED}: AccessDenied: said"),
    (client_error("401", 401), f"{REFUSED}: said"),
    (client_error("403", 403, "HeadObject"), f"{DENIED}: said"),
    (client_error("400", 400, "HeadObject"), f"{REFUSED}: said .the store gives no reason"),
    (client_error("RequestTimeTooSkewed", 403), WRONG),
    (client_error("AuthorizationHeaderMalformed", 400), WRONG),
    (client_error("InvalidRequest", 400), f"{OUTAGE}: InvalidRequest: said"),
    (client_error("SlowDown", 503), OUTAGE),
    (client_error("500", 500), OUTAGE),
    (botocore.exceptions.NoCredentialsError(), "no valid credentials: Unable to locate"),
    (botocore.exceptions.UnauthorizedSSOTokenError(), f"{REFUSED}: The SSO session"),
    (google.auth.exceptions.DefaultCredentialsError("x"), "no valid credentials: x"),
    (google.auth.exceptions.RefreshError("invalid_grant: expired"), f"{REFUSED}: invalid_grant"),
    (caused(google.auth.exceptions.RefreshError("x"), google.auth.exceptions.TransportError("x")), OUTAGE),
    (OSError("Forbidden: http://x\nno access"), f"{DENIED}: no access$"),
    (OSError("Forbidden: http://x\nUser Rate Limit Exceeded"), OUTAGE),
    (ValueError(TENSORSTORE.format("InvalidToken: said")), f"{REFUSED}: InvalidToken: said$"),
    (ValueError("PERMISSION_DENIED: " + TENSORSTORE.format("said")), f"{DENIED}: said$"),
    (caused(RuntimeError("x"), ValueError("PERMISSION_DENIED: " + TENSORSTORE.format("said"))), f"{DENIED}: said$"),
    (ValueError(TENSORSTORE.format("NoSuchUpload: said")), f"{OUTAGE}: NoSuchUpload: said$"),
  ],
)
def test_the_errors_of_clients_have_one_meaning(error, said):
  """s3fs raises other errors, with botocore's error as the cause."""
  errors = [error]
  if isinstance(error, botocore.exceptions.ClientError):
    errors += [translate_boto_error(error), caused(OSError(5, str(error)), error)]
  kind = {OUTAGE: RetryableError}.get(said.partition(":")[0], UserError)
  for found in (storage.as_oserror(each, "s3://bucket/run") for each in errors):
    assert re.search(f"{said}", found.strerror or "")
    assert type(storage.failed(found)) is kind
    assert (storage.refusal(found, "") is not None) == (found.errno == errno.EACCES)


def test_an_error_of_the_local_disk_is_not_one_of_the_store():
  error = PermissionError(errno.EACCES, "Permission denied", "/copies/x")
  assert storage.as_oserror(error, "s3://bucket/x") is error
  assert storage.refusal(error, "s3://bucket/x") is None
  assert "credentials" not in str(storage.failed(error))
