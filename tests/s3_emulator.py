"""An s3:// store inside the test process: moto from PyPI, one request at a time, with the faults of ``gcs_emulator``."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from urllib.parse import parse_qs

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

from maxtext_like.storage import Place
from tests import gcs_emulator
from tests.gcs_emulator import BUCKET, REFUSALS, Fault


class Emulator:
  """A bucket in memory behind a local port, with the members of ``gcs_emulator.Emulator``.

  For a write, the query that is passed to a fault has the name of the object as ``name``.
  """

  def __init__(self) -> None:
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # it logs a line for each request
    self._backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    self._backend.create_bucket(BUCKET, "us-east-1")
    self._application = DomainDispatcherApplication(create_backend_app)
    self.fault: Fault | None = None
    self.requests: list[tuple[str, str]] = []
    self.lock = threading.Lock()
    self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
    self.url = f"http://127.0.0.1:{self._server.server_port}"
    threading.Thread(target=self._server.serve_forever, name="s3-emulator", daemon=True).start()

  @property
  def environment(self) -> dict[str, str]:
    """Environment variables from which s3fs, and TensorStore through it, find the emulator, and fail without long waits."""
    return {
      "AWS_ENDPOINT_URL": self.url,
      "AWS_ACCESS_KEY_ID": "test",
      "AWS_SECRET_ACCESS_KEY": "test",
      "AWS_DEFAULT_REGION": "us-east-1",
      "AWS_MAX_ATTEMPTS": "1",  # s3fs has its own retries
    }

  def names(self, prefix: str = "") -> list[str]:
    """Returns the names of the objects of the bucket that start with ``prefix``."""
    with self.lock:
      return sorted(name for name in self._backend.buckets[BUCKET].keys if name.startswith(prefix))

  def read(self, name: str) -> bytes:
    """Returns the content of an object."""
    with self.lock:
      return self._backend.buckets[BUCKET].keys[name].value

  def write(self, name: str, content: bytes) -> None:
    """Creates or replaces an object, as another client would."""
    with self.lock:
      self._backend.put_object(BUCKET, name, content)

  def remove(self, name: str) -> None:
    """Removes an object."""
    with self.lock:
      self._backend.delete_object(BUCKET, name)

  @contextmanager
  def failing(self, fault: Fault) -> Iterator[None]:
    """Injects a fault into the requests inside the context."""
    self.fault = fault
    try:
      yield
    finally:
      self.fault = None

  def _answer(self, environ, start_response):
    method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
    query = {key: values[0] for key, values in parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True).items()}
    if method in ("PUT", "POST"):
      query["name"] = path.removeprefix(f"/{BUCKET}/")
    self.requests.append((method, path))
    wrong = self.fault(method, path, query) if self.fault else None
    if isinstance(answer := REFUSALS.get(wrong, wrong), tuple):
      environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
      status, code, message = answer
      text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode() if method != "HEAD" else b""
      start_response(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
      return [text]
    with self.lock:
      whole = b"".join(self._application(environ, start_response))
    if wrong not in ("lost", "cut"):
      return [whole]
    return self._broken(environ["werkzeug.socket"], b"" if wrong == "lost" else whole[: len(whole) // 2])

  @staticmethod
  def _broken(connection, part):
    if part:
      yield part
    connection.shutdown(socket.SHUT_RDWR)


@cache
def emulator() -> Emulator:
  """Returns the only emulator of this process and directs its clients to it. Clients remember the address of their store."""
  made = Emulator()
  os.environ.update(made.environment)
  return made


def store_of(place: str | Place) -> "Emulator | gcs_emulator.Emulator":
  """Returns the emulator of a place or protocol. Call it before the first Place, because clients read the variables it sets."""
  protocol = place.protocol if isinstance(place, Place) else place
  return emulator() if protocol == "s3" else gcs_emulator.emulator()
