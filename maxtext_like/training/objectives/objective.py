"""What an objective is: the batch that it wants, and a pure call of parameters and batch.

To add one: a file with a frozen dataclass of these members and a ``build``, and its name in ``registry.py``. The step, the
estimate of memory and the faces know no other objective than this.
"""

from typing import Any, Protocol

import jax

from maxtext_like.layers.decoder import Decoder
from maxtext_like.models.model import Shapes

Aux = dict[str, Any]


class Objective(Protocol):
  """A layer (parameters and a pure call) that training minimises. A frozen dataclass."""

  @property
  def evaluated(self) -> str:
    """The term of the sum whose mean over the weight is the held-out loss."""
    ...

  @property
  def decoder(self) -> Decoder:
    """The model."""
    ...

  def params(self) -> Any:
    """The declared parameters: the decoder's, and beside them, not trainable and under a name of their own, those of
    whatever it is compared with, as a reference model."""
    ...

  def batch(self, inputs: Shapes) -> Shapes:
    """The arrays of a batch, from what the decoder reads of as many rows (``Model.inputs``).

    The first axis is the sample's: devices and microbatches cut along it alone. What belongs together, as two answers that
    are compared, lies behind it: [B, 2, T]. "segments" (0 is padding) says which positions there are.
    """
    ...

  def tokens(self, batch: dict[str, jax.Array]) -> jax.Array:
    """Int32 scalar: positions of the batch that teach something, the metric "tokens"."""
    ...

  def weight(self, batch: dict[str, jax.Array]) -> jax.Array:
    """Int32 or float32 scalar that the sum over this batch is divided by. Weights of parts of a batch add up to the whole's."""
    ...

  def __call__(
    self,
    p: Any,
    batch: dict[str, jax.Array],
    cotangent: jax.Array | None = None,
    probes: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, jax.Array, Aux]:
    """The loss of a batch.

    Args:
      p: parameters.
      batch: arrays as ``batch`` describes them.
      cotangent: float32 scalar, what the sum will be multiplied by where gradients are taken of it; None: 1. Gradients are
        right with any but 0; this one keeps float16 in range where they are made in the forward pass.
      probes: float32 [L, 2] for each of ``context.PROBED``: the layers are probed, see ``layers.probe``.

    Returns:
      sum: float32 scalar, summed over what counts, so that parts of a batch add up to the whole.
      weight: of the batch.
      aux: "terms", the sum's addends by name, and "means", losses of the model itself that are added to the mean of the sum;
        both float32. They are means over the tokens of the batch, or over its rows (``RouterLosses.by_row``). "rescued" int32;
        with experts "moe_load", and ``load_balance.LOAD`` where a loss needs it; where probes are given, "probes".
    """
    ...

  def with_decoder(self, decoder: Decoder) -> "Objective":
    """The same objective of another decoder over the same parameters."""
    ...

  def logit_bytes(self, rows: int, length: int) -> int:
    """Bytes of the logits that are in memory at a time, and of their gradient, for so many rows of a device."""
    ...

  def made_in_forward(self, p: Any) -> Any:
    """The part of a tree of parameters whose gradients the forward pass makes already; None: of none."""
    ...
