"""Identifies the weights of a directory by their content, without reading all of it."""

from pathlib import Path

import xxhash

from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.weight_sources import find_step
from maxtext_like.errors import UserError

_PARTS = 64
_PART_BYTES = 1 << 16  # the first part of a safetensors file has names, shapes and dtypes


def weight_identity(directory: Path) -> str:
  """Return a text that changes if the weights change. It does not depend on the place of the directory.

  A step of a run has hashes of its files. Of safetensors files, the sizes and 64 parts of 64 KiB are read: training changes all
  weights, so it changes these.

  Args:
    directory: a run, a step, a Hugging Face checkpoint, or an adapter of peft.

  Raises:
    UserError: there are no weights, or a file cannot be read.
  """
  settings = [path for name in ("config.json", "adapter_config.json") if (path := directory / name).is_file()]
  if not settings and (step := find_step(directory)) is not None:
    return xxhash.xxh3_128_hexdigest(manifest.to_text(manifest.read(step)).encode())
  if not settings:
    raise UserError(
      f"{directory}: contains no weights", fix="pass a run, one of its checkpoints, or a checkpoint of Hugging Face"
    )
  digest = xxhash.xxh3_128()
  for path in [*settings, *sorted(directory.glob("*.safetensors"))]:
    try:
      with open(path, "rb") as file:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        for at in sorted({i * max(size - _PART_BYTES, 0) // (_PARTS - 1) for i in range(_PARTS)}):
          file.seek(at)
          digest.update(file.read(_PART_BYTES))
    except OSError as error:
      raise UserError(f"{path}: cannot be read: {error.strerror}", fix="name a file that exists and can be read") from None
  return digest.hexdigest()
