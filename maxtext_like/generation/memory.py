"""Memory of a loaded model and of generation, estimated before anything is allocated."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.checkpoint.adapters.adapted_weights import stored_as
from maxtext_like.errors import DoesNotFitError, UserError
from maxtext_like.generation import shapes
from maxtext_like.generation.slots import Draft
from maxtext_like.layers.cache import split_axes
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys
from maxtext_like.layers.partition import Mesh, axes_of
from maxtext_like.models.model import Model
from maxtext_like.sharding import processes

_GIB = 1 << 30
_PEERS_SECONDS = 600.0  # how long a process waits for the free memory of the others
_exchanges = itertools.count()
_BITS = {"int8": 8.0, "nf4": 4.127}
"""Formats of ``base_weights`` that messages advise, with their bits per weight."""


def weight_bytes(model: Model, *, narrow: bool = False) -> int:
  """Return the bytes of the stored weights on one device. ``narrow``: with float32 arrays in bfloat16."""
  quantized = {} if model.base is None else model.base.weights
  total = 0
  for path, x in jax.tree_util.tree_leaves_with_path(model.abstract_params):
    own = _own_bytes(x)
    total += own // 2 if narrow and x.dtype == jnp.float32 and path_keys(path)[:-1] not in quantized else own
  return total


def _own_bytes(x: Any) -> int:
  """Return the bytes of an array on one of its devices."""
  return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def require_room_for_weights(model: Model) -> None:
  """Raise DoesNotFitError if the weights of a model do not fit the free memory of its devices.

  Devices that do not report their memory are not checked.
  """
  assert isinstance(model.mesh, jax.sharding.Mesh)
  free = min((x for x in map(_free, model.mesh.local_devices) if x is not None), default=None)
  if free is None or (wanted := weight_bytes(model)) <= free:
    return
  remedies = [f"{words} ({own / _GIB:.1f} GiB)" for words, own in _smaller(model) if own <= free]
  raise DoesNotFitError(
    f"the weights do not fit: they need {wanted / _GIB:.1f} GiB on each device, and {free / _GIB:.1f} GiB are free\n"
    f"  fix: {', or '.join([*remedies, 'more devices (ici_tensor_parallelism=N)'])}"
  )


def _smaller(model: Model) -> Iterator[tuple[str, int]]:
  """Yield settings with which the same weights take less memory, and their bytes."""
  now = None if model.base is None else model.base.form.name
  narrow = ["weight_dtype=bfloat16"] if model.config.precision.weight_dtype == "float32" else []
  if narrow:
    yield narrow[0], weight_bytes(model, narrow=True)
  for form, bits in _BITS.items():
    if now is not None and _BITS.get(now, 16.0) <= bits:
      continue
    settings = dataclasses.replace(model.config.adapter, base_weights=form)
    try:
      stored = stored_as(dataclasses.replace(model, base=None), settings)
    except UserError:  # the mesh divides blocks of this format, so it is no remedy
      continue
    yield " ".join([f"base_weights={form}", *narrow]), weight_bytes(stored, narrow=bool(narrow))


def _free(device: Any) -> int | None:
  """Return the free bytes of a device; None if it does not report them."""
  stats = device.memory_stats()
  return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def saved_bytes(decoder: Decoder, params: Any, form: str) -> float:
  """Return the bytes that quantizing the plain linear weights of all layers to ``form`` would save on one device."""
  declared = {path_keys(path): p for path, p in jax.tree_util.tree_leaves_with_path(decoder.params())}
  stacks, saved = {s.name for s in decoder.stacks}, 0.0
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    # Parameters for decoding have a tuple of rows for each stack.
    keys = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
    p = declared.get(keys)
    if p is not None and keys[0] in stacks and p.contracts and not {"router", "indexer"} & set(keys):
      saved += _own_bytes(x) * (1 - _BITS[form] / (8 * x.dtype.itemsize))
  return saved


def cache_bytes(
  decoder: Decoder, slots: int, capacity: int, *, int8: bool = False, mesh: Mesh | None = None, spare: int = 0
) -> int:
  """Return the bytes of the caches of all layers on one device.

  ``mesh``: the devices that share them; None: one device. The other arguments are as for ``Decoder.empty_cache``.
  """
  return sum(count * size for count, size in _layer_bytes(decoder, slots, capacity, int8=int8, mesh=mesh, spare=spare))


def _layer_bytes(
  decoder: Decoder, slots: int, capacity: int, *, int8: bool, mesh: Mesh | None, spare: int
) -> Iterator[tuple[int, int]]:
  """Yield numbers of layers with equal caches, and the bytes of the caches of one of them. See ``cache_bytes``."""
  arrays = jax.eval_shape(lambda: decoder.empty_cache(slots, capacity, int8=int8, spare=spare))
  for layer in (layer for stack in arrays.values() for layer in stack.values()):
    repeats, size = 1, 0
    for x in layer.values():
      parts = 1
      if mesh is not None:
        axes = split_axes(len(x.shape), stacked=True)
        entries = decoder.cfg.rules.spec(x.shape[: len(axes)], axes, mesh)
        parts = math.prod(mesh.shape[axis] for entry in entries for axis in axes_of(entry))
      repeats = x.shape[0]
      size += x.size // repeats * x.dtype.itemsize // parts
    yield repeats, size


def work_bytes(decoder: Decoder, slots: int, capacity: int, *, proposed: int = 0) -> int:
  """Return an estimate of the temporary bytes of the programs: the larger one of drawing tokens and of attention in a call.

  ``proposed``: number of tokens that a draft model proposes before each pass.
  """
  # Logits in float32, their copy after the filters, and the random numbers.
  drawing = 3 * 4 * slots * decoder.cfg.embedding.vocab_size
  # Scores of the attention heads in float32, and their softmax, of a prefill call or a pass.
  chunk = shapes.CHUNKS[-1]
  tokens = max(shapes.prefill_rows(chunk, slots) * chunk, slots * (proposed + 1))
  heads = max(layer.mixer.case(chunk, images=False).query_heads for layer in decoder.layers)
  return max(drawing, 2 * 4 * tokens * heads * (capacity + chunk))


def require_room(
  decoder: Decoder,
  slots: int,
  longest: int,
  *,
  grows: bool,
  int8: bool,
  device: Any,
  mesh: Mesh | None = None,
  params: Any = None,
  penalties: bool = False,
  draft: Draft | None = None,
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
    params: the weights, for advice to quantize them; None: no such advice.
    penalties: the tokens of each answer are counted.
    draft: a draft model, whose weights are in memory.
  """
  own = None if device is None else _free(device)
  # Two alternating names, because this runs on a thread (see ``processes.everyone``).
  found = processes.everyone("" if own is None else str(own), _PEERS_SECONDS, f"generation-memory-{next(_exchanges) % 2}")
  if not all(found):
    return
  free = min(map(int, found))
  capacity = shapes.grown_capacity(longest, longest)

  def needed(slots: int, int8: bool, draft: Draft | None = draft) -> float:
    # While caches grow, half of the final size is still in use by the previous ones.
    decoders, spare = ([decoder, draft.decoder], draft.tokens) if draft else ([decoder], 0)
    caches = sum(cache_bytes(of, slots, capacity, int8=int8, mesh=mesh, spare=spare) for of in decoders)
    # A bool and an int32 for each token of the vocabulary.
    counts = 5 * slots * decoder.cfg.embedding.vocab_size if penalties else 0
    # Logits of the model, and probabilities of the draft model, for all places of a pass, in float32.
    checked = 4 * 2 * (spare + 1) * slots * decoder.cfg.embedding.vocab_size if draft else 0
    # Each step of the draft model reads a copy of a layer's entries, in its dtype and without rejected proposals.
    layers = _layer_bytes(draft.decoder, slots, capacity, int8=False, mesh=mesh, spare=spare) if draft else ()
    copied = max((size for _, size in layers), default=0)
    work = max(work_bytes(of, slots, capacity, proposed=spare) for of in decoders)
    return caches * (1.5 if grows else 1) + counts + checked + copied + work

  if (wanted := needed(slots, int8)) <= free:
    return
  fitting = slots
  while fitting > 1 and needed(fitting, int8) > free:
    fitting //= 2
  remedies = [f"slots={fitting} (--slots {fitting})"] if needed(fitting, int8) <= free else []
  if draft is not None and needed(slots, int8, None) <= free:
    remedies.append("no draft model")
  if not int8 and needed(slots, True) <= free:
    remedies.append("int8_cache=True (--int8-cache)")
  if params is not None:
    forms = [form for form in _BITS if (saved := saved_bytes(decoder, params, form)) and wanted - saved <= free]
    remedies += [f"base_weights={forms[0]} (weights in fewer bits)"] if forms else []
  raise DoesNotFitError(
    f"generation does not fit: {slots} answers of up to {longest:,} tokens, with their prompts, need about "
    f"{wanted / _GIB:.1f} GiB for caches and logits, and {free / _GIB:.1f} GiB are free\n"
    f"  fix: {', or '.join([*remedies, 'a smaller max_tokens'])}"
  )
