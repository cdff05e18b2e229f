"""The training state as a flat dictionary of named arrays, the form in which a checkpoint stores it.

Names are tree paths joined with dots (``params.stack_0.layer_0.mlp.down``, ``opt_state.0.mu.embedding.table``). ``None`` and
empty tuples (optax's masked leaves) contain no arrays and are dropped; the caller's tree restores them.
"""

from typing import Any

import jax


def _name(path: tuple[Any, ...]) -> str:
  parts = []
  for key in path:
    match key:
      case jax.tree_util.DictKey(key=part) | jax.tree_util.FlattenedIndexKey(key=part):
        parts.append(str(part))
      case jax.tree_util.SequenceKey(idx=part):
        parts.append(str(part))
      case jax.tree_util.GetAttrKey(name=part):
        parts.append(part)
      case _:
        raise ValueError(f"tree path {path}: cannot name a key of type {type(key).__name__}")
  return ".".join(parts)


def flatten(tree: Any) -> dict[str, Any]:
  """Returns the leaves of ``tree`` (arrays or ``ShapeDtypeStruct``) by name, in tree order.

  Raises:
    ValueError: two leaves get the same name, a leaf is not an array, or it is a typed random key.
  """
  flat: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = _name(path)
    if name in flat:
      raise ValueError(f"two leaves of the state are named {name!r}; rename a key that contains a dot")
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      raise ValueError(f"state leaf {name} is a {type(leaf).__name__}, not an array; store it in `extra` instead")
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      raise ValueError(f"state leaf {name} is a typed random key; store its jax.random.key_data instead")
    flat[name] = leaf
  return flat


def unflatten(like: Any, flat: dict[str, Any]) -> Any:
  """Returns a tree with the structure of ``like`` whose leaves are taken from ``flat`` by name."""
  paths, structure = jax.tree_util.tree_flatten_with_path(like)
  return jax.tree_util.tree_unflatten(structure, [flat[_name(path)] for path, _ in paths])


def describe(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the shape and dtype of every leaf in the format of the manifest."""
  return {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in flat.items()}


def total_bytes(flat: dict[str, Any]) -> int:
  """Returns the bytes of all leaves, each counted once even if it is replicated."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in flat.values())
