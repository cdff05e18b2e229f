"""Selects the parameters that a run trains: by the model, by DeepSeek V3.2's dense warm-up, and by regular expressions.

A parameter tree is split into two trees of the same structure: trained leaves (None elsewhere) and frozen leaves (None
elsewhere). JAX and optax treat None as an empty tree, so frozen parameters have neither gradients nor moments.
"""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_like.config.model import ModelConfig
from maxtext_like.config.vision import VisionTower
from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.param import path_keys
from maxtext_like.models.adapter import Adapter
from maxtext_like.models.naming import row_names

Tree = Any


@dataclass(frozen=True, eq=False)
class Selection:
  """The trained parameters.

  Attributes:
    leaves: a bool for every leaf of the parameter tree, True if any part of it is trained.
    rows: for each trained leaf in order: bool [rows] if only some layers of its stack are trained, otherwise None.
  """

  leaves: Tree
  rows: tuple[np.ndarray | None, ...]

  def split(self, tree: Tree) -> tuple[Tree, Tree]:
    """Split a tree of the parameters' structure into (trained, frozen), each with None for the other's leaves."""
    trained = jax.tree.map(lambda keep, x: x if keep else None, self.leaves, tree)
    frozen = jax.tree.map(lambda keep, x: None if keep else x, self.leaves, tree)
    return trained, frozen

  @property
  def masks(self) -> Tree:
    """For each trained leaf: bool [rows] if only some layers of its stack are trained, otherwise True. None if frozen."""
    rows = iter(self.rows)

    def mask(trained: bool) -> Any:
      row = next(rows) if trained else None
      return (True if row is None else row) if trained else None

    return jax.tree.map(mask, self.leaves)

  def mask_rows(self, trained: Tree) -> Tree:
    """Set the rows of frozen layers to zero, in gradients or updates of the trained leaves."""

    def mask(rows, x):
      return x if rows is None else jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    leaves, structure = jax.tree.flatten(trained)
    return jax.tree.unflatten(structure, [mask(r, x) for r, x in zip(self.rows, leaves, strict=True)])


def merge(trained: Tree, frozen: Tree) -> Tree:
  """Join the two parts of ``Selection.split``."""
  return jax.tree.map(lambda t, f: f if t is None else t, trained, frozen, is_leaf=lambda x: x is None)


def _held(name: str, vision_tower: VisionTower | None) -> bool:
  """Return True if the ``vision_tower`` key freezes this parameter of the vision tower."""
  projector = name.startswith("vision.projector")
  return name.startswith("vision.") and (vision_tower == "frozen" or (vision_tower == "projector" and not projector))


def select(
  decoder: Decoder,
  spec: Tree,
  model: ModelConfig,
  patterns: tuple[str, ...],
  adapter: Adapter | None = None,
  vision_tower: VisionTower | None = None,
) -> Selection:
  """Decide for every parameter whether it is trained.

  Args:
    decoder: gives the names of parameters.
    spec: the objective's ``params()``.
    model: may restrict training to one part of each layer, such as the indexer in DeepSeek V3.2's dense warm-up.
    patterns: regular expressions, searched in names such as ``layers.7.mlp.down``; empty selects all.
    adapter: only its factors in its own layers, and the weights that it trains completely, are trained.
    vision_tower: which of the vision tower's own weights are trained; unused with an adapter, which has its own keys.

  Raises:
    UserError: no parameter would be trained, or a pattern matches no parameter.
  """
  # Some models train one part only.
  part, why = model.trained_part or ("", "")
  compiled = [re.compile(p) for p in patterns]
  used = dict.fromkeys(patterns, False)

  # All conditions must hold: adapter, vision tower, patterns, part of the model.
  def wanted(name: str) -> bool:
    hits = [c for c in compiled if c.search(name)]
    used.update((c.pattern, True) for c in hits)
    adapted = adapter is None or name.rpartition(".")[0] in adapter.trained
    held = adapter is None and _held(name, vision_tower)
    return adapted and not held and bool(hits or not compiled) and (not part or f".{part}." in name)

  # A stacked leaf is trained if any of its layers is; the other layers are masked.
  leaves, rows = [], []
  for path, p in jax.tree_util.tree_leaves_with_path(spec):
    chosen = np.array([wanted(name) for name in row_names(decoder, path_keys(path))])
    keep = p.trainable and bool(chosen.any())
    leaves.append(keep)
    if keep:
      rows.append(None if chosen.all() else chosen)
  # A pattern without a match is probably misspelled.
  if unused := [p for p, hit in used.items() if not hit]:
    names = [row_names(decoder, path_keys(path))[0] for path, _ in jax.tree_util.tree_leaves_with_path(spec)]
    raise UserError(
      f"trainable_parameters_mask: {', '.join(map(repr, unused))} matches no parameter name; names look like "
      f"{', '.join(names[:2])}, {names[-1]}\n  fix: correct or remove the pattern"
    )
  if not any(leaves):
    raise UserError(
      f"no parameter would be trained: trainable_parameters_mask={list(patterns)} selects no trainable parameter"
      + (f", because {why}" if why else "; arrays such as layer_scalar and the router bias have no gradient"),
      fix="set trainable_parameters_mask to patterns that match other parameters, or leave it out",
    )
  return Selection(jax.tree.unflatten(jax.tree.structure(spec), leaves), tuple(rows))


def mask_row(tree: Tree, masks: Tree, row: jax.Array | None) -> Tree:
  """Apply ``Selection.mask_rows`` to the arrays of one row: zeros if the layer is frozen but its stack is trained.

  Args:
    tree: arrays of one row, or of parameters outside the stacks.
    masks: ``Selection.masks`` of the same leaves.
    row: int32 scalar, index of the row; None outside the stacks.
  """
  return jax.tree.map(lambda x, m: x if m is True else jnp.where(jnp.asarray(m)[row], x, jnp.zeros((), x.dtype)), tree, masks)
