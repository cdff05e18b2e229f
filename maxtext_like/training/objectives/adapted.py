"""Wraps an objective so that the model's weights are frozen and only an adapter (LoRA, DoRA) is trained."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.dropout import ROWS
from maxtext_like.layers.param import Param
from maxtext_like.models.adapter import Adapter
from maxtext_like.models.model import Shapes
from maxtext_like.models.naming import ADAPTER
from maxtext_like.models.quantized_base import QuantizedBase
from maxtext_like.training.objectives.objective import Aux, Objective


@dataclass(frozen=True)
class Adapted:
  """An ``Objective`` over the frozen parameters of another objective and a trained adapter.

  Attributes:
    inner: the objective that is minimized.
    adapter: the trained adapter.
    base: the quantized form in which the model's weights are stored; None if they are stored as declared.
  """

  inner: Objective
  adapter: Adapter
  base: QuantizedBase | None = None

  @property
  def evaluated(self) -> str:
    return self.inner.evaluated

  @property
  def decoder(self) -> Decoder:
    return self.inner.decoder

  def params(self) -> Any:
    # All arrays of the model are frozen, whether quantized or not.
    below = self.inner.params() if self.base is None else self.base.spec(self.inner.params())
    return jax.tree.map(_frozen, below) | {ADAPTER: self.adapter.params()}

  def batch(self, inputs: Shapes) -> Shapes:
    return self.inner.batch(inputs)

  def tokens(self, batch: dict[str, jax.Array]) -> jax.Array:
    return self.inner.tokens(batch)

  def weight(self, batch: dict[str, jax.Array]) -> jax.Array:
    return self.inner.weight(batch)

  def __call__(
    self,
    p: Any,
    batch: dict[str, jax.Array],
    cotangent: jax.Array | None = None,
    probes: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, jax.Array, Aux]:
    return self.inner(self.attach(p, batch.get(ROWS)), batch, cotangent, probes)

  def attach(self, p: Any, rows: jax.Array | None = None) -> Any:
    """Return the parameters as the decoder takes them. ``rows`` is that of ``Adapter.attach``."""
    return self.adapter.attach(p if self.base is None else self.base.attach(p), rows)

  def with_decoder(self, decoder: Decoder) -> "Adapted":
    return dataclasses.replace(self, inner=self.inner.with_decoder(decoder))

  def logit_bytes(self, rows: int, length: int) -> int:
    return self.inner.logit_bytes(rows, length)

  def made_in_forward(self, p: Any) -> Any:
    return self.inner.made_in_forward(self.adapter.replaced(p))


def _frozen(p: Param) -> Param:
  return dataclasses.replace(p, trainable=False)
