"""Language modelling: the cross entropy of the next token, as a layer over the decoder's parameters, in chunks of the sequence.

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

CHUNK_BYTES = 1 << 30  # of float32 logits of one chunk on one device
# For each chunk, devices that share the head gather it and add up its gradient: GPUs, which have the memory, take fewer.
# gemma4-31b's width, 6 layers, fsdp=2 on H200s (2 x 4096 tokens each): 0.686 s a step in 8 chunks, 0.591 s in 2.
SHARED_CHUNK_BYTES = 4 << 30
FROZEN_CHUNK_BYTES = 1 << 28  # there is no gradient of a head below an adapter to add up, and memory is short


def automatic_chunks(rows: int, length: int, vocab_size: int, limit: int = CHUNK_BYTES) -> int:
  """The fewest chunks whose float32 logits, of ``rows`` rows of so many, take at most ``limit`` bytes on a device."""
  return min(length, -(-rows * length * vocab_size * 4 // limit))


@jax.named_scope("loss")
def token_losses(logits_BTV: jax.Array, targets_BT: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array]:
  """Cross entropy of each token and its z-loss, float32 [B, T]; both 0 where the target is ignored.

  cross entropy: log Z - logit of the target, Z = sum over V of exp(logit).
  z-loss: z_loss * (log Z)^2 (PaLM, Chowdhery et al. 2022), which keeps the logits near 0.
  """
  logits = logits_BTV.astype(jnp.float32)
  real = targets_BT != IGNORED
  if on_one_gpu():
    log_z, picked = log_sum_exp(logits), looked_up(logits, targets_BT)
  else:  # devices that share the vocabulary would have to find out which of them has a target's logit
    log_z, picked = jax.nn.logsumexp(logits, axis=-1), jnp.sum(jnp.where(_hit(logits, targets_BT), logits, 0), axis=-1)
  return jnp.where(real, log_z - picked, 0), jnp.where(real, z_loss * jnp.square(log_z), 0)


def _hit(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
  return targets_BT[..., None] == jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, logits_BTV.ndim - 1)


@jax.custom_vjp
def log_sum_exp(logits_BTV: jax.Array) -> Any:
  """log of the sum of exp(logit) over V, float32 [B, T], in one pass over float32 logits.

  Two parts, each with its largest logit and the sum of exp(logit - largest), are joined below the larger of both (Milakov &
  Gimelshein 2018). Over 8192 x 262208 logits an H200 takes 4.0 ms, and 4.7 for ``jax.nn.logsumexp``, which reads them twice.
  """
  return _log_sum_exp_fwd(logits_BTV)[0]


def _log_sum_exp_fwd(logits_BTV):
  def joined(one, other):
    (top, total), (other_top, other_total) = one, other
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
  """The logits of the targets [B, T], each below V; anything where a target is ignored. The others are not read (2 of 8 ms of a
  loss over 8192 x 262208 logits on an H200). The gradient is a comparison, as that of the sum in its place; a lookup's is a
  scatter."""
  return jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1, mode="clip")[..., 0]


looked_up.defvjp(
  lambda logits_BTV, targets_BT: (looked_up(logits_BTV, targets_BT), (logits_BTV, targets_BT)),
  lambda saved, g_BT: (jnp.where(_hit(*saved), g_BT[..., None], 0).astype(saved[0].dtype), None),
)


def build(model: Model) -> "LanguageModelling":
  """The objective of a configuration.

  Raises:
    UserError: more chunks than there are positions.
  """
  t, split = model.config.training, model.ways("sequence") * model.ways("vocab")
  rows, vocabulary = model.rows // model.ways("batch"), -(-model.config.model.vocab_size // split)
  shared = model.platform == "gpu" and model.ways("batch") > 1
  adapter, head = model.config.adapter, "embed_tokens" if model.decoder.cfg.tied else "lm_head"
  frozen = adapter.lora_rank and head not in adapter.modules_to_save
  limit = FROZEN_CHUNK_BYTES if frozen else SHARED_CHUNK_BYTES if shared else CHUNK_BYTES
  chunks = t.num_vocab_tiling or automatic_chunks(rows, t.max_target_length, vocabulary, limit)
  if chunks > t.max_target_length:
    raise UserError(
      f"num_vocab_tiling = {chunks} is more than max_target_length = {t.max_target_length}: the loss is cut along the sequence"
    )
  return LanguageModelling(model.decoder, t.z_loss_multiplier, chunks)


@dataclass(frozen=True)
class LanguageModelling:
  """A decoder with the loss of its next token. An ``Objective``.

  Attributes:
    decoder: the model.
    z_loss: weight of the z-loss; 0 for none.
    chunks: into how many chunks of the sequence the logits are cut. With more than 1 the logits of one chunk alone are in
      memory, and are computed once; see ``_sum_of_chunks``.
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
    """The decoder's inputs and "targets" int32 [B, T], the token that follows each; ``IGNORED`` where none counts."""
    return inputs | {"targets": inputs["tokens"]}

  def tokens(self, batch: dict[str, jax.Array]) -> jax.Array:
    """The number of real targets."""
    return jnp.sum(batch["targets"] != IGNORED)

  weight = tokens

  def __call__(
    self,
    p: Any,
    batch: dict[str, jax.Array],
    cotangent: jax.Array | None = None,
    probes: dict[str, jax.Array] | None = None,
  ) -> tuple[jax.Array, jax.Array, Aux]:
    """The loss summed over the real targets, their number, and aux; see ``Objective``.

    The terms are "cross_entropy" and, with a weight, "z_loss", without a gradient of their own. The means are the model's:
    with a weight "load_balance_loss" and "router_z_loss" of the experts, "indexer_loss" with an indexer.
    """
    x_BTD, aux = self.decoder.hidden(p, batch, probes=probes or None)

    def chunk(head, x, targets):
      losses = token_losses(self.decoder.head(head, x), targets, self.z_loss)
      return jnp.stack([jnp.sum(loss) for loss in losses])

    head = head_of(p)
    if self.chunks == 1:
      terms = chunk(head, x_BTD, batch["targets"])
      loss = jnp.sum(terms)
    else:
      cotangent = jnp.ones((), jnp.float32) if cotangent is None else cotangent
      parts = self.decoder.cfg.rules.row_parts(x_BTD.shape[1])
      loss, terms = _sum_of_chunks(chunk, self.chunks, parts)(head, x_BTD, batch["targets"], cotangent)
    terms = dict(zip(("cross_entropy", "z_loss"), jax.lax.stop_gradient(terms), strict=True))
    if not self.z_loss:
      del terms["z_loss"]
    means = {name: aux.pop(name) for name in (LOSS, Z_LOSS, "indexer_loss") if name in aux}
    return loss, self.weight(batch), aux | {"terms": terms, "means": means}

  def with_decoder(self, decoder: Decoder) -> "LanguageModelling":
    return dataclasses.replace(self, decoder=decoder)

  def logit_bytes(self, rows: int, length: int) -> int:
    """Bytes of a chunk's logits in float32, and of their gradient."""
    return 2 * rows * -(-length // self.chunks) * self.decoder.cfg.embedding.vocab_size * 4

  def made_in_forward(self, p: Any) -> Any:
    """The head, whose gradient the chunks make."""
    return head_of(p) if self.chunks > 1 else None


def head_of(p: Any) -> Any:
  """The part of a tree of parameters that makes logits: the head, or the embedding that is tied to it."""
  name = "head" if "head" in p else "embedding"
  return {name: p[name]}


def _sum_of_chunks(chunk: Callable[[Any, jax.Array, jax.Array], jax.Array], chunks: int, parts: int) -> Callable[..., Any]:
  """``chunk`` summed over chunks of the sequence, each of which is differentiated as soon as it is computed.

  A loss is a sum, so its gradients need nothing that comes after it: taking them in the forward pass saves the second
  computation of the logits that remat would need, a quarter of the head's work (as Liger Kernel does, Hsu et al. 2024).

  Args:
    chunk: (head, x [B, C, D], targets [B, C]) -> its terms, float32 [2].
    chunks: how many.
    parts: that a row's positions are split into over devices; a chunk has an equal share of each, so that all work on it.

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
    trained = any(w.perturbed for w in jax.tree.leaves(head))  # a frozen head's gradient would be a third of the work
    head, x_BTD, targets_BT, cotangent = jax.tree.map(lambda x: x.value, (head, x_BTD, targets_BT, cotangent))
    dtypes = jax.tree.map(lambda w: w.dtype, head)

    def add(sums, xs):
      terms, head_sum = sums
      x, targets = xs
      if trained:
        # The chunks' gradients come in the head's dtype and add up: in float32, as 16 bits would round each of them. It is made
        # float32 here and not before the loop, where it would be a copy; here what rounds it back is all that is left of it.
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
      # Rounded before the layers' backward begins: whoever reads it would round it there, and float32 lie in memory until then.
      d_head, dx_nBCD = jax.lax.optimization_barrier((d_head, dx_nBCD))
    return (jnp.sum(terms), terms), (d_head, _joined(dx_nBCD, parts, x_BTD.shape[1]), cotangent)

  def backward(saved, cotangents):
    d_head, dx_BTD, expected = saved
    if isinstance(cotangents[0], SymbolicZero):
      return None, None, None, None
    factor = cotangents[0] / expected
    return *jax.tree.map(lambda d: (d * factor).astype(d.dtype), (d_head, dx_BTD)), None, None

  total.defvjp(forward, backward, symbolic_zeros=True)
  return total


def _cut(x_BT: jax.Array, chunks: int, parts: int, fill: int) -> jax.Array:
  """[B, T, ...] as [n, B, C, ...], a piece of each part of the row in every chunk; the last chunk filled up."""
  B, T, *rest = x_BT.shape
  x = x_BT.reshape(B, parts, T // parts, *rest)
  size = -(-T // parts // chunks)
  x = jnp.pad(x, [(0, 0), (0, 0), (0, size * chunks - T // parts)] + [(0, 0)] * len(rest), constant_values=fill)
  x = x.reshape(B, parts, chunks, size, *rest)
  return jnp.moveaxis(x, 2, 0).reshape(chunks, B, parts * size, *rest)


def _joined(x_nBC: jax.Array, parts: int, length: int) -> jax.Array:
  """What ``_cut`` cut, [B, T, ...], without what filled it up."""
  chunks, B, C, *rest = x_nBC.shape
  x = jnp.moveaxis(x_nBC.reshape(chunks, B, parts, C // parts, *rest), 0, 2)
  return x.reshape(B, parts, -1, *rest)[:, :, : length // parts].reshape(B, length, *rest)
