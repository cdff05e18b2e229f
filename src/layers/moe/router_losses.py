"""The auxiliary losses of a router and their definitions. ``load_balance.py`` computes them.

This file imports no JAX, since the configuration reads it.
"""

from dataclasses import dataclass
from typing import Literal

Definition = Literal["maxtext", "huggingface", "deepseek_sequence", "switch"]

LOSS, Z_LOSS = "load_balance_loss", "router_z_loss"


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
    definition: which load-balancing loss is used.
    weight: factor on the load-balancing loss; 0 is off.
    z_weight: factor on the router z-loss; 0 is off.
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
