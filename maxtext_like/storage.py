"""Places outside this machine's file system, named by a URL: gs://, s3:// and what else fsspec knows.

What is asked of a store is only what every object store gives: an object is there whole or not at all, what was written is
what the next reader gets, and names are not moved. What gs:// and s3:// give beside it, a write on the condition that the
object is the one that was read (or is not there), is what locks and publication rest on.

Every error is an OSError with errno, reason and URL, as pathlib's are: FileNotFoundError, FileExistsError, PermissionError
(credentials too), and EIO for a store that does not answer after the retries of its client.
"""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from maxtext_like.errors import RetryableError, UserError
from maxtext_like.masking import masked

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}  # protocols whose package is an optional extra of ours
_REQUEST_SECONDS = 60.0  # gcsfs waits for ever by default
_CHECKSUMS = {"crc32c": "crc32c", "md5Hash": "md5", "ETag": "etag", "etag": "etag"}  # what listings call them


def is_remote(text: str) -> bool:
  """Whether a text is a URL with both of its slashes, as ``gs://bucket/x``."""
  return _REMOTE.match(text) is not None


def require_usable(key: str, url: str) -> None:
  """Looks whether a kind of storage can be used at all; asks no network.

  Args:
    key: who names it, for the error.
    url: a URL, or a path, which always can.

  Raises:
    UserError: an unknown protocol, or one whose package is not installed.
  """
  if not is_remote(url):
    return
  import fsspec

  protocol = url.partition("://")[0].lower()
  try:
    fsspec.get_filesystem_class(protocol)
  except ImportError as error:
    extra = _EXTRAS.get(protocol)
    fix = f"pip install -e '.[{extra}]'" if extra else f"install the package: {error}"
    raise UserError(f"{key} = {masked(url)}: {protocol}:// needs a package that is not installed\n  fix: {fix}") from None
  except ValueError:
    raise UserError(
      f"{key} = {masked(url)}: unknown protocol {protocol}://\n  fix: a path, or a URL that fsspec knows, as gs://bucket/runs"
    ) from None


@dataclass(frozen=True)
class Entry:
  """An object as a listing shows it.

  Attributes:
    place: its URL.
    size: in bytes.
    version: changes whenever the object is written again.
    checksums: what the store knows of the content, by kind: "crc32c" and "md5" (base64), "etag".
    modified: when it was written, in seconds since 1970, by the store's clock; None: it does not say.
  """

  place: "Place"
  size: int
  version: str
  checksums: dict[str, str]
  modified: float | None


class Place:
  """An object, or all objects whose names begin with this one and a slash. Nothing is asked of the store until a method is.

  Args:
    url: as ``gs://bucket/runs``.

  Raises:
    UserError: as ``require_usable``; or a name that no directory could have, with "..", or nothing, between two slashes.
  """

  def __init__(self, url: str):
    protocol, _, path = url.partition("://")
    parts = path.rstrip("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
      raise UserError(f"{masked(url)}: '', '.' and '..' between slashes are no names here\n  fix: write the URL out")
    require_usable("URL", url)
    self.protocol, self.parts = protocol.lower(), tuple(parts)

  def __str__(self) -> str:
    return f"{self.protocol}://{'/'.join(self.parts)}"

  def __repr__(self) -> str:
    return f"Place({str(self)!r})"

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Place) and str(self) == str(other)

  def __hash__(self) -> int:
    return hash(str(self))

  def __truediv__(self, name: str) -> "Place":
    return Place(f"{self}/{name}")

  @property
  def name(self) -> str:
    """What follows the last slash."""
    return self.parts[-1]

  @property
  def parent(self) -> "Place":
    """The place that this one is in; a bucket is in itself."""
    return Place(f"{self.protocol}://{'/'.join(self.parts[:-1] or self.parts)}")

  # Reading.

  def entry(self) -> Entry | None:
    """The object of this very name; None: there is none."""
    with self._asked() as files:
      try:
        found = files.info(self._path)
      except FileNotFoundError:
        return None
    return self._entry(found) if found["type"] == "file" else None

  def read_bytes(self) -> bytes:
    """The whole object."""
    with self._asked() as files:
      return files.cat_file(self._path)

  def read_text(self, encoding: str = "utf-8") -> str:
    """The whole object as text."""
    return self.read_bytes().decode(encoding)

  def entries(self) -> list[Entry]:
    """Every object below, at any depth, by name. Empty where there is none: a store has no empty folders."""
    with self._asked() as files:
      try:
        found = files.find(self._path, detail=True)
      except FileNotFoundError:
        return []
    below = f"{self._path}/"
    return [self._entry(about) for name, about in sorted(found.items()) if name.startswith(below) and about["type"] == "file"]

  def children(self) -> list[Entry]:
    """The objects directly below, by name."""
    return [self._entry(about) for name, about in sorted(self._listed().items()) if about["type"] == "file"]

  def folders(self) -> list[str]:
    """The names directly below that further ones follow, as those of folders."""
    return [name for name, about in sorted(self._listed().items()) if about["type"] == "directory"]

  def _listed(self) -> dict[str, dict[str, Any]]:
    with self._asked() as files:
      try:
        found = files.ls(self._path, detail=True)
      except (FileNotFoundError, NotADirectoryError):
        return {}
    below = f"{self._path}/"
    named = ((str(about["name"]).rstrip("/"), about) for about in found)
    return {name.removeprefix(below): about for name, about in named if name.startswith(below)}

  def glob(self, pattern: str) -> list[Entry]:
    """The objects below whose names match a pattern, as ``**/*.jsonl``, by name."""
    with self._asked() as files:
      found: Any = files.glob(f"{self._path}/{pattern}", detail=True)
    return [self._entry(about) for _, about in sorted(found.items()) if about["type"] == "file"]

  def download(self, path: str) -> None:
    """Writes the content to a file of this machine."""
    with self._asked() as files:
      files.get_file(self._path, path)

  # Writing.

  def write_bytes(self, content: bytes) -> None:
    """Makes the object, or takes the place of the one that is there."""
    with self._asked() as files:
      files.pipe_file(self._path, content)

  def create(self, content: bytes) -> str:
    """Makes the object on the condition that there is none, and returns its version. Of two who try, one does.

    Raises:
      FileExistsError: there is one.
    """
    return self._write_on_condition(content, None)

  def replace(self, content: bytes, version: str) -> str:
    """Takes the place of the object on the condition that it is this version of it, and returns the new one.

    Raises:
      FileExistsError: it is another, or there is none.
    """
    return self._write_on_condition(content, version)

  def _write_on_condition(self, content: bytes, version: str | None) -> str:
    if self.protocol not in CONDITIONAL:
      raise NotImplementedError(f"{self.protocol}:// has no conditions here")
    with self._asked() as files:
      try:
        return CONDITIONAL[self.protocol](files, self.parts[0], "/".join(self.parts[1:]), content, version)
      except FileExistsError:
        # Where the answer to a write was lost, its client tried again, and met what it had written itself.
        if (there := self.entry()) is None or self.read_bytes() != content:
          raise
        return there.version

  def upload(self, path: str) -> None:
    """``write_bytes`` of a file of this machine."""
    with self._asked() as files:
      files.put_file(path, self._path)

  def remove(self) -> None:
    """Removes the object; none there is no error."""
    with self._asked() as files, contextlib.suppress(FileNotFoundError):
      files.rm_file(self._path)

  # How it is asked.

  @property
  def _path(self) -> str:
    return "/".join(self.parts) if self.protocol != "memory" else f"/{'/'.join(self.parts)}"

  @contextlib.contextmanager
  def _asked(self) -> Iterator[Any]:
    """The file system, whose errors become OSErrors of this URL."""
    try:
      yield _file_system(self.protocol)
    except FileNotFoundError as error:
      raise FileNotFoundError(errno.ENOENT, "no such object", str(self)) from error
    except FileExistsError as error:
      raise FileExistsError(errno.EEXIST, "is there already", str(self)) from error
    except UserError:
      raise
    except Exception as error:  # each client has its own kinds
      raise as_oserror(error, str(self)) from error

  def _entry(self, about: dict[str, Any]) -> Entry:
    checksums = {kind: str(about[name]).strip('"') for name, kind in _CHECKSUMS.items() if about.get(name)}
    moment = next((about[name] for name in ("updated", "LastModified", "mtime", "created") if about.get(name)), None)
    if isinstance(moment, str):
      moment = datetime.fromisoformat(moment)
    modified = moment.timestamp() if isinstance(moment, datetime) else moment
    version = about.get("generation") or checksums.get("etag") or f"{about['size']} bytes of {moment}"
    place = Place(f"{self.protocol}://{str(about['name']).lstrip('/')}")
    return Entry(place, int(about["size"]), str(version), checksums, modified)


def _write_to_gcs(files: Any, bucket: str, key: str, content: bytes, version: str | None) -> str:
  url = f"{files._location}/upload/storage/v1/b/{bucket}/o"
  condition = {"uploadType": "media", "name": key, "ifGenerationMatch": version or "0"}
  return str(files.call("POST", url, **condition, data=content, json_out=True)["generation"])


def _write_to_s3(files: Any, bucket: str, key: str, content: bytes, version: str | None) -> str:
  condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": f'"{version}"'}
  try:
    return files.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)["ETag"].strip('"')
  except OSError as error:
    said = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
    # The second: somebody else writes it at this moment. The third: there is none, and it was to be another version of it.
    if said in ("PreconditionFailed", "ConditionalRequestConflict") or (said == "NoSuchKey" and version is not None):
      raise FileExistsError from error
    raise


# (file system, bucket, name, content, version that it must be, None for none) -> its new version. FileExistsError: it is not.
CONDITIONAL: dict[str, Callable[[Any, str, str, bytes, str | None], str]] = {
  "gs": _write_to_gcs,
  "gcs": _write_to_gcs,
  "s3": _write_to_s3,
}
"""Protocols of stores where a write may have a condition, and how it has it."""


def endpoint() -> dict[str, str]:
  """Where s3:// is, for TensorStore, which does not know AWS_ENDPOINT_URL and its kin; {}: where Amazon has it."""
  files = _file_system("s3")
  files.connect()
  url = files.s3.meta.endpoint_url
  if url.endswith((".amazonaws.com", ".amazonaws.com.cn")):
    return {}
  return {"endpoint": url, "aws_region": files.s3.meta.region_name or "us-east-1"}


def _file_system(protocol: str) -> Any:
  import fsspec
  from fsspec.config import conf

  for name in ("gs", "gcs"):  # etils, and with it orbax, has its own by these too
    conf.setdefault(name, {}).setdefault("requests_timeout", _REQUEST_SECONDS)
  return fsspec.filesystem(protocol, use_listings_cache=False)


_NOT_SET_UP = {
  "ConfigNotFound", "ConfigParseError", "InvalidConfigError", "InvalidRegionError", "NoRegionError", "ParamValidationError",
  "PartialCredentialsError", "ProfileNotFound",
}  # fmt: skip
"""Of botocore: what a file or a variable of this machine says wrongly."""


def as_oserror(error: Exception, url: str) -> OSError:
  """What a store's library raised, as what the operating system would: EACCES, EINVAL where this machine's settings for the
  store are wrong, EIO for all else."""
  said = " ".join(str(error).split())[:300] or type(error).__name__
  kinds = {kind.__name__ for kind in type(error).__mro__}
  code = getattr(error, "code", None) or _http_status(error)
  if kinds & {"GoogleAuthError", "NoCredentialsError"} or str(code) == "401":
    return PermissionError(errno.EACCES, f"no valid credentials: {said}", url)
  if isinstance(error, PermissionError) or str(code) == "403" or said.startswith("Forbidden"):
    return PermissionError(errno.EACCES, f"permission denied: {said}", url)
  if kinds & _NOT_SET_UP or (isinstance(error, ValueError) and said.startswith("Invalid endpoint")):
    return OSError(errno.EINVAL, f"the store is not set up here: {said}", url)
  if isinstance(error, TimeoutError):
    said = f"no answer in time ({said})"
  return OSError(errno.EIO, f"storage failed: {said}", url)


def _http_status(error: BaseException) -> int | None:
  """The HTTP status of botocore's error, which s3fs raises again as another kind."""
  while True:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
      return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if error.__cause__ is None:
      return None
    error = error.__cause__


def failed(error: OSError) -> UserError | RetryableError:
  """What to raise for an error of a place: a retry may mend the storage's own only."""
  what = f"{masked(str(error.filename))}: {error.strerror}"
  if isinstance(error, FileNotFoundError | FileExistsError | PermissionError) or error.errno == errno.EINVAL:
    return UserError(what)
  return RetryableError(f"{what}; the same command tries again")
