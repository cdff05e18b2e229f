"""Fingerprints that identify the weights of a model.

``fingerprint`` covers the arrays, whatever files or devices they came from. ``of_files`` covers the files, whatever dtype or
quantization they are read in.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.stored_state import flatten
from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face
from maxtext_like.storage import Place

_SAMPLES, _SAMPLE_BYTES = 256, 4096  # samples of each file; different weights differ nearly everywhere
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(params: Any) -> str:
  """Returns 64 hexadecimal digits that depend on the names, shapes, dtypes and every bit of the arrays.

  The sums are computed where the arrays are, in one pass. They are integers modulo 2^32, so every device gives the same result.
  """
  flat = flatten(params)
  sums = jax.device_get(jax.jit(lambda arrays: {name: _sums(x) for name, x in arrays.items()})(flat))
  lines = [f"{name} {list(x.shape)} {x.dtype} {[int(n) for n in sums[name]]}" for name, x in sorted(flat.items())]
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sums(x: jax.Array) -> jax.Array:
  """Returns uint32 [2]: sums of the array's bits, each multiplied by an odd number that depends on its position.

  The factors make the sums change if two numbers are exchanged.
  """
  bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
  place = jnp.zeros((), jnp.uint32)
  for axis in range(x.ndim):
    stride = math.prod(x.shape[axis + 1 :]) % 2**32
    place = place + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
  keys = [(place * jnp.uint32(factor) ^ (place >> 15)) | jnp.uint32(1) for factor in (0x9E3779B1, 0x85EBCA77)]
  return jnp.stack([jnp.sum(bits * key, dtype=jnp.uint32) for key in keys])


def of_files(directory: Path | Place) -> str | None:
  """Identifies the files of weights by "hf" or "step" and 64 hexadecimal digits. None if they are not on a local disk.

  For safetensors the digits cover the sizes and samples of each file, which takes milliseconds; for a step, the hashes of its
  manifest.
  """
  if isinstance(directory, Place):
    return None
  if is_hugging_face(directory):
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
      size = path.stat().st_size
      digest.update(f"{path.name} {size}\n".encode())
      with path.open("rb") as file:
        for i in range(_SAMPLES):
          file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
          digest.update(file.read(_SAMPLE_BYTES))
    return f"hf {digest.hexdigest()}"
  step = find_step(directory)
  if step is None:
    return None
  return f"step {hashlib.sha256(json.dumps(manifest.read(step).files, sort_keys=True).encode()).hexdigest()}"
