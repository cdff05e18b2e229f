"""The language-model loss as a layer: the decoder's parameters and one equation, in pieces of the sequence.

B batch, T position, D model, V vocabulary, n pieces, C positions of a piece.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_like.layers.decoder import Decoder

IGNORED = -100  # the target that does not count, as in Hugging Face and PyTorch
PIECE_BYTES = 1 << 30  # of float32 logits of one piece on one device


def automatic_pieces(rows: int, length: int, vocab_size: int) -> int:
  """The fewest pieces whose float32 logits take at most 1 GiB on a device, for ``rows`` rows there."""
  return min(length, -(-rows * length * vocab_size * 4 // PIECE_BYTES))


@jax.named_scope("loss")
def token_losses(logits_BTV: jax.Array, targets_BT: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array]:
  """Cross entropy of each token and its z-loss, float32 [B, T]; both 0 where the target is ignored.

  cross entropy: log Z - logit of the target, Z = sum over V of exp(logit).
  z-loss: z_loss * (log Z)^2 (PaLM, Chowdhery et al. 2022), which keeps the logits near 0.
  """
  logits = logits_BTV.astype(jnp.float32)
  real = targets_BT != IGNORED
  log_z = jax.nn.logsumexp(logits, axis=-1)
  # A comparison instead of a lookup: its gradient is a comparison too, where a lookup's is a scatter.
  hit = targets_BT[..., None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  picked = jnp.sum(jnp.where(hit, logits, 0), axis=-1)
  return jnp.where(real, log_z - picked, 0), jnp.where(real, z_loss * jnp.square(log_z), 0)


@dataclass(frozen=True)
class LossLayer:
  """A decoder with its loss. Summed, not averaged, so that parts of a batch add up to the whole.

  Attributes:
    decoder: the model.
    z_loss: weight of the z-loss; 0 for none.
    pieces: into how many pieces of the sequence the logits are cut. With more than 1, each piece is computed again in
      the backward pass, so that the logits of one piece alone are in memory.
  """

  decoder: Decoder
  z_loss: float = 0.0
  pieces: int = 1

  def params(self) -> Any:
    return self.decoder.params()

  def __call__(self, p: Any, batch: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The losses of a batch.

    Args:
      p: parameters.
      batch: int32 [B, T] arrays, "targets" among them.

    Returns:
      ({"cross_entropy", and "z_loss" with a weight} float32 sums over the real targets, aux of ``Decoder.hidden``).
    """
    x_BTD, aux = self.decoder.hidden(p, batch)
    targets = batch["targets"]

    def piece(head, x, targets):
      losses = token_losses(self.decoder.head(head, x), targets, self.z_loss)
      return jnp.stack([jnp.sum(loss) for loss in losses])

    head = {name: p[name] for name in ("embedding", "head") if name in p}
    if self.pieces == 1:
      cross_entropy, z_loss = piece(head, x_BTD, targets)
    else:
      x_nBCD, targets_nBC = _cut(x_BTD, self.pieces, 0), _cut(targets, self.pieces, IGNORED)
      # The pieces' gradients of the head add up in its dtype; widening it loses nothing, adding in 16 bits would.
      head = jax.tree.map(lambda w: w.astype(jnp.float32), head)

      def add(total, xs):
        return total + jax.checkpoint(piece, prevent_cse=False)(head, *xs), None

      (cross_entropy, z_loss), _ = jax.lax.scan(add, jnp.zeros(2, jnp.float32), (x_nBCD, targets_nBC))
    sums = {"cross_entropy": cross_entropy}
    return sums | ({"z_loss": z_loss} if self.z_loss else {}), aux


def _cut(x_BT: jax.Array, pieces: int, fill: int) -> jax.Array:
  """[B, T, ...] as [n, B, C, ...], the last piece filled up."""
  T = x_BT.shape[1]
  size = -(-T // pieces)
  x = jnp.pad(x_BT, [(0, 0), (0, size * pieces - T)] + [(0, 0)] * (x_BT.ndim - 2), constant_values=fill)
  return jnp.moveaxis(x.reshape(x.shape[0], pieces, size, *x.shape[2:]), 1, 0)
