"""Computation of the auxiliary losses of a router: statistics of a layer, and the losses of a model.

Trainers use the name "load balancing loss" for sums that differ by factors of k (experts per token), of the number of layers,
and of the part of the batch over which statistics are computed. Therefore ``load_balance_loss`` selects a definition, and a
weight is suitable for one definition only. docs/explanation/load-balancing.md compares the formulas.

B batch, T position, E experts, k experts per token, L layers with experts.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from maxtext_like.layers.moe.router_losses import LOSS, Z_LOSS, RouterLosses

LOAD = "balance_load"
"""float32 [L, E], expert choices per token, averaged over tokens. In aux it is that of this batch. In a batch it is that of the
complete batch, if the batch is one of several parts (``RouterLosses.needs_batch_load``)."""

_PROBS, _BY_ROW = "balance_probs", "balance_by_row"


def statistics(
  losses: RouterLosses, real_BT: jax.Array, probs_BTE: jax.Array, experts_BTk: jax.Array, logits_BTE: jax.Array | None = None
) -> dict[str, jax.Array]:
  """Return the statistics that one layer contributes to ``totals``.

  Args:
    losses: the definition and the weights.
    real_BT: float32, 1 for a token and 0 for padding.
    probs_BTE: the probabilities of the definition.
    experts_BTk: int32, the choices that the definition counts.
    logits_BTE: router logits; the z-loss reads them.
  """
  # Count real tokens only.
  found: dict[str, jax.Array] = {}
  tokens_B = jnp.sum(real_BT, axis=1)
  tokens = jnp.maximum(jnp.sum(tokens_B), 1.0)
  if losses.weight:
    E = probs_BTE.shape[-1]
    # Sum over k before the products: [B, T, k, E] in float32 would be larger than the activations of the experts.
    chosen_BTE = jnp.sum(jax.nn.one_hot(experts_BTk, E, dtype=jnp.float32), axis=2)
    counts_BE = jnp.einsum("BTE,BT->BE", chosen_BTE, real_BT)
    probs_BE = jnp.einsum("BTE,BT->BE", probs_BTE.astype(jnp.float32), real_BT)
    # Either a loss for each row, or the two means over all tokens, whose product is taken after the layers are combined.
    if losses.by_row:
      divisor_B = jnp.maximum(tokens_B, 1.0)
      loss_B = E * jnp.sum(counts_BE * probs_BE, axis=1) / jnp.square(divisor_B)
      found[_BY_ROW] = jnp.sum(loss_B) / jnp.maximum(jnp.sum(tokens_B > 0), 1)
    else:
      found |= {LOAD: jnp.sum(counts_BE, axis=0) / tokens, _PROBS: jnp.sum(probs_BE, axis=0) / tokens}
  if losses.z_weight:
    assert logits_BTE is not None, "the router returns its logits if there is a z-loss"
    log_z_BT = jax.nn.logsumexp(logits_BTE.astype(jnp.float32), axis=-1)
    found[Z_LOSS] = jnp.sum(jnp.square(log_z_BT) * real_BT) / tokens
  return found


def totals(
  losses: RouterLosses, layers: Mapping[str, jax.Array], k: int, load_LE: jax.Array | None = None
) -> dict[str, jax.Array]:
  """Compute the weighted losses of a model, float32 scalars by name. Losses without a weight are left out.

  Args:
    losses: the definition and the weights.
    layers: ``statistics`` of all layers with experts, stacked along a first axis of L.
    k: experts per token.
    load_LE: ``LOAD`` of the complete batch, if ``layers`` are those of a part of it.
  """
  found: dict[str, jax.Array] = {}
  if losses.weight and losses.by_row:
    loss_L = layers[_BY_ROW]
    found[LOSS] = losses.weight * (jnp.mean(loss_L) if losses.definition == "maxtext" else jnp.sum(loss_L) / k)
  elif losses.weight:
    probs_LE = layers[_PROBS]
    load_LE = jax.lax.stop_gradient(layers[LOAD] if load_LE is None else load_LE)
    # Either the product of means over layers, or the sum over layers of products.
    E = probs_LE.shape[1]
    if losses.definition == "huggingface":
      found[LOSS] = losses.weight * E * jnp.sum(jnp.mean(load_LE, axis=0) * jnp.mean(probs_LE, axis=0))
    else:
      found[LOSS] = losses.weight * E / k * jnp.sum(load_LE * probs_LE)
  if losses.z_weight:
    found[Z_LOSS] = losses.z_weight * jnp.sum(layers[Z_LOSS])
  return found


NAMES: Sequence[str] = (LOAD, _PROBS, _BY_ROW, Z_LOSS)
"""Names of all ``statistics``."""
