"""Remote storage addressed by URL: gs://, s3:// and every other protocol of fsspec.

The code relies only on what every object store guarantees: an object is complete or absent, a read returns the last write, and
objects are never renamed. Locks and publication also need conditional writes ("only if the object is still this version", "only
if it does not exist"), which gs:// and s3:// offer.

Every error is an OSError with errno, reason and URL, as for pathlib: FileNotFoundError, FileExistsError, PermissionError (also
for missing, expired or refused credentials), and EIO if the store does not answer after the client's retries.
"""

import contextlib
import errno
import functools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from maxtext_like.errors import RetryableError, UserError
from maxtext_like.extras import install
from maxtext_like.masking import masked

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}  # protocol -> optional extra of this project that installs it
_REQUEST_SECONDS = 60.0  # the default of gcsfs is to wait forever
_CHECKSUMS = {"crc32c": "crc32c", "md5Hash": "md5", "ETag": "etag", "etag": "etag"}  # field of a listing -> kind of checksum


def is_remote(text: str) -> bool:
  """Returns True if a text is a URL with both slashes, such as ``gs://bucket/x``."""
  return _REMOTE.match(text) is not None


def require_usable(key: str, url: str) -> None:
  """Checks that a kind of storage is supported and installed. Does not use the network.

  Args:
    key: the key or option that holds the URL, for the error.
    url: a URL, or a local path, which is always usable.

  Raises:
    UserError: the protocol is unknown, or its package is not installed.
  """
  if not is_remote(url):
    return
  import fsspec

  protocol = url.partition("://")[0].lower()
  try:
    fsspec.get_filesystem_class(protocol)
  except ImportError as error:
    extra = _EXTRAS.get(protocol)
    fix = install(extra) if extra else f"install the package: {error}"
    raise UserError(f"{key} = {masked(url)}: {protocol}:// needs a package that is not installed\n  fix: {fix}") from None
  except ValueError:
    raise UserError(
      f"{key} = {masked(url)}: unknown protocol {protocol}://\n  fix: use a path, or a URL that fsspec supports, such as gs://bucket/runs"
    ) from None


@dataclass(frozen=True)
class Entry:
  """An object in a listing.

  Attributes:
    place: its URL.
    size: size in bytes.
    version: changes whenever the object is rewritten.
    checksums: checksums from the store by kind: "crc32c" and "md5" (base64), "etag".
    modified: time of the last write in seconds since 1970 by the store's clock; None if the store does not report it.
  """

  place: "Place"
  size: int
  version: str
  checksums: dict[str, str]
  modified: float | None


class Place:
  """The URL of an object, or of a folder: all objects whose names begin with it and a slash. Creating one sends no request.

  Args:
    url: the URL, such as ``gs://bucket/runs``.

  Raises:
    UserError: as ``require_usable``; or a part between two slashes is empty, "." or "..".
  """

  def __init__(self, url: str):
    protocol, _, path = url.partition("://")
    parts = path.rstrip("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
      raise UserError(f"{masked(url)}: '', '.' and '..' are not allowed between slashes\n  fix: write the complete URL")
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
    """The part after the last slash."""
    return self.parts[-1]

  @property
  def parent(self) -> "Place":
    """The enclosing folder; the parent of a bucket is the bucket."""
    return Place(f"{self.protocol}://{'/'.join(self.parts[:-1] or self.parts)}")

  # Reading.

  def entry(self) -> Entry | None:
    """Returns the object with exactly this name, or None if there is none."""
    with self._asked() as files:
      try:
        found = files.info(self._path)
      except FileNotFoundError:
        return None
    return self._entry(found) if found["type"] == "file" else None

  def read_bytes(self) -> bytes:
    """Returns the content of the object."""
    with self._asked() as files:
      return files.cat_file(self._path)

  def read_text(self, encoding: str = "utf-8") -> str:
    """Returns the content of the object as text."""
    return self.read_bytes().decode(encoding)

  def entries(self) -> list[Entry]:
    """Returns every object below, at any depth, sorted by name; [] if there is none (stores have no empty folders)."""
    with self._asked() as files:
      try:
        found = files.find(self._path, detail=True)
      except FileNotFoundError:
        return []
    below = f"{self._path}/"
    return [self._entry(about) for name, about in sorted(found.items()) if name.startswith(below) and about["type"] == "file"]

  def children(self) -> list[Entry]:
    """Returns the objects directly below, sorted by name."""
    return [self._entry(about) for name, about in sorted(self._listed().items()) if about["type"] == "file"]

  def folders(self) -> list[str]:
    """Returns the names of the folders directly below, sorted."""
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
    """Returns the objects below whose names match a pattern such as ``**/*.jsonl``, sorted by name."""
    with self._asked() as files:
      found: Any = files.glob(f"{self._path}/{pattern}", detail=True)
    return [self._entry(about) for _, about in sorted(found.items()) if about["type"] == "file"]

  def download(self, path: str) -> None:
    """Writes the content to a local file."""
    with self._asked() as files:
      files.get_file(self._path, path)

  # Writing.

  def write_bytes(self, content: bytes) -> None:
    """Creates or overwrites the object."""
    with self._asked() as files:
      files.pipe_file(self._path, content)

  def create(self, content: bytes) -> str:
    """Creates the object if it does not exist, and returns its version. If two writers race, exactly one succeeds.

    Raises:
      FileExistsError: the object exists.
    """
    return self._write_on_condition(content, None)

  def replace(self, content: bytes, version: str) -> str:
    """Overwrites the object if it still has this version, and returns the new version.

    Raises:
      FileExistsError: the object has another version or does not exist.
    """
    return self._write_on_condition(content, version)

  def _write_on_condition(self, content: bytes, version: str | None) -> str:
    if self.protocol not in CONDITIONAL:
      raise NotImplementedError(f"{self.protocol}:// does not support conditional writes here")
    with self._asked() as files:
      try:
        return CONDITIONAL[self.protocol](files, self.parts[0], "/".join(self.parts[1:]), content, version)
      except FileExistsError:
        # If the response to a write was lost, the client retried it and now meets its own object. That counts as success.
        if (there := self.entry()) is None or self.read_bytes() != content:
          raise
        return there.version

  def upload(self, path: str) -> None:
    """Uploads a local file to this object."""
    with self._asked() as files:
      files.put_file(path, self._path)

  def remove(self) -> None:
    """Removes the object. A missing object is not an error."""
    with self._asked() as files, contextlib.suppress(FileNotFoundError):
      files.rm_file(self._path)

  # Access to the file system of fsspec.

  @property
  def _path(self) -> str:
    return "/".join(self.parts) if self.protocol != "memory" else f"/{'/'.join(self.parts)}"

  @contextlib.contextmanager
  def _asked(self) -> Iterator[Any]:
    """Yields the file system and translates its errors into OSErrors that name this URL."""
    try:
      yield _file_system(self.protocol)
    except FileNotFoundError as error:
      raise FileNotFoundError(errno.ENOENT, "no such object", str(self)) from error
    except FileExistsError as error:
      raise FileExistsError(errno.EEXIST, "already exists", str(self)) from error
    except UserError:
      raise
    except Exception as error:  # each client library has its own exception types
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
    # ConditionalRequestConflict: another writer is active. NoSuchKey: the version to replace was deleted.
    if said in ("PreconditionFailed", "ConditionalRequestConflict") or (said == "NoSuchKey" and version is not None):
      raise FileExistsError from error
    raise


# (file system, bucket, name, content, required version or None for "does not exist") -> new version. Raises FileExistsError.
CONDITIONAL: dict[str, Callable[[Any, str, str, bytes, str | None], str]] = {
  "gs": _write_to_gcs,
  "gcs": _write_to_gcs,
  "s3": _write_to_s3,
}
"""The conditional write of each protocol that supports one."""


def endpoint() -> dict[str, str]:
  """Returns the s3:// endpoint for TensorStore, which ignores AWS_ENDPOINT_URL and related settings; {} for Amazon's own."""
  files = _file_system("s3")
  files.connect()
  url = files.s3.meta.endpoint_url
  if url.endswith((".amazonaws.com", ".amazonaws.com.cn")):
    return {}
  return {"endpoint": url, "aws_region": files.s3.meta.region_name or "us-east-1"}


def _file_system(protocol: str) -> Any:
  import fsspec
  from fsspec.config import conf

  set_up_client(protocol)
  for name in ("gs", "gcs"):  # etils, and with it orbax, creates its own file systems under both names
    conf.setdefault(name, {}).setdefault("requests_timeout", _REQUEST_SECONDS)
  return fsspec.filesystem(protocol, use_listings_cache=False)


def set_up_client(protocol: str) -> None:
  """Makes the client of a store report refused credentials at once: it neither retries nor logs them."""
  if protocol in ("gs", "gcs"):
    _set_up_gcsfs()


@functools.cache
def _set_up_gcsfs() -> None:
  """Changes gcsfs, which repeats a request with refused credentials six times and a download 36 times, for minutes."""
  from gcsfs import retry

  is_retriable = retry.is_retriable
  retry.is_retriable = lambda error: is_retriable(error) and refusal(error, "gs://") is None
  logging.getLogger("gcsfs").addFilter(lambda record: not _REPEATED.search(str(record.msg)))


_REPEATED = re.compile(r" (out of retries on|non-retriable) exception: ")
"""Records of gcsfs about errors that it also raises."""


_NOT_SET_UP = {
  "ConfigNotFound", "ConfigParseError", "InvalidConfigError", "InvalidRegionError", "NoRegionError", "ParamValidationError",
  "PartialCredentialsError", "ProfileNotFound",
  "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "RequestTimeTooSkewed",
}  # fmt: skip
"""Exceptions of botocore for a wrong configuration file or environment variable on this machine, and S3 error codes for a wrong
region or clock."""

_MISSING = {
  "CredentialRetrievalError", "DefaultCredentialsError", "NoAuthTokenError", "NoCredentialsError", "SSOTokenLoadError",
  "TokenRetrievalError",
}  # fmt: skip
"""Exceptions of botocore and google-auth if no credentials are found."""

_EXPIRED = {
  # S3 and compatible stores: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
  "CredentialsNotSupported", "ExpiredToken", "InvalidAccessKeyId", "InvalidSecurity", "InvalidToken", "MissingSecurityElement",
  "MissingSecurityHeader", "SignatureDoesNotMatch", "TokenRefreshRequired", "Unauthorized",
  # AWS services that issue credentials (STS, SSO), and errors common to AWS services
  "AuthFailure", "ExpiredTokenException", "IDPRejectedClaim", "IncompleteSignature", "InvalidClientTokenId",
  "InvalidIdentityToken", "InvalidSignatureException", "MissingAuthenticationToken", "MissingAuthenticationTokenException",
  "RequestExpired", "UnauthorizedException", "UnrecognizedClientException",
  # exceptions of botocore, google-auth and azure
  "ClientAuthenticationError", "GoogleAuthError", "SSOError",
  # HTTP statuses and TensorStore. S3 gives 400 without a code only to HEAD requests, for credentials and wrong regions.
  "400 without a code", "401", "UNAUTHENTICATED",
}  # fmt: skip
"""Codes and exceptions if credentials are not, or no longer, valid."""

_DENIED = {
  "AccessDenied", "AccessDeniedException", "AccountProblem", "AllAccessDisabled", "InvalidPayer", "NotSignedUp",
  "OptInRequired", "UnauthorizedAccess", "PermissionError", "403", "PERMISSION_DENIED",
}  # fmt: skip
"""Codes and exceptions if valid credentials lack a permission. Some stores also give them for expired credentials."""

_REFUSALS = {"no valid credentials": _MISSING, "credentials refused or expired": _EXPIRED, "permission denied": _DENIED}


def as_oserror(error: BaseException, url: str) -> OSError:
  """Translates an exception of a storage client into an OSError. Returns an error of the local disk unchanged.

  The errno is EACCES for credentials and permissions, EINVAL for wrong settings on this machine, EIO for everything else.
  """
  causes = [error]
  while (cause := causes[-1].__cause__) is not None:
    causes.append(cause)
  for cause in causes:
    if isinstance(cause, OSError) and cause.filename is not None and (cause is error or is_remote(str(cause.filename))):
      return cause
  found = set().union(*map(_kinds, causes))
  said = next((text for text in map(_answer, causes) if text), " ".join(str(error).split())[:300] or type(error).__name__)
  if found & _NOT_SET_UP or (isinstance(error, ValueError) and said.startswith("Invalid endpoint")):
    return OSError(errno.EINVAL, f"the store is not configured correctly on this machine: {said}", url)
  # google-auth also raises its errors if the service that issues tokens does not answer. Google gives 403 to too many requests.
  outage = "TransportError" in found or any(getattr(cause, "retryable", False) for cause in causes)
  if not outage and not re.search("rate ?limit", said, re.IGNORECASE):
    for what, kinds in _REFUSALS.items():
      if found & kinds:
        return PermissionError(errno.EACCES, f"{what}: {said}", url)
  if isinstance(error, TimeoutError):
    said = f"no answer in time ({said})"
  return OSError(errno.EIO, f"storage failed: {said}", url)


def _kinds(error: BaseException) -> set[str]:
  """Returns the names of the classes of an error, its HTTP status and the error code of the store, if it has them."""
  kinds = {kind.__name__ for kind in type(error).__mro__}
  kinds |= {
    str(getattr(error, name)) for name in ("code", "status", "status_code") if isinstance(getattr(error, name, None), int | str)
  }
  if isinstance(response := getattr(error, "response", None), dict):  # botocore
    code, status = _code(response), response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    kinds |= {code, str(status), *(["400 without a code"] if code == "400" else [])}
  if str(error).startswith("Forbidden: "):  # gcsfs
    kinds.add("403")
  if isinstance(error, ValueError) and (parts := _TENSORSTORE.fullmatch(" ".join(str(error).split()))):
    kinds |= {part for part in (parts["status"], parts["code"]) if part}
    kinds |= set(re.findall(r" \[http_response_code='(\d+)'\]", str(error)))
  return kinds


_TENSORSTORE = re.compile(
  r"(?:(?P<status>PERMISSION_DENIED|UNAUTHENTICATED): )?"
  r"(?:.*\bError \w+ .*?: )?"
  r"(?P<text>(?:(?P<code>\w+): )?.*?)(?: \[\w+='.*)?"
)
"""TensorStore's errors: ``STATUS: Error opening ...: Error reading "name": Code: text [http_response_code='400'] [...]``."""


def _code(response: dict[str, Any]) -> str:
  return str(response.get("Error", {}).get("Code"))


def _answer(error: BaseException) -> str:
  """Returns the code and text of the store's answer; "" if the error is not of a known client."""
  if isinstance(response := getattr(error, "response", None), dict):
    code, text = _code(response), " ".join(str(response.get("Error", {}).get("Message") or error).split())[:300]
    if code == "400":
      return f"{text} (the store gives no reason to a HEAD request; the credentials or the region are wrong)"
    return text if code.isdigit() or code in text else f"{code}: {text}"
  if isinstance(error, ValueError) and (parts := _TENSORSTORE.fullmatch(" ".join(str(error).split()))):
    return parts["text"][:300]
  if str(error).startswith("Forbidden: "):  # gcsfs: this word and the address of the request, then the text
    return " ".join(str(error).partition("\n")[2].split())[:300]
  return ""


def refusal(error: BaseException, url: str) -> PermissionError | None:
  """Returns the error if a store refused the credentials or a permission, with ``url`` if it names no object; else None."""
  found = as_oserror(error, url)
  return found if isinstance(found, PermissionError) and is_remote(str(found.filename)) else None


@contextlib.contextmanager
def naming_refusals(place: Any) -> Iterator[None]:
  """Raises PermissionError for errors of other libraries inside the context if the store of ``place`` refused credentials."""
  try:
    yield
  except Exception as error:
    if isinstance(place, Place) and (refused := refusal(error, str(place))) is not None:
      raise refused from error
    raise


def renewal(url: str) -> str:
  """Returns how to renew the credentials for a URL, as the beginning of a fix."""
  protocol = url.partition("://")[0].lower()
  if protocol in ("gs", "gcs"):
    how = " (gcloud auth application-default login, or the key in GOOGLE_APPLICATION_CREDENTIALS)"
  elif protocol in ("s3", "s3a"):
    how = " (aws sso login, or AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN)"
  else:
    how = " of this store"
  return f"renew the credentials{how}"


_reported: set[str] = set()


def is_first_report(error: OSError) -> bool:
  """Returns False for refused credentials of a bucket for which this was called before. One message about them is enough."""
  if (refused := refusal(error, "")) is None:
    return True
  bucket = _bucket(refused.filename)
  first = bucket not in _reported
  _reported.add(bucket)
  return first


def accepted(url: str) -> None:
  """Notes that the store accepts the credentials for a bucket again."""
  _reported.discard(_bucket(url))


def _bucket(url: str) -> str:
  return "/".join(url.split("/")[:3])


def failed(error: OSError, *, writes: bool = False) -> UserError | RetryableError:
  """Returns the exception to raise for a storage error. Only failures of the store itself are retryable.

  Args:
    error: an error of ``Place`` or of ``as_oserror``.
    writes: True if the program also writes to the place, for the fix.
  """
  url = str(error.filename)
  what, uses = f"{masked(url)}: {error.strerror}", "read and write" if writes else "read"
  if isinstance(error, PermissionError) and is_remote(url):
    return UserError(what, fix=f"{renewal(url)}, or use credentials that may {uses} this place")
  if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
    return UserError(what, fix=f"name a place that exists and that you may {uses}")
  if error.errno == errno.EINVAL:
    return UserError(what, fix="correct what it names: an AWS_* variable, a configuration file, the region or the clock")
  return RetryableError(f"{what}; run the same command again")
