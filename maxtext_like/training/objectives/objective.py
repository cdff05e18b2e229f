"""The interface of an objective: the batch that it needs, and a pure function of parameters and batch.

To add an objective, write a file with a frozen dataclass that has these members and a ``build`` function, and add its name to
``registry.py``. The train step, the memory estimate and the Linen and NNX wrappers use an objective only through this
interface.
"""

from typing import Any, Protocol

import jax

from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.model import Shapes

Aux = dict[str, Any]


class Objective(Protocol):
  """A layer (parameters and a pure call) that training minimizes. A frozen dataclass."""

  @property
  def evaluated(self) -> str:
    """Name of the term whose mean over the weight is the evaluation loss."""
    ...

  @property
  def decoder(self) -> Decoder:
    """The model."""
    ...

  def params(self) -> Any:
    """Return the declared parameters: those of the decoder and, under a separate name and not trainable, those of any other
    model that the objective needs, such as a reference model."""
    ...

  def batch(self, inputs: Shapes) -> Shapes:
    """Return the arrays of a batch, from the decoder's inputs for the same number of rows (``Model.inputs``).

    The first axis is the sample axis: devices and microbatches split only along it. Sequences that belong together, such as two
    answers that are compared, are on a later axis: [B, 2, T]. "segments" marks the real positions; 0 is padding.
    """
    ...

  def tokens(self, batch: dict[str, jax.Array]) -> jax.Array:
    """Return an int32 scalar: the positions of the batch that contribute to the loss, the metric "tokens"."""
    ...

  def weight(self, batch: dict[str, jax.Array]) -> jax.Array:
    """Return an int32 or float32 scalar by which the sum over this batch is divided. The weights of the parts of a batch add up
    to the weight of the complete batch."""
    ...

  def __call__(
    self,
    p: Any,
    batch: dict[str, jax.Array],
    cotangent: jax.Array | None = None,
    probes: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, jax.Array, Aux]:
    """Compute the loss of a batch.

    Args:
      p: parameters.
      batch: arrays as ``batch`` describes them.
      cotangent: float32 scalar by which the sum is multiplied when gradients are taken; None for 1. Gradients are correct for
        any value except 0. Passing the right value keeps float16 gradients in range if they are computed in the forward pass.
      probes: float32 [L, 2] for each of ``context.PROBED``, if the layers are probed; see ``layers.probe``.

    Returns:
      sum: float32 scalar, summed over the positions that count, so that the parts of a batch add up to the complete batch.
      weight: weight of the batch.
      aux: "terms", the summands by name, and "means", losses of the model that are added to the mean of the sum. Both are
        float32. They are means over the tokens of the batch, or over its rows (``RouterLosses.by_row``). "clamped" is int32.
        With experts also "moe_load", and ``load_balance.LOAD`` if a loss needs it. With probes also "probes".
    """
    ...

  def with_decoder(self, decoder: Decoder) -> "Objective":
    """Return the same objective of another decoder over the same parameters."""
    ...

  def logit_bytes(self, rows: int, length: int) -> int:
    """Return the bytes of the logits that are in memory at a time, and of their gradient, for this many rows on a device."""
    ...

  def made_in_forward(self, p: Any) -> Any:
    """Return the part of a tree of parameters whose gradients are computed in the forward pass; None if there is none."""
    ...
