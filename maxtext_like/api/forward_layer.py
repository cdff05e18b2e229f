"""A decoder with its loss and captured outputs as one layer, for both Flax APIs.

B batch, T position, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.context import CAPTURES
from maxtext_like.layers.decoder import Decoder
from maxtext_like.targets import IGNORED
from maxtext_like.training.objectives.language_modeling import token_losses


@dataclass(frozen=True)
class ForwardLayer:
  """Computes the mean loss over targets, the logits and captured arrays.

  Attributes:
    decoder: the model.
    padding_idx: row of the embedding tables whose lookups have no gradient, as in ``torch.nn.Embedding``; a tied output head
      still adds one. None: every row has a gradient.
  """

  decoder: Decoder
  padding_idx: int | None = None

  def params(self) -> Any:
    return self.decoder.params()

  def __call__(self, p: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss (float32, 0 without targets) and outputs by name: "logits" [B, T, V], "loss" with targets,
    "clamped" in float16, and captured arrays."""
    x_BTD, aux = self.decoder.hidden(self._without_padding_gradient(p), batch, frozenset(CAPTURES))
    logits = self.decoder.head(p, x_BTD)
    outputs = {name: value for name, value in aux.items() if name.partition(".")[0] in CAPTURES}
    outputs["logits"] = logits
    if self.decoder.uses_float16:
      outputs["clamped"] = aux["clamped"]
    if "targets" not in batch:
      return jnp.zeros((), jnp.float32), outputs
    cross_entropy, _ = token_losses(logits, batch["targets"], 0.0)
    loss = jnp.sum(cross_entropy) / jnp.maximum(jnp.sum(batch["targets"] != IGNORED), 1)
    return loss, outputs | {"loss": loss}

  def _without_padding_gradient(self, p: Any) -> Any:
    row = self.padding_idx
    if row is None:
      return p
    tables = {name: p[name] for name in ("embedding", "ple") if name in p}
    for name, group in tables.items():
      table = group["table"]
      if row < table.shape[0]:
        tables[name] = group | {"table": table.at[row].set(jax.lax.stop_gradient(table[row]))}
    return p | tables
