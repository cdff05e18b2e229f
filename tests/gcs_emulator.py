"""A gs:// store inside the test process: gcp-storage-emulator from PyPI with missing features added, and with faults.

This file adds writes and removals on the condition of a generation, generations and byte ranges of reads, concurrent
requests, and ``Emulator.fault``, which is called before each request.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "bucket"
# Maps (method, path of the URL, its query) to a fault: a status such as "503", "lost" (the request is processed, but gets no
# answer), "cut" (half an answer), a number of seconds to wait first, an answer (status, code, message), or None.
Answer = tuple[int, str, str]
Fault = Callable[[str, str, dict[str, str]], str | float | Answer | None]
REFUSALS: dict[Any, Answer] = {
  "403": (403, "AccessDenied", "the test says so"),
  "404": (404, "NoSuchKey", "the test says so"),
  "503": (503, "SlowDown", "the test says so"),
}


class Emulator:
  """Buckets in memory behind a local port.

  Attributes:
    url: URL of the API.
    fault: called before each request; None for no faults.
    requests: method and path of each request.
  """

  def __init__(self) -> None:
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # it logs missing objects as errors
    self.storage = Storage(use_memory_fs=True)
    self.storage.create_bucket(BUCKET, {"name": BUCKET})
    self.fault: Fault | None = None
    self.requests: list[tuple[str, str]] = []
    self.lock = threading.Lock()
    self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
    self._server.daemon_threads = True
    self.url = f"http://127.0.0.1:{self._server.server_port}"
    threading.Thread(target=self._server.serve_forever, name="gcs-emulator", daemon=True).start()

  @property
  def environment(self) -> dict[str, str]:
    """Environment variables from which gcsfs and TensorStore find the emulator."""
    return {
      "STORAGE_EMULATOR_HOST": self.url,
      "TENSORSTORE_GCS_HTTP_URL": self.url,
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # otherwise gcsfs asks another API for the kind of the bucket
    }

  def names(self, prefix: str = "") -> list[str]:
    """Returns the names of the objects of the bucket that start with ``prefix``."""
    with self.lock:
      return sorted(about["name"] for about in self.storage.get_file_list(BUCKET, prefix or None)[0])

  def read(self, name: str) -> bytes:
    """Returns the content of an object."""
    with self.lock:
      return self.storage.get_file(BUCKET, name)

  def write(self, name: str, content: bytes) -> None:
    """Creates or replaces an object, as another client would."""
    with self.lock:
      about = objects._make_object_resource(self.url, BUCKET, name, "application/octet-stream", str(len(content)))
      self.storage.create_file(BUCKET, name, content, objects._checksums(content, about))

  def remove(self, name: str) -> None:
    """Removes an object."""
    with self.lock:
      self.storage.delete_file(BUCKET, name)

  def generation(self, name: str) -> str:
    """Returns the generation of an object, or "0" if it does not exist, as in the conditions of requests."""
    try:
      return str(self.storage.get_file_obj(BUCKET, name)["generation"])
    except NotFound:
      return "0"

  @contextmanager
  def failing(self, fault: Fault) -> Iterator[None]:
    """Injects a fault into the requests inside the context."""
    self.fault = fault
    try:
      yield
    finally:
      self.fault = None


@cache
def emulator() -> Emulator:
  """Returns the only emulator of this process and directs its clients to it. Clients remember the address of their store."""
  made = Emulator()
  os.environ.update(made.environment)
  return made


class _Handler(RequestHandler):
  def __init__(self, emulator: Emulator, *args):
    self.emulator = emulator
    super().__init__(emulator.storage, *args)

  def do_GET(self):
    self._answer(super().do_GET)

  def do_POST(self):
    self._answer(super().do_POST)

  def do_PUT(self):
    self._answer(super().do_PUT)

  def do_DELETE(self):
    self._answer(super().do_DELETE)

  def _answer(self, plainly):
    url = urlparse(self.path)
    query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
    emulator = self.emulator
    emulator.requests.append((self.command, url.path))
    wrong = emulator.fault(self.command, unquote(url.path), query) if emulator.fault else None
    try:
      if isinstance(wrong, float):
        time.sleep(wrong)
      elif isinstance(answer := REFUSALS.get(wrong, wrong), tuple):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._refuse(answer[0], answer[2])
        return
      name = unquote(url.path.partition("/o/")[2]) or query.get("name", "")
      with emulator.lock:
        if "ifGenerationMatch" in query and query["ifGenerationMatch"] != emulator.generation(name):
          self.rfile.read(int(self.headers.get("Content-Length") or 0))
          self._refuse(412, "conditionNotMet")
          return
        if self.command == "GET" and query.get("alt") == "media":
          self._send(name, cut=wrong == "cut")
          return
        if wrong == "lost":
          self.wfile = _Nowhere()  # pyright: ignore[reportAttributeAccessIssue]
        plainly()
    except (BrokenPipeError, ConnectionResetError):
      return  # the client was killed or closed the connection

  def _refuse(self, code, why):
    text = f'{{"error": {{"code": {code}, "message": "{why}"}}}}'.encode()
    self.send_response(code)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(text)))
    self.end_headers()
    self.wfile.write(text)

  def _send(self, name, *, cut):
    try:
      about, content = self.storage.get_file_obj(BUCKET, name), self.storage.get_file(BUCKET, name)
    except NotFound:
      self._refuse(404, "not found")
      return
    asked = self.headers.get("Range", "").removeprefix("bytes=")
    first, _, last = asked.partition("-")
    begin = int(first) if first else max(0, len(content) - int(last)) if last else 0
    end = min(len(content), int(last) + 1) if first and last else len(content)
    if asked and begin >= len(content):
      self._refuse(416, "range")
      return
    self.send_response(206 if asked else 200)
    if asked:
      self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
    self.send_header("Content-Length", str(end - begin))
    self.send_header("x-goog-generation", str(about["generation"]))
    self.send_header("x-goog-stored-content-length", str(len(content)))
    self.end_headers()
    self.wfile.write(content[begin : (begin + end) // 2 if cut else end])


class _Nowhere:
  """A file that discards an answer, so that the client does not get it."""

  closed = False

  def write(self, _):
    return

  def flush(self):
    return

  def close(self):
    return
