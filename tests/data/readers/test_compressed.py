"""Compressed jsonl: the records of the plain file, read from any position, for any division; damage, bombs."""

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import zstandard

from maxtext_like.data.readers import compressed
from maxtext_like.data.readers import lines as line_files
from maxtext_like.data.readers.jsonl import JsonLines
from maxtext_like.errors import UserError
from tests.tiers import slow

LEVEL = zstandard.ZstdCompressor(write_checksum=True)
SKIPPABLE = (0x184D2A53).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"


def members(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
  """Compresses data as several members or frames, divided anywhere."""
  return lambda data: b"".join(pack(data[at : at + 7919]) for at in range(0, len(data), 7919))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
  "one.gz": gzip.compress,
  "many.gz": members(gzip.compress),
  "padded.gz": lambda data: gzip.compress(data[:50]) + b"\0" * 70_000 + gzip.compress(data[50:]) + b"\0" * 9,
  "stored.gz": lambda data: gzip.compress(data, 0),
  "one.zst": LEVEL.compress,
  "many.zst": members(LEVEL.compress),
  "skippable.zst": lambda data: SKIPPABLE + LEVEL.compress(data[:500]) + SKIPPABLE + LEVEL.compress(data[500:]) + SKIPPABLE,
}
VALUES = [f"{i} " + "ab\u2028é" * (i * 37 % 500) for i in range(400)]
PLAIN = b"\xef\xbb\xbf" + b"\n\n".join(json.dumps({"text": value}).encode() for value in VALUES)


@pytest.fixture
def small(monkeypatch):
  """Makes chunks and pieces so small that every file has many, and only some of them stay in memory."""
  monkeypatch.setattr(compressed, "PIECE_BYTES", 4000)
  monkeypatch.setattr(compressed, "_GZIP_READ", 1500)
  monkeypatch.setattr(compressed, "_ZSTD_READ", 1500)
  monkeypatch.setattr(compressed, "_ZSTD_STEP", 70)
  for module in (compressed, line_files):
    monkeypatch.setattr(module, "SPACING_BYTES", 2**14)
  monkeypatch.setattr("maxtext_like.data.readers.jsonl.KEPT_BYTES", 2**16)
  monkeypatch.setattr(line_files, "KEPT_BYTES", 2**16)


@pytest.mark.parametrize("name", PACKERS)
def test_every_record_from_any_place(name, tmp_path, small):
  path = tmp_path / f"a.jsonl.{name.split('.')[1]}"
  path.write_bytes(PACKERS[name](PLAIN))
  documents = JsonLines([str(path)], "text")
  assert [record.text for record in documents.scan()] == VALUES  # pyright: ignore[reportAttributeAccessIssue]
  order = random.Random(0).choices(range(len(VALUES)), k=60)
  assert [documents.read(i).text for i in order] == [VALUES[i] for i in order]
  assert documents.place(7).endswith(f"{path.name}:15")
  assert documents.groups is not None
  assert len(documents.groups) > 10
  points = documents._lines[0]._packed._points  # pyright: ignore[reportOptionalMemberAccess]
  assert len(points) > 10 or name in ("one.zst", "skippable.zst"), "one frame is entered at its beginning only"
  kept = documents._lines[0]._cache
  assert kept._size == sum(map(len, kept._chunks.values())) <= 2**16 + 2**14 + 4000


def test_what_fits_the_memory_is_shuffled_as_plain_files_are(tmp_path):
  (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(PLAIN))
  documents = JsonLines([str(tmp_path / "a.jsonl.gz")], "text")
  assert documents.groups is None
  first = documents.fingerprint()
  (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(PLAIN.replace(b"399 ", b"398 ")))
  assert JsonLines([str(tmp_path / "a.jsonl.gz")], "text").fingerprint() != first


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_batches_and_resuming(kind, make, tmp_path, small):
  plain, path = tmp_path / "a.jsonl", tmp_path / f"a.jsonl.{kind}"
  plain.write_bytes(PLAIN)
  path.write_bytes(PACKERS[f"many.{kind}"](PLAIN))
  given = {"length": 300, "global_batch": 3}
  straight, packed_up = (make(dataset_path=str(p), shuffle=False, **given) for p in (plain, path))
  for _ in range(20):
    assert (next(straight)["tokens"] == next(packed_up)["tokens"]).all()
  source = make(dataset_path=str(path), **given)
  for _ in range(31):
    next(source)
  state = json.loads(json.dumps(source.get_state()))
  again = make(dataset_path=str(path), **given)
  again.set_state(state)
  for _ in range(40):
    assert (next(source)["tokens"] == next(again)["tokens"]).all()
  mixed = make(dataset_path=[str(plain), str(path)], packing=False, length=8, global_batch=8)
  for _ in range(2 * len(VALUES) // 8):
    next(mixed)
  assert mixed.counts()["documents"] >= 2 * len(VALUES)


def damage() -> dict[str, tuple[str, bytes]]:
  made = {}
  for kind in ("gz", "zst"):
    whole = PACKERS[f"one.{kind}"](PLAIN)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x10
    made[f"{kind}: cut off: the file ends at byte {len(whole) // 2}"] = kind, whole[: len(whole) // 2]
    made[f"{kind}: cut off: the file ends at byte {len(whole) - 1}"] = kind, whole[:-1]
    made[f"{kind}: damaged (gzip|zstd) data near byte \\d+"] = kind, bytes(flipped)
    made[f"{kind}: damaged (gzip|zstd) data near byte {len(whole)}"] = kind, whole + b"and more"
    made[f"{kind}: not (gzip|zstd) data although its name says so: it begins with b'PK"] = kind, b"PK\3\4 a zip file"
    made[f"{kind}: not (gzip|zstd) data although its name says so: it is empty"] = kind, b""
  made["zst: damaged .*: Frame requires too much memory"] = "zst", wide_window()
  made["zst: not zstd data although its name says so: it is gzip data"] = "zst", gzip.compress(PLAIN)
  made["gz is xz compressed, but only gzip and zstd are read"] = "gz", b"\xfd7zXZ\0 something"
  return made


def wide_window() -> bytes:
  parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
  stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
  return stream.compress(PLAIN) + stream.flush()


@pytest.mark.parametrize("reason", damage())
def test_damaged_archives_are_named_with_the_reason(reason, tmp_path):
  kind, data = damage()[reason]
  path = tmp_path / f"a.jsonl.{kind}"
  path.write_bytes(data)
  with pytest.raises(UserError, match=f"a.jsonl.{reason}"):
    JsonLines([str(path)], "text")


def test_without_zstandard(tmp_path, monkeypatch):
  (tmp_path / "a.jsonl.zst").write_bytes(LEVEL.compress(PLAIN))
  monkeypatch.setitem(sys.modules, "zstandard", None)
  with pytest.raises(UserError, match=r"pip install -e '.\[zstd\]'"):
    JsonLines([str(tmp_path / "a.jsonl.zst")], "text")


def test_a_packed_file_that_is_replaced_under_the_run(tmp_path, small):
  path = tmp_path / "a.jsonl.gz"
  path.write_bytes(gzip.compress(PLAIN))
  documents = JsonLines([str(path)], "text")
  path.write_bytes(gzip.compress(PLAIN.replace(b"399 ", b"398 ")))
  with pytest.raises(UserError, match=r"a\.jsonl\.gz: the file changed during the run"):
    documents.read(3)


MEASURED = """
import resource, sys
from maxtext_like.data.readers.jsonl import JsonLines
from maxtext_like.errors import UserError
from maxtext_like.data.documents import BadRecordError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
  print(next(iter(JsonLines([sys.argv[1]], "text").scan())))
except UserError as error:
  print(error)
print("grown by", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", ["gz", slow("zst"), slow("one long line")])
def test_bombs_are_refused_in_bounded_memory(name, tmp_path):
  path = tmp_path / ("a.jsonl" if " " in name else f"a.jsonl.{name}")
  with path.open("wb") as file:
    if name == "gz":
      file.write(gzip.compress(bytes(10**7)) * 100)  # a line of 1 GB, in 1 MB
    elif name == "zst":
      file.write(LEVEL.compress(b"\n" * 10**7) * 1000)  # 10 GB of empty lines, in 350 KB
    else:
      file.truncate(700 * 10**6)  # a sparse file, which takes no disk space
  done = subprocess.run([sys.executable, "-c", MEASURED, str(path)], capture_output=True, text=True, check=True)
  if " " in name:
    assert "a.jsonl:1: the line has 700000000 bytes, more than the limit of 16777216" in done.stdout
  else:
    assert f"{path}: {path.stat().st_size:,} bytes expand to " in done.stdout
    assert "refused as a decompression bomb" in done.stdout
  assert int(done.stdout.split("grown by ")[1]) * 1024 < 400e6, done.stdout
