"""Extends the embedding and output head of a checkpoint for a model with a larger vocabulary.

A tokenizer with added tokens has more ids than the checkpoint has rows in its embedding, and in its output head if that is a
separate table. Each new row is the mean of the checkpoint's rows. transformers' ``resize_token_embeddings`` does the same, and
adds noise with 1e-9 times their covariance.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.checkpoint.adapters.adapted_weights import stored_as
from maxtext_like.checkpoint.huggingface import tensors
from maxtext_like.checkpoint.huggingface.config import read_config
from maxtext_like.checkpoint.store import manifest
from maxtext_like.checkpoint.weight_sources import find_step, is_hugging_face, local_hugging_face
from maxtext_like.config.load import unchecked_section
from maxtext_like.config.model import ModelConfig
from maxtext_like.models.model import Model, make_model
from maxtext_like.sharding.mesh import use_mesh
from maxtext_like.storage import Place

_log = logging.getLogger(__name__)

_SIZES = ("vocab_size", "vocab_size_per_layer_input")
"""Keys that give numbers of rows. The second is for Gemma 4's per-layer embedding."""


def with_stored_vocabulary(directory: Path | Place, model: Model) -> Model | None:
  """Returns the model with the vocabulary of a checkpoint if that is smaller than the model's, else None.

  Args:
    directory: a Hugging Face checkpoint, a run or a step. Unreadable files are reported later, when its weights are read.
    model: the model that gets the parameters.

  Raises:
    UserError: as ``read_config``; the smaller vocabulary cannot be split over the mesh.
  """
  own = model.config.model
  sizes = _sizes(directory, own)
  if not any(was < now for was, now in sizes.values()):
    return None
  fewer = {key: min(was, now) for key, (was, now) in sizes.items()}
  config = dataclasses.replace(model.config, model=dataclasses.replace(own, **fewer))
  made = make_model(config, mesh=model.mesh, platform=model.platform, runs_attention=False)
  return stored_as(made, config.adapter) if model.base is not None else made


def fewer_rows(directory: Path | Place, model: ModelConfig) -> dict[str, tuple[int, int]]:
  """Returns the numbers of rows of a checkpoint and of a model, by key, where the checkpoint has fewer.

  Empty if the checkpoint cannot be read.

  Args:
    directory: as for ``with_stored_vocabulary``.
    model: the ``model:`` section that is compared.
  """
  return {key: (was, now) for key, (was, now) in _sizes(directory, model).items() if was < now}


def _sizes(directory: Path | Place, own: ModelConfig) -> dict[str, tuple[int, int]]:
  """Returns the numbers of rows of a checkpoint and of a model of its family, by key, for tables that both have."""
  stored = _stored_model(directory)
  if stored.get("decoder_block") != own.decoder_block:
    return {}  # reading the weights refuses another family
  there = unchecked_section("model", stored)
  # A null key means the value of another key, and a key without effect is None.
  sizes = {key: (there.effective(key), own.effective(key)) for key in _SIZES if hasattr(own, key)}
  return {key: (was, now) for key, (was, now) in sizes.items() if was and now}


def _stored_model(directory: Path | Place) -> dict[str, Any]:
  """Returns the ``model:`` section of a checkpoint; empty if it is damaged or missing."""
  if is_hugging_face(directory):
    return read_config(local_hugging_face(directory, weights=False)).model
  if (step := find_step(directory)) is None:
    return {}
  try:
    return manifest.read(step).config.get("model", {})
  except (manifest.DamageError, OSError):
    return {}


def with_added_rows(params: Any, model: Model, directory: Path | Place) -> Any:
  """Adds rows to the parameters of a smaller vocabulary.

  Args:
    params: parameters of ``with_stored_vocabulary``'s model.
    model: the model that gets them; it also determines the shardings.
    directory: source of the parameters, for the log.
  """
  wanted = dict(tensors.flatten(model.abstract_params))
  fewer = {path: x for path, x in tensors.flatten(params) if x.shape != wanted[path].shape}
  with use_mesh(model.mesh):
    grow = jax.jit(
      lambda arrays: {name: _grown(x, wanted[name].shape) for name, x in arrays.items()},
      out_shardings={path: wanted[path].sharding for path in fewer},
    )
    grown = grow(fewer)
  adapter = model.config.adapter
  _log.warning(
    "%s has fewer token ids than vocab_size=%d: rows are added to %s; each new row is the mean of the existing rows%s",
    directory, model.config.model.vocab_size,
    ", ".join(f"{'.'.join(path)} {x.shape} -> {wanted[path].shape}" for path, x in fewer.items()),
    "; the adapter does not train them, set modules_to_save=[embed_tokens] to do so"
    if adapter.lora_rank and not adapter.modules_to_save else "",
  )  # fmt: skip

  def walk(node: Any, path: tuple[str, ...]) -> Any:
    if path in grown:
      return grown[path]
    return {key: walk(value, (*path, key)) for key, value in node.items()} if isinstance(node, dict) else node

  return walk(params, ())


def _grown(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns an array extended along the one axis in which it is shorter than ``shape``."""
  (axis,) = (i for i, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b)
  mean = jnp.mean(x, axis, keepdims=True, dtype=jnp.float32).astype(x.dtype)
  added = [*x.shape]
  added[axis] = shape[axis] - x.shape[axis]
  return jnp.concatenate([x, jnp.broadcast_to(mean, added)], axis)
