"""Memory of generation, estimated before anything is allocated."""

import itertools
import math
from typing import Any

import jax

from maxtext_like.errors import DoesNotFitError
from maxtext_like.generation import shapes
from maxtext_like.layers.cache import split_axes
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.partition import Mesh, axes_of
from maxtext_like.sharding import processes

_GIB = 1 << 30
_PEERS_SECONDS = 600.0  # how long a process waits for the free memory of the others
_exchanges = itertools.count()


def cache_bytes(decoder: Decoder, slots: int, capacity: int, *, int8: bool = False, mesh: Mesh | None = None) -> int:
  """Return the bytes of the caches of all layers on one device. ``mesh``: the devices that share them; None: one device."""
  arrays = jax.eval_shape(lambda: decoder.empty_cache(slots, capacity, int8=int8))
  total = 0
  for x in jax.tree.leaves(arrays):
    parts = 1
    if mesh is not None:
      axes = split_axes(len(x.shape), stacked=True)
      entries = decoder.cfg.rules.spec(x.shape[: len(axes)], axes, mesh)
      parts = math.prod(mesh.shape[axis] for entry in entries for axis in axes_of(entry))
    total += x.size * x.dtype.itemsize // parts
  return total


def work_bytes(decoder: Decoder, slots: int, capacity: int) -> int:
  """Return an estimate of the temporary bytes of the programs: the larger one of drawing tokens and of a prefill call."""
  # Logits in float32, their copy after the filters, and the random numbers.
  drawing = 3 * 4 * slots * decoder.cfg.embedding.vocab_size
  # Scores of the attention heads in float32, and their softmax.
  chunk = shapes.CHUNKS[-1]
  rows = shapes.prefill_rows(chunk, slots)
  heads = max(layer.mixer.case(chunk, images=False).query_heads for layer in decoder.layers)
  return max(drawing, 2 * 4 * rows * heads * chunk * (capacity + chunk))


def require_room(
  decoder: Decoder,
  slots: int,
  longest: int,
  *,
  grows: bool,
  int8: bool,
  device: Any,
  mesh: Mesh | None = None,
) -> None:
  """Raise DoesNotFitError if the caches of ``slots`` answers do not fit the free memory of a device.

  Args:
    decoder: the model, whose weights are in memory.
    slots: number of slots.
    longest: tokens of the longest prompt with its answer.
    grows: the caches start smaller and are copied to larger ones.
    int8: 8-bit caches.
    device: a device of this process; None if it is unknown. Devices that do not report their memory are not checked. The
      processes of a run decide by the smallest free memory, so that all of them continue or none.
    mesh: the devices that share the caches; None: one device.
  """
  stats = None if device is None else device.memory_stats()
  own = stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None
  # Two alternating names, because this runs on a thread (see ``processes.everyone``).
  found = processes.everyone("" if own is None else str(own), _PEERS_SECONDS, f"generation-memory-{next(_exchanges) % 2}")
  if not all(found):
    return
  free = min(map(int, found))
  capacity = shapes.grown_capacity(longest, longest)

  def needed(slots: int, int8: bool) -> float:
    # While caches grow, half of the final size is still in use by the previous ones.
    caches = cache_bytes(decoder, slots, capacity, int8=int8, mesh=mesh)
    return caches * (1.5 if grows else 1) + work_bytes(decoder, slots, capacity)

  if (wanted := needed(slots, int8)) <= free:
    return
  fitting = slots
  while fitting > 1 and needed(fitting, int8) > free:
    fitting //= 2
  remedies = [f"slots={fitting} (--slots {fitting})"] if needed(fitting, int8) <= free else []
  if not int8 and needed(slots, True) <= free:
    remedies.append("int8_cache=True (--int8-cache)")
  raise DoesNotFitError(
    f"generation does not fit: {slots} answers of up to {longest:,} tokens, with their prompts, need about "
    f"{wanted / _GIB:.1f} GiB for caches and logits, and {free / _GIB:.1f} GiB are free\n"
    f"  fix: {', or '.join([*remedies, 'a smaller max_tokens'])}"
  )
