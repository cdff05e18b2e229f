"""Which parameters a run trains: the model's own say, the dense warm-up of DeepSeek V3.2, and the user's regular expressions.

A parameter tree is split into two trees of its structure: trained leaves (None elsewhere) and frozen ones (None elsewhere).
JAX and optax take None for an empty tree, so neither gradients nor moments exist for what is frozen.
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
from maxtext_like.models.adapter import Adapter
from maxtext_like.models.naming import path_keys, row_names

Tree = Any


@dataclass(frozen=True, eq=False)
class Selection:
  """What is trained.

  Attributes:
    leaves: a bool for every leaf of the parameter tree: any part of it is trained.
    rows: for each trained leaf in order: bool [rows] where only some layers of its stack are trained, else None.
  """

  leaves: Tree
  rows: tuple[np.ndarray | None, ...]

  def split(self, tree: Tree) -> tuple[Tree, Tree]:
    """A tree of the parameters' structure as (trained, frozen), with None in the place of the other."""
    trained = jax.tree.map(lambda keep, x: x if keep else None, self.leaves, tree)
    frozen = jax.tree.map(lambda keep, x: None if keep else x, self.leaves, tree)
    return trained, frozen

  @property
  def masks(self) -> Tree:
    """For each trained leaf: bool [rows] where only some layers of its stack are trained, else True; None for frozen ones."""
    rows = iter(self.rows)

    def mask(trained: bool) -> Any:
      row = next(rows) if trained else None
      return (True if row is None else row) if trained else None

    return jax.tree.map(mask, self.leaves)

  def mask_rows(self, trained: Tree) -> Tree:
    """Zeros in the rows of trained leaves that belong to frozen layers: for gradients and for updates."""

    def mask(rows, x):
      return x if rows is None else jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    leaves, structure = jax.tree.flatten(trained)
    return jax.tree.unflatten(structure, [mask(r, x) for r, x in zip(self.rows, leaves, strict=True)])


def merge(trained: Tree, frozen: Tree) -> Tree:
  """The whole tree from the two parts of ``Selection.split``."""
  return jax.tree.map(lambda t, f: f if t is None else t, trained, frozen, is_leaf=lambda x: x is None)


def _held(name: str, vision_tower: VisionTower | None) -> bool:
  """Whether the key keeps a parameter of the tower as it is."""
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
  """Decides for every parameter whether it is trained.

  Args:
    decoder: for the names of parameters.
    spec: the objective's ``params()``.
    model: may have one part of a layer trained alone, as the indexer of DeepSeek V3.2 in its dense warm-up.
    patterns: regular expressions, searched in names like ``layers.7.mlp.down``; none: all.
    adapter: of whose factors those of its own layers are trained, and what it has whole.
    vision_tower: what is trained of the tower's own weights; an adapter has its own names.

  Raises:
    UserError: nothing would be trained, or a pattern fits no parameter.
  """
  part, why = model.trained_part or ("", "")
  compiled = [re.compile(p) for p in patterns]
  used = dict.fromkeys(patterns, False)

  def wanted(name: str) -> bool:
    hits = [c for c in compiled if c.search(name)]
    used.update((c.pattern, True) for c in hits)
    adapted = adapter is None or name.rpartition(".")[0] in adapter.trained
    held = adapter is None and _held(name, vision_tower)
    return adapted and not held and bool(hits or not compiled) and (not part or f".{part}." in name)

  leaves, rows = [], []
  for path, p in jax.tree_util.tree_leaves_with_path(spec):
    chosen = np.array([wanted(name) for name in row_names(decoder, path_keys(path))])
    keep = p.trainable and bool(chosen.any())
    leaves.append(keep)
    if keep:
      rows.append(None if chosen.all() else chosen)
  if unused := [p for p, hit in used.items() if not hit]:
    names = [row_names(decoder, path_keys(path))[0] for path, _ in jax.tree_util.tree_leaves_with_path(spec)]
    raise UserError(
      f"trainable_parameters_mask: {', '.join(map(repr, unused))} fits no parameter name; names look like "
      f"{', '.join(names[:2])}, {names[-1]}"
    )
  if not any(leaves):
    raise UserError(
      f"nothing would be trained: trainable_parameters_mask {list(patterns)} leaves no trainable parameter"
      + (f", since {why}" if why else "; arrays such as layer_scalar and the router's bias are never trained by gradient")
    )
  return Selection(jax.tree.unflatten(jax.tree.structure(spec), leaves), tuple(rows))


def mask_row(tree: Tree, masks: Tree, row: jax.Array | None) -> Tree:
  """What ``Selection.mask_rows`` does, of the arrays of one row: zeros where a layer is frozen whose stack is trained.

  Args:
    tree: arrays of a row, or of what lies in no stack.
    masks: of the same leaves, as of ``Selection.masks``.
    row: int32 scalar, which row; None: of no stack.
  """
  return jax.tree.map(lambda x, m: x if m is True else jnp.where(jnp.asarray(m)[row], x, jnp.zeros((), x.dtype)), tree, masks)
