"""Auxiliary losses of a router: the definitions of the load-balancing loss, and the router z-loss.

Trainers use the words "load balancing loss" for sums that differ by factors of k (experts a token), of the number of layers
and of the part of the batch that statistics are taken over. So ``load_balance_loss`` names a definition, and a weight is right
for one definition only. docs/load-balancing.md has the formulas side by side.

B batch, T position, E experts, k experts a token, L layers with experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Definition = Literal["maxtext", "huggingface", "deepseek_sequence", "switch"]

LOSS, Z_LOSS = "load_balance_loss", "router_z_loss"
LOAD = "balance_load"
"""float32 [L, E], expert choices a token, mean over the tokens of a batch: of this batch in aux, of the complete batch where a
batch brings it (``RouterLosses.needs_batch_load``)."""

_PROBS, _BY_ROW = "balance_probs", "balance_by_row"


@dataclass(frozen=True)
class RouterLosses:
  """The auxiliary losses of a router and their weights.

  With f_e the number of tokens that choose expert e, divided by the number of tokens (so that f sums to k), and P_e the mean
  probability of expert e, the definitions are:

  - "maxtext": mean over layers and rows of E * sum_e f_e P_e; f and P of a row. P is a softmax.
  - "deepseek_sequence": sum over layers of the mean over rows of E / k * sum_e f_e P_e; f and P of a row. P is s / sum(s) of
    the affinities s, and f counts the k largest s, without the bias and the groups of the router (DeepSeek-V3,
    arXiv:2412.19437, equations 17 to 20).
  - "huggingface": E * sum_e f_e P_e; f and P are means over all layers and all tokens of the batch. P is a softmax.
  - "switch": sum over layers of E / k * sum_e f_e P_e; f and P of all tokens of the batch (Fedus et al. 2021, arXiv:2101.03961;
    Megatron's ``moe_aux_loss_coeff``).

  Rows are the sequences of a batch, however many documents are packed into one. Padding does not count.

  The z-loss is the sum over layers of the mean over tokens of log(sum_e exp(logit_e))^2 (Zoph et al. 2022, arXiv:2202.08906).

  Attributes:
    definition: of the load-balancing loss.
    weight: of the load-balancing loss; 0 is off.
    z_weight: of the router z-loss; 0 is off.
  """

  definition: Definition = "switch"
  weight: float = 0.0
  z_weight: float = 0.0

  @property
  def by_row(self) -> frozenset[str]:
    """Losses that are means over the rows of a batch; the other ones are means over its tokens."""
    return frozenset({LOSS}) if self.weight and self.definition in ("maxtext", "deepseek_sequence") else frozenset()

  @property
  def needs_batch_load(self) -> bool:
    """The loss is a product of two means over the complete batch. The gradient of a part of the batch needs ``LOAD`` of the
    complete batch."""
    return bool(self.weight) and not self.by_row

  def statistics(
    self, real_BT: jax.Array, probs_BTE: jax.Array, experts_BTk: jax.Array, logits_BTE: jax.Array | None = None
  ) -> dict[str, jax.Array]:
    """What one layer contributes to ``totals``.

    Args:
      real_BT: float32, 1 for a token and 0 for padding.
      probs_BTE: the probabilities of the definition.
      experts_BTk: int32, the choices that the definition counts.
      logits_BTE: of the router; the z-loss reads them.
    """
    found: dict[str, jax.Array] = {}
    tokens_B = jnp.sum(real_BT, axis=1)
    tokens = jnp.maximum(jnp.sum(tokens_B), 1.0)
    if self.weight:
      E = probs_BTE.shape[-1]
      # Summed over k before the products, since [B, T, k, E] in float32 would be larger than the experts' own activations.
      chosen_BTE = jnp.sum(jax.nn.one_hot(experts_BTk, E, dtype=jnp.float32), axis=2)
      counts_BE = jnp.einsum("BTE,BT->BE", chosen_BTE, real_BT)
      probs_BE = jnp.einsum("BTE,BT->BE", probs_BTE.astype(jnp.float32), real_BT)
      if self.by_row:
        divisor_B = jnp.maximum(tokens_B, 1.0)
        loss_B = E * jnp.sum(counts_BE * probs_BE, axis=1) / jnp.square(divisor_B)
        found[_BY_ROW] = jnp.sum(loss_B) / jnp.maximum(jnp.sum(tokens_B > 0), 1)
      else:
        found |= {LOAD: jnp.sum(counts_BE, axis=0) / tokens, _PROBS: jnp.sum(probs_BE, axis=0) / tokens}
    if self.z_weight:
      assert logits_BTE is not None, "the router hands out its logits where there is a z-loss"
      log_z_BT = jax.nn.logsumexp(logits_BTE.astype(jnp.float32), axis=-1)
      found[Z_LOSS] = jnp.sum(jnp.square(log_z_BT) * real_BT) / tokens
    return found

  def totals(self, layers: Mapping[str, jax.Array], k: int, load_LE: jax.Array | None = None) -> dict[str, jax.Array]:
    """The weighted losses of a model, float32 scalars by name; only those that have a weight.

    Args:
      layers: ``statistics`` of all layers with experts, stacked along a first axis of L.
      k: experts a token.
      load_LE: ``LOAD`` of the complete batch, where ``layers`` are those of a part of it.
    """
    found: dict[str, jax.Array] = {}
    if self.weight and self.by_row:
      loss_L = layers[_BY_ROW]
      found[LOSS] = self.weight * (jnp.mean(loss_L) if self.definition == "maxtext" else jnp.sum(loss_L) / k)
    elif self.weight:
      probs_LE = layers[_PROBS]
      load_LE = jax.lax.stop_gradient(layers[LOAD] if load_LE is None else load_LE)
      E = probs_LE.shape[1]
      if self.definition == "huggingface":
        found[LOSS] = self.weight * E * jnp.sum(jnp.mean(load_LE, axis=0) * jnp.mean(probs_LE, axis=0))
      else:
        found[LOSS] = self.weight * E / k * jnp.sum(load_LE * probs_LE)
    if self.z_weight:
      found[Z_LOSS] = self.z_weight * jnp.sum(layers[Z_LOSS])
    return found


NAMES: Sequence[str] = (LOAD, _PROBS, _BY_ROW, Z_LOSS)
"""Names of all ``statistics``."""
