"""Numbers that name the weights of a model: of the arrays, the same whatever file or devices they came from; and of the files,
the same whatever dtype or form the arrays are read in."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.store.tree import flatten
from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face
from maxtext_like.storage import Place

_SAMPLES, _SAMPLE_BYTES = 256, 4096  # of a file; other weights are others nearly everywhere
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(params: Any) -> str:
  """64 hexadecimal digits of names, shapes, dtypes and every bit of the arrays.

  Computed where the arrays lie, in one reading of them; sums of integers modulo 2^32 come out alike on any devices.
  """
  flat = flatten(params)
  sums = jax.device_get(jax.jit(lambda arrays: {name: _sums(x) for name, x in arrays.items()})(flat))
  lines = [f"{name} {list(x.shape)} {x.dtype} {[int(n) for n in sums[name]]}" for name, x in sorted(flat.items())]
  return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sums(x: jax.Array) -> jax.Array:
  """uint32 [2] of an array's bits, each times an odd number that depends on its place, so that none can be exchanged."""
  bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
  place = jnp.zeros((), jnp.uint32)
  for axis in range(x.ndim):
    stride = math.prod(x.shape[axis + 1 :]) % 2**32
    place = place + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
  keys = [(place * jnp.uint32(factor) ^ (place >> 15)) | jnp.uint32(1) for factor in (0x9E3779B1, 0x85EBCA77)]
  return jnp.stack([jnp.sum(bits * key, dtype=jnp.uint32) for key in keys])


def of_files(directory: Path | Place) -> str | None:
  """Names the files of weights: "hf", or "step", and 64 hexadecimal digits; None: there are none on this machine's disks.

  Of safetensors files the sizes and parts all over them, in milliseconds; of a step the hashes that its manifest has.
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
