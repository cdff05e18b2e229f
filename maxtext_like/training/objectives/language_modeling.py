"""Language modeling: the cross entropy of the next token, computed in chunks of the sequence.

Open this file to see how logits become a loss, or to change how much memory the logits take.

B batch, T position, D model, V vocabulary, n chunks, C positions of a chunk.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from maxtext_like.errors import UserError
from maxtext_like.layers.decoder import Decoder
from maxtext_like.layers.moe.router_losses import LOSS, Z_LOSS
from maxtext_like.layers.partition import on_one_gpu, zero_after
from maxtext_like.models.model import Model, Shapes
from maxtext_like.targets import IGNORED
from maxtext_like.training.objectives.objective import Aux

CHUNK_BYTES = 1 << 30  # size of one chunk's float32 logits on one device
# Devices that share the head gather it and reduce its gradient once per chunk. GPUs have more memory, so they use fewer, larger
# chunks. With gemma4-31b's width, 6 layers, fsdp=2 on H200s (2 x 4096 tokens each), a step takes 0.686 s in 8 chunks and 0.591
# s in 2.
SHARED_CHUNK_BYTES = 4 << 30
FROZEN_CHUNK_BYTES = 1 << 28  # a frozen head (below an adapter) has no gradient to reduce, and memory is short


def automatic_chunks(rows: int, length: int, vocab_size: int, limit: int = CHUNK_BYTES) -> int:
  """Return the smallest number of chunks whose float32 logits, for ``rows`` rows of ``length`` positions, take at most
  ``limit`` bytes on a device."""
  return min(length, -(-rows * length * vocab_size * 4 // limit))


@jax.named_scope("loss")
def token_losses(logits_BTV: jax.Array, targets_BT: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array]:
  """Return the cross entropy and the z-loss of each token, both float32 [B, T] and 0 where the target is ignored.

  cross entropy: log Z - logit of the target, Z = sum over V of exp(logit).
  z-loss: z_loss * (log Z)^2 (PaLM, Chowdhery et al. 2022), which keeps the logits near 0.
  """
  logits = logits_BTV.astype(jnp.float32)
  real = targets_BT != IGNORED
  if on_one_gpu():
    log_z, picked = log_sum_exp(logits), looked_up(logits, targets_BT)
  else:  # a lookup would need communication: devices that share the vocabulary each hold only some targets' logits
    log_z, picked = jax.nn.logsumexp(logits, axis=-1), jnp.sum(jnp.where(_hit(logits, targets_BT), logits, 0), axis=-1)
  return jnp.where(real, log_z - picked, 0), jnp.where(real, z_loss * jnp.square(log_z), 0)


def _hit(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
  return targets_BT[..., None] == jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, logits_BTV.ndim - 1)


@jax.custom_vjp
def log_sum_exp(logits_BTV: jax.Array) -> Any:
  """Return log of the sum of exp(logit) over V, float32 [B, T], in one pass over float32 logits.

  Two parts, each with its largest logit and its sum of exp(logit - largest), are combined relative to the larger maximum
  (Milakov & Gimelshein 2018). Over 8192 x 262208 logits an H200 takes 4.0 ms, compared with 4.7 ms for ``jax.nn.logsumexp``,
  which reads the logits twice.
  """
  return _log_sum_exp_fwd(logits_BTV)[0]


def _log_sum_exp_fwd(logits_BTV):
  def joined(one, other):
    (top, total), (other_top, other_total) = one, other
    # Rescale the sum with the smaller maximum to the larger maximum.
    larger, smaller = jnp.maximum(top, other_top), jnp.minimum(top, other_top)
    shrink = jnp.where(smaller == larger, 1.0, jnp.exp(smaller - larger))  # both may be infinite
    return larger, jnp.where(top >= other_top, total + other_total * shrink, total * shrink + other_total)

  nothing = (jnp.float32(-jnp.inf), jnp.float32(0))
  top, total = jax.lax.reduce((logits_BTV, jnp.ones_like(logits_BTV)), nothing, joined, (logits_BTV.ndim - 1,))
  return top + jnp.log(total), (logits_BTV, top, total)


def _log_sum_exp_bwd(saved, g_BT):
  logits_BTV, top, total = (x if x.ndim > g_BT.ndim else x[..., None] for x in saved)
  return ((g_BT[..., None] / total) * jnp.exp(logits_BTV - top),)


log_sum_exp.defvjp(_log_sum_exp_fwd, _log_sum_exp_bwd)


@jax.custom_vjp
def looked_up(logits_BTV: jax.Array, targets_BT: jax.Array) -> Any:
  """Return the logits of the targets [B, T]. Targets must be below V; where a target is ignored the result is arbitrary.

  The other logits are not read, which saves 2 of 8 ms of a loss over 8192 x 262208 logits on an H200. The gradient is a
  comparison with the target, as for a masked sum; the gradient of an ordinary lookup would be a scatter.
  """
  return jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1, mode="clip")[..., 0]


looked_up.defvjp(
  lambda logits_BTV, targets_BT: (looked_up(logits_BTV, targets_BT), (logits_BTV, targets_BT)),
  lambda saved, g_BT: (jnp.where(_hit(*saved), g_BT[..., None], 0).astype(saved[0].dtype), None),
)


def build(model: Model) -> "LanguageModeling":
  """Build the objective of a configuration.

  Raises:
    UserError: there are more chunks than positions.
  """
  # The rows and the part of the vocabulary of one device.
  t, split = model.config.training, model.ways("sequence") * model.ways("vocab")
  rows, vocabulary = model.rows // model.ways("batch"), -(-model.config.model.vocab_size // split)
  # The limit depends on the platform and on whether the head is trained.
  shared = model.platform == "gpu" and model.ways("batch") > 1
  adapter, head = model.config.adapter, "embed_tokens" if model.decoder.cfg.tied else "lm_head"
  frozen = adapter.lora_rank and head not in adapter.modules_to_save
  limit = FROZEN_CHUNK_BYTES if frozen else SHARED_CHUNK_BYTES if shared else CHUNK_BYTES
  chunks = t.num_vocab_tiling or automatic_chunks(rows, t.max_target_length, vocabulary, limit)
  if chunks > t.max_target_length:
    raise UserError(
      f"num_vocab_tiling = {chunks} is larger than max_target_length = {t.max_target_length}: the loss is split into chunks of "
      f"the sequence, of at least one position each\n  fix: num_vocab_tiling={t.max_target_length} or less"
    )
  return LanguageModeling(model.decoder, t.z_loss_multiplier, chunks)


@dataclass(frozen=True)
class LanguageModeling:
  """An ``Objective``: a decoder and the loss of its next token.

  Attributes:
    decoder: the model.
    z_loss: weight of the z-loss; 0 for none.
    chunks: number of chunks of the sequence. With more than 1, only one chunk's logits are in memory at a time, and they are
      computed once; see ``_sum_of_chunks``.
  """

  decoder: Decoder
  z_loss: float = 0.0
  chunks: int = 1

  @property
  def evaluated(self) -> str:
    return "cross_entropy"

  def params(self) -> Any:
    return self.decoder.params()

  def batch(self, inputs: Shapes) -> Shapes:
    """Return the decoder's inputs and "targets" int32 [B, T]: the next token at each position, or ``IGNORED`` where it does not
    count."""
    return inputs | {"targets": inputs["tokens"]}

  def tokens(self, batch: dict[str, jax.Array]) -> jax.Array:
    """Return the number of targets that are not ignored."""
    return jnp.sum(batch["targets"] != IGNORED)

  weight = tokens

  def __call__(
    self,
    p: Any,
    batch: dict[str, jax.Array],
    cotangent: jax.Array | None = None,
    probes: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, jax.Array, Aux]:
    """Return the loss summed over the targets that count, their number, and aux; see ``Objective``.

    The terms are "cross_entropy" and, if its weight is not 0, "z_loss"; they are not differentiated. The means are the
    model's: with a weight, "load_balance_loss" and "router_z_loss" of the experts, and with an indexer "indexer_loss".
    """
    # The decoder's last hidden states, from which the logits are computed.
    x_BTD, aux = self.decoder.hidden(p, batch, probes=probes or None)

    def chunk(head, x, targets):
      losses = token_losses(self.decoder.head(head, x), targets, self.z_loss)
      return jnp.stack([jnp.sum(loss) for loss in losses])

    head = head_of(p)
    # With one chunk autodiff takes the gradients; with several, the forward pass computes them.
    if self.chunks == 1:
      terms = chunk(head, x_BTD, batch["targets"])
      loss = jnp.sum(terms)
    else:
      cotangent = jnp.ones((), jnp.float32) if cotangent is None else cotangent
      parts = self.decoder.cfg.rules.row_parts(x_BTD.shape[1])
      loss, terms = _sum_of_chunks(chunk, self.chunks, parts)(head, x_BTD, batch["targets"], cotangent)
    # Terms are reported but not differentiated; the model's own losses are means over the batch.
    terms = dict(zip(("cross_entropy", "z_loss"), jax.lax.stop_gradient(terms), strict=True))
    if not self.z_loss:
      del terms["z_loss"]
    means = {name: aux.pop(name) for name in (LOSS, Z_LOSS, "indexer_loss") if name in aux}
    return loss, self.weight(batch), aux | {"terms": terms, "means": means}

  def with_decoder(self, decoder: Decoder) -> "LanguageModeling":
    return dataclasses.replace(self, decoder=decoder)

  def logit_bytes(self, rows: int, length: int) -> int:
    """Return the bytes of one chunk's float32 logits and of their gradient."""
    return 2 * rows * -(-length // self.chunks) * self.decoder.cfg.embedding.vocab_size * 4

  def made_in_forward(self, p: Any) -> Any:
    """Return the head, whose gradient is computed chunk by chunk in the forward pass."""
    return head_of(p) if self.chunks > 1 else None


def head_of(p: Any) -> Any:
  """Return the part of a tree of parameters that produces logits: the head, or the embedding that is tied to it."""
  name = "head" if "head" in p else "embedding"
  return {name: p[name]}


def _sum_of_chunks(chunk: Callable[[Any, jax.Array, jax.Array], jax.Array], chunks: int, parts: int) -> Callable[..., Any]:
  """Return a function that sums ``chunk`` over chunks of the sequence and differentiates each chunk as soon as it is computed.

  A loss is a sum, so the gradients of a chunk do not depend on later chunks. Computing them in the forward pass saves the
  second computation of the logits that rematerialization would need, a quarter of the head's work (as in Liger Kernel, Hsu et
  al. 2024).

  Args:
    chunk: (head, x [B, C, D], targets [B, C]) -> its terms, float32 [2].
    chunks: number of chunks.
    parts: number of devices that a row's positions are sharded over. A chunk has an equal share of each device's positions, so
      that all devices work on it.

  Returns:
    (head, x [B, T, D], targets [B, T], cotangent []) -> (sum of all terms, the terms, which have no gradient). Gradients are
    computed for ``cotangent`` and scaled to the one that arrives, which is the same in training. Reverse mode only.
  """

  def cut(x_BTD, targets_BT):
    return _cut(x_BTD, chunks, parts, 0), _cut(targets_BT, chunks, parts, IGNORED)

  @jax.custom_vjp
  def total(head, x_BTD, targets_BT, cotangent):
    del cotangent

    def add(terms, xs):
      return terms + chunk(head, *xs), None

    terms, _ = jax.lax.scan(add, jnp.zeros(2, jnp.float32), cut(x_BTD, targets_BT))
    return jnp.sum(terms), terms

  def forward(head, x_BTD, targets_BT, cotangent):
    trained = any(w.perturbed for w in jax.tree.leaves(head))  # the gradient of a frozen head would be a third of the work
    head, x_BTD, targets_BT, cotangent = jax.tree.map(lambda x: x.value, (head, x_BTD, targets_BT, cotangent))
    dtypes = jax.tree.map(lambda w: w.dtype, head)

    # Compute the gradients of a chunk directly after its loss, while its logits exist.
    def add(sums, xs):
      terms, head_sum = sums
      x, targets = xs
      if trained:
        # The chunks' gradients have the head's dtype. They are summed in float32, because 16 bits would round each partial sum.
        # The head is cast here and not before the loop, where the cast would keep a float32 copy of it in memory; inside the
        # loop the compiler removes it.
        wide = jax.tree.map(lambda w: w.astype(jnp.float32), head)
        part, pull_back = jax.vjp(lambda head, x: chunk(head, x, targets), wide, x)
        d_head, dx = pull_back(jnp.full(2, cotangent))
        with jax.named_scope("head"):
          head_sum = jax.tree.map(jnp.add, head_sum, d_head)
      else:
        part, pull_back = jax.vjp(lambda x: chunk(head, x, targets), x)
        (dx,) = pull_back(jnp.full(2, cotangent))
      return (terms + part, head_sum), dx

    zero, x_BTD = zero_after(x_BTD)
    zeros = jax.tree.map(lambda w: jnp.broadcast_to(zero, w.shape), head) if trained else None
    (terms, d_head), dx_nBCD = jax.lax.scan(add, (jnp.zeros(2, jnp.float32), zeros), cut(x_BTD, targets_BT))
    if trained:
      d_head = jax.tree.map(lambda d, dtype: d.astype(dtype), d_head, dtypes)
      # The barrier rounds the gradient before the backward pass of the layers begins. Without it the rounding would be moved to
      # the reader, and the float32 gradient would stay in memory until then.
      d_head, dx_nBCD = jax.lax.optimization_barrier((d_head, dx_nBCD))
    return (jnp.sum(terms), terms), (d_head, _joined(dx_nBCD, parts, x_BTD.shape[1]), cotangent)

  def backward(saved, cotangents):
    d_head, dx_BTD, expected = saved
    if isinstance(cotangents[0], SymbolicZero):
      return None, None, None, None
    # Usually 1: the forward pass used the same cotangent.
    factor = cotangents[0] / expected
    return *jax.tree.map(lambda d: (d * factor).astype(d.dtype), (d_head, dx_BTD)), None, None

  total.defvjp(forward, backward, symbolic_zeros=True)
  return total


def _cut(x_BT: jax.Array, chunks: int, parts: int, fill: int) -> jax.Array:
  """Reshape [B, T, ...] to [n, B, C, ...]. Every chunk has a piece of each device's part of the row; the last chunk is
  padded."""
  B, T, *rest = x_BT.shape
  x = x_BT.reshape(B, parts, T // parts, *rest)
  # Pad each device's part to a multiple of the chunks, then move the axis of chunks to the front.
  size = -(-T // parts // chunks)
  x = jnp.pad(x, [(0, 0), (0, 0), (0, size * chunks - T // parts)] + [(0, 0)] * len(rest), constant_values=fill)
  x = x.reshape(B, parts, chunks, size, *rest)
  return jnp.moveaxis(x, 2, 0).reshape(chunks, B, parts * size, *rest)


def _joined(x_nBC: jax.Array, parts: int, length: int) -> jax.Array:
  """Undo ``_cut``: return [B, T, ...] without the padding."""
  chunks, B, C, *rest = x_nBC.shape
  x = jnp.moveaxis(x_nBC.reshape(chunks, B, parts, C // parts, *rest), 0, 2)
  return x.reshape(B, parts, -1, *rest)[:, :, : length // parts].reshape(B, length, *rest)
