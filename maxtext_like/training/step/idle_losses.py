"""Auxiliary losses that change no trained parameter. Open this file to see which parameters a router's loss reaches."""

from collections.abc import Iterator

import jax

from maxtext_like.config.schema import Config
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.moe.moe import MoE
from maxtext_like.layers.param import path_keys
from maxtext_like.models.naming import row_names
from maxtext_like.training.step.program import TrainProgram

_AFTER_LAYERS = ("final_norm", "head")
_BEFORE_ROUTER = ("pre_attention_norm", "attention", "post_attention_norm", "moe.router")
"""Parts of a layer that its own router depends on."""
_NO_GRADIENT = "moe.router.per_expert_scale"
"""Gemma 4 multiplies the weights of the experts by it, after the losses have read the logits."""


def trained_names(program: TrainProgram) -> Iterator[str]:
  """Yield the names of all trained parameters, one for each trained layer of a stack."""
  rows = iter(program.selection.rows)
  leaves = jax.tree_util.tree_leaves_with_path(program.spec)
  for (path, _), trained in zip(leaves, jax.tree.leaves(program.selection.leaves), strict=True):
    if trained:
      names, chosen = row_names(program.model.decoder, path_keys(path)), next(rows)
      yield from names if chosen is None else (name for name, own in zip(names, chosen, strict=True) if own)


def reaches_router(name: str, decoder: Decoder) -> bool:
  """Return True if a router's losses have a gradient for the parameter: it is part of a router, or a router depends on it."""
  last = max((i for i, layer in enumerate(decoder.layers) if layer.cfg.ffn.experts is not None), default=-1)
  parts = name.split(".")
  # The indexer only selects keys, so no loss except the indexer's has a gradient for it.
  if last < 0 or parts[0] in _AFTER_LAYERS or "indexer" in parts:
    return False
  # The per-layer inputs (ple) are added after the feed-forward layer, so the router of the first layer does not see them.
  if parts[0] != "layers":
    return parts[0] != "ple" or last > 0
  number, rest = int(parts[1]), ".".join(parts[2:])
  within = lambda part: rest == part or rest.startswith(f"{part}.")
  if within("ple"):
    return number < last
  if within(_NO_GRADIENT) or number != last:
    return number < last
  # A router reads the normed input of the feed-forward layer, or the residual stream if it has a separate norm (Gemma 4).
  normed = ("pre_mlp_norm",) if isinstance(decoder.layers[last].ffn, MoE) else ()
  return any(within(part) for part in (*_BEFORE_ROUTER, *normed))


def idle_losses(program: TrainProgram) -> dict[str, str]:
  """Return the weights of auxiliary losses that are above 0 but have no effect on the training, with the reason for each.

  Masks of parameters and adapters decide it, so ``config/idle_keys.py``, which does not know the parameters, cannot.
  """
  decoder, names = program.model.decoder, list(trained_names(program))
  losses, _ = decoder.router_losses
  found: dict[str, str] = {}
  if not any(reaches_router(name, decoder) for name in names):
    weights = {"load_balance_loss_weight": losses.weight, "router_z_loss_weight": losses.z_weight}
    found |= {key: "no router depends on a trained parameter" for key, weight in weights.items() if weight}
  if _indexer_weight(program.config) and not any("indexer" in name.split(".") for name in names):
    found["indexer_loss_scaling_factor"] = "no parameter of an indexer is trained"
  return found


def _indexer_weight(config: Config) -> float:
  return getattr(config.model, "indexer_loss_scaling_factor", 0.0) if config.model.has("indexer") else 0.0
