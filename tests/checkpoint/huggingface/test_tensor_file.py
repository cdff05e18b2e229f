"""The strict safetensors reader: what it reads, and every malformed file that it must refuse."""

import json
import pickle
import resource
import time
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_like.checkpoint.huggingface.tensor_file import DTYPES, HEADER_LIMIT, SafetensorsFile
from maxtext_like.checkpoint.huggingface.writer import Source, write
from maxtext_like.errors import UserError
from maxtext_like.strict_json import printable


def pack(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
  raw = header if isinstance(header, bytes) else json.dumps(header).encode()
  return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
  return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


EIGHT = bytes(8)
MALFORMED: dict[str, tuple[bytes, str]] = {
  "empty file": (b"", "too short"),
  "seven bytes": (bytes(7), "too short"),
  "only a length": (pack(b"", length=100), "truncated"),
  "header length 2^63": (pack({}, length=2**63), "truncated"),
  "header length 2^64-1": (pack({}, length=2**64 - 1), "truncated"),
  "200 MiB header on a small file": (pack({"a": tensor()}, EIGHT, length=200 << 20), "truncated"),
  "header of no bytes": (pack(b""), "does not begin"),
  "not an object": (pack(b"[1]"), "does not begin"),
  "text": (b"# a readme, not a checkpoint at all" * 3, "truncated"),
  "broken JSON": (pack(b'{"a": '), "not valid JSON"),
  "two JSON values": (pack(b'{} {"a": 1}'), "not valid JSON"),
  "broken UTF-8": (pack(b'{"\xff": 1}'), "UTF-8"),
  "deep JSON": (pack(b'{"a":' + b"[" * 200_000), "nested too deeply"),
  "deep balanced JSON": (pack(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
  "infinite size": (pack(b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}', EIGHT), "Infinity"),
  "number of 10000 digits": (
    pack(b'{"a": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b'], "data_offsets": [0, 8]}}', EIGHT),
    "not valid JSON",
  ),
  "duplicate name": (
    pack(
      b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "a": {"dtype": "U8", "shape": [8], '
      b'"data_offsets": [0, 8]}}',
      EIGHT,
    ),
    "'a' is listed twice",
  ),
  "duplicate dtype": (
    pack(b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [8], "data_offsets": [0, 8]}}', EIGHT),
    "listed twice",
  ),
  "value is no object": (pack({"a": 5}), "exactly dtype"),
  "missing dtype": (pack({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT), "exactly dtype"),
  "unknown field": (pack({"a": tensor(code="x")}, EIGHT), "exactly dtype"),
  "unknown dtype": (pack({"a": tensor("F31")}, EIGHT), "unknown dtype 'F31'"),
  "dtype is a list": (pack({"a": tensor(["F32"])}, EIGHT), "unknown dtype"),  # type: ignore[arg-type]
  "negative size": (pack({"a": tensor(shape=[-2])}, EIGHT), "non-negative integers"),
  "fractional size": (pack({"a": tensor(shape=[2.0])}, EIGHT), "non-negative integers"),
  "boolean size": (pack({"a": tensor(shape=[True, 2])}, EIGHT), "non-negative integers"),
  "shape is a number": (pack({"a": tensor(shape=2)}, EIGHT), "non-negative integers"),
  "40 dimensions": (pack({"a": tensor(shape=[1] * 39 + [2])}, EIGHT), "non-negative integers"),
  "shape overflows 64 bits": (pack({"a": tensor(shape=[2**32, 2**32, 2])}, EIGHT), "exceeds the limit of 2^48 bytes"),
  "shape wraps around to the right size": (pack({"a": tensor(shape=[2**62 + 2])}, EIGHT), "exceeds the limit of 2^48 bytes"),
  "zero-size with a huge dimension": (pack({"a": tensor(shape=[0, 2**62], offsets=[0, 0])}), "exceeds the limit of 2^48 bytes"),
  "one offset": (pack({"a": tensor(offsets=[0])}, EIGHT), "data_offsets"),
  "three offsets": (pack({"a": tensor(offsets=[0, 8, 8])}, EIGHT), "data_offsets"),
  "negative offset": (pack({"a": tensor(offsets=[-8, 0])}, EIGHT), "data_offsets"),
  "text offset": (pack({"a": tensor(offsets=["0", "8"])}, EIGHT), "data_offsets"),
  "reversed offsets": (pack({"a": tensor(offsets=[8, 0])}, EIGHT), "reversed"),
  "offsets beyond the file": (pack({"a": tensor(shape=[4], offsets=[0, 16])}, EIGHT), "beyond the end"),
  "offsets of 2^62": (pack({"a": tensor(offsets=[2**62, 2**62 + 8])}, EIGHT), "beyond the end"),
  "offsets of 2^64": (pack({"a": tensor(offsets=[0, 2**64])}, EIGHT), "data_offsets"),
  "size and range differ": (pack({"a": tensor(shape=[3])}, EIGHT), "needs 12 bytes"),
  "overlap": (pack({"a": tensor(), "b": tensor(offsets=[4, 12])}, bytes(12)), "overlap"),
  "same range twice": (pack({"a": tensor(), "b": tensor()}, EIGHT), "overlap"),
  "hole": (pack({"a": tensor(), "b": tensor(offsets=[12, 20])}, bytes(20)), "belong to no tensor"),
  "hole at the start": (pack({"a": tensor(offsets=[4, 12])}, bytes(12)), "belong to no tensor"),
  "trailing bytes": (pack({"a": tensor()}, bytes(9)), "1 bytes after the last tensor"),
  "data with no tensors": (pack({}, EIGHT), "8 bytes after the last tensor"),
  "truncated data": (pack({"a": tensor()}, bytes(7)), "beyond the end"),
  "metadata is a list": (pack({"__metadata__": [1], "a": tensor()}, EIGHT), "__metadata__"),
  "metadata of numbers": (pack({"__metadata__": {"step": 1}, "a": tensor()}, EIGHT), "__metadata__"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_file_is_refused_at_once_with_file_and_reason(tmp_path: Path, what: str):
  content, reason = MALFORMED[what]
  path = tmp_path / "model.safetensors"
  path.write_bytes(content)
  start = time.process_time()
  with pytest.raises(UserError) as error:
    SafetensorsFile(path)
  assert time.process_time() - start < 1
  assert str(path) in str(error.value)
  assert reason in str(error.value)


def test_header_over_the_limit_is_refused_before_it_is_read(tmp_path: Path):
  path = tmp_path / "model.safetensors"
  with open(path, "wb") as file:
    file.write((HEADER_LIMIT + 1).to_bytes(8, "little"))
    file.truncate(HEADER_LIMIT + 1000)  # a sparse file
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with pytest.raises(UserError, match="more than the limit of 100000000"):
    SafetensorsFile(path)
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


class _Canary:
  def __init__(self, path: Path):
    self.path = path

  def __reduce__(self):
    return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int):
  path, canary = tmp_path / "model.safetensors", tmp_path / "canary"
  path.write_bytes(pickle.dumps(_Canary(canary), protocol))
  with pytest.raises(UserError, match=r"(?s)pickle can run code.*save_pretrained"):
    SafetensorsFile(path)
  assert not canary.exists()
  pickle.loads(path.read_bytes())  # The pickle would have run.
  assert canary.exists()


@pytest.mark.parametrize("length", [0x180, 0x280, 0x580])
def test_header_whose_length_looks_like_a_pickle_is_read(tmp_path: Path, length: int):
  """The first byte of such a file equals the first byte of a pickle."""
  raw = json.dumps({"a": tensor()}).encode()
  path = tmp_path / "model.safetensors"
  path.write_bytes(pack(raw + b" " * (length - len(raw)), EIGHT))
  assert path.read_bytes()[:1] == b"\x80"
  assert list(SafetensorsFile(path).entries) == ["a"]


def test_torch_zip_is_refused(tmp_path: Path):
  path = tmp_path / "model.safetensors"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("archive/data.pkl", pickle.dumps(1))
  with pytest.raises(UserError, match="pickle or a zip archive"):
    SafetensorsFile(path)


def test_no_regular_file_is_refused(tmp_path: Path):
  with pytest.raises(UserError, match="No such file"):
    SafetensorsFile(tmp_path / "absent.safetensors")
  with pytest.raises(UserError, match="not a regular file"):
    SafetensorsFile(tmp_path)


def test_names_are_printed_escaped(tmp_path: Path):
  path = tmp_path / "model.safetensors"
  path.write_bytes(pack({"\x1b[31mred\nline\ud800": tensor("F31")}, EIGHT))
  with pytest.raises(UserError) as error:
    SafetensorsFile(path)
  message = str(error.value)
  assert message.replace("\n  fix: ", "", 1).isprintable()
  assert "\\x1b[31mred\\nline\\ud800" in message
  message.encode("utf-8")
  assert printable("x" * 1000).endswith("x...")


SAMPLES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "F8_E5M2": ml_dtypes.float8_e5m2,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U8": np.uint8,
  "BOOL": np.bool_,
}


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_every_dtype_reads_back_bit_for_bit_at_any_alignment(tmp_path: Path, padding: int):
  rng = np.random.default_rng(3)
  arrays = {name: rng.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in SAMPLES.items()}
  arrays["empty"], arrays["scalar"] = np.zeros((0, 7), np.float32), np.full((), 2.5, np.float32)
  header, data = {}, b""
  for name, array in sorted(arrays.items(), key=lambda item: item[1].itemsize):
    dtype = next(key for key, value in DTYPES.items() if value == array.dtype)
    header[name] = tensor(dtype, list(array.shape), [len(data), len(data) + array.nbytes])
    data += array.tobytes()
  raw = json.dumps(header).encode()
  path = tmp_path / "model.safetensors"
  path.write_bytes(pack(raw + b" " * padding, data))
  file = SafetensorsFile(path)
  for name, array in arrays.items():
    read = file.tensor(name)
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert read.tobytes() == array.tobytes()
    file.release()
  with pytest.raises(KeyError):
    file.tensor("absent")


def test_reads_what_the_library_writes(tmp_path: Path):
  from safetensors.numpy import save_file

  values = np.arange(6, dtype=np.float32).reshape(2, 3)
  save_file({"a": values, "b": values.astype(ml_dtypes.bfloat16)}, tmp_path / "x.safetensors", {"format": "pt"})
  file = SafetensorsFile(tmp_path / "x.safetensors")
  np.testing.assert_array_equal(file.tensor("a"), values)
  assert file.metadata == {"format": "pt"}


def test_file_that_shrinks_after_opening_is_an_error_and_not_a_crash(tmp_path: Path):
  path = tmp_path / "model.safetensors"
  path.write_bytes(pack({"a": tensor("U8", [1 << 16], [0, 1 << 16])}, bytes(1 << 16)))
  file = SafetensorsFile(path)
  file.tensor("a")
  with open(path, "r+b") as changed:
    changed.truncate(100)
  with pytest.raises(UserError, match="changed while"):
    file.tensor("a")


def _valid(tmp_path: Path) -> bytes:
  values = np.arange(6, dtype=np.float32).reshape(2, 3)
  sources = [Source(name, "F32", (2, 3), lambda: values) for name in ("layer.weight", "layer.bias")]
  sources.append(Source("half", "BF16", (2, 3), lambda: values))
  write(tmp_path, sources, shard_size=10**9)
  return (tmp_path / "model.safetensors").read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_damaged_header_never_causes_anything_but_a_user_error(tmp_path: Path, data: st.DataObject):
  whole = bytearray(_valid(tmp_path))
  header = 8 + int.from_bytes(whole[:8], "little")
  for position in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=6)):
    whole[position] = data.draw(st.integers(0, 255))
  damaged = bytes(whole[: data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))])
  path = tmp_path / "damaged.safetensors"
  path.write_bytes(damaged)
  try:
    file = SafetensorsFile(path)
    for name in file.entries:
      file.tensor(name).tobytes()
  except UserError as error:
    message = str(error)
  else:
    message = ""
  assert message.replace("\n  fix: ", "", 1).isprintable()
