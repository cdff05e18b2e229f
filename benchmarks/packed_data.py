"""Measures the cost of compressed jsonl: time and memory of finding its lines and of reading records in random order.

  python benchmarks/packed_data.py [MEGABYTES]

Writes jsonl of random words to a temporary folder (default: 1300 MB of 1.1 KB records, which takes a minute), compresses it,
and reads each file in a separate process. Needs the extra `zstd`.
"""

import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READS = 150_000


def make(folder: Path, megabytes: int) -> list[Path]:
  """Writes the same records as plain text, as gzip and as zstd, and returns the files."""
  import zstandard

  words, chosen = ["alpha", "beta", "gamma", "delta", "training", "token", "é", "\n"], random.Random(0)
  plain, packed, framed = (folder / name for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"))
  frames = zstandard.ZstdCompressor(level=1)
  with (
    plain.open("wb") as p,
    gzip.open(packed, "wb", compresslevel=1) as g,
    framed.open("wb") as f,
    frames.stream_writer(f) as z,
  ):
    size = 0
    while size < megabytes * 10**6:
      records = ({"text": " ".join(chosen.choices(words, k=200)), "id": chosen.random()} for _ in range(2000))
      block = "".join(json.dumps(record) + "\n" for record in records).encode()
      size += len(block)
      for file in (p, g, z):
        file.write(block)
  return [plain, packed, framed]


def measure(path: str) -> None:
  """Prints the times of one file and the growth of this process's memory."""
  from maxtext_like.data.order import Order, Share
  from maxtext_like.data.readers.jsonl import JsonLines

  before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
  documents = JsonLines([path], "text")
  index = time.perf_counter() - begin
  begin = time.perf_counter()
  JsonLines([path], "text")
  again = time.perf_counter() - begin
  order = Order(Share(len(documents)), shuffle_seed=0, passes=None, groups=documents.groups)
  begin = time.perf_counter()
  for i in range(READS):
    documents.read(order[i])
  reads = time.perf_counter() - begin
  grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
  lines = len(documents) * 8
  size = Path(path).stat().st_size
  print(
    f"{Path(path).name:12} {size / 1e6:7.0f} MB {len(documents):9,} records  lines found in {index:5.1f} s, later "
    f"{again:.2f} s  {READS:,} records "
    f"in random order {reads:5.1f} s  memory {(grown - lines) / 1e9:.2f} GB + {lines / 1e6:.0f} MB"
  )


def main() -> None:
  if len(sys.argv) == 3 and sys.argv[1] == "--file":
    measure(sys.argv[2])
    return
  megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1300
  with tempfile.TemporaryDirectory() as folder:
    files = make(Path(folder), megabytes)
    time.sleep(5)  # the index of a file that was written just now is not stored, because the file may still change
    for path in files:
      env = {**os.environ, "XDG_CACHE_HOME": folder}
      subprocess.run([sys.executable, __file__, "--file", str(path)], cwd=ROOT, env=env, check=True)


if __name__ == "__main__":
  main()
