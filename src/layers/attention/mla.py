"""Multi-head latent attention (MLA) of DeepSeek V3, and its sparse form with an indexer in V3.2.

B batch, T query, S key, D model, N heads, R query latent, C key-value latent, P rotary part of a head, Q unrotated part,
V value head.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from maxtext_like.layers.attention import context_parallel, sparse_attention_tiles
from maxtext_like.layers.attention.absorbed import absorbed
from maxtext_like.layers.attention.indexer import Indexer, IndexerConfig, divergence, indexer_loss
from maxtext_like.layers.attention.masks import Keys, Tokens, zeroed
from maxtext_like.layers.attention.rope import RopeConfig, rope_table, rotate, yarn_mscale
from maxtext_like.layers.attention.sparse_attention_tiles import Arrays, chosen, over_queries
from maxtext_like.layers.context import CAPTURES, Aux, Context
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.registry import AttentionKernel, Case, Choice, Name, attend, choose
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, constant, fan_in
from maxtext_like.layers.partition import ShardedWeight, axes_of, on_devices, repeated, vary
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import Rules, free_mesh
from maxtext_like.layers.weight import Rounded, Weight, own_rows, product, rows, values

Axes = tuple[str, ...]

# DeepSeek uses this epsilon for the norms of latents. The epsilon of the configuration applies to the other norms.
LATENT_EPSILON = 1e-6
# In generation a token gathers its selected keys if the cache has more than this many times their number. Gathering reads and
# writes each latent once before it is read.
_GATHERED_SHARE = 3


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
  """Settings of latent attention.

  Attributes:
    emb_dim, num_heads: D and N.
    q_lora_rank: R; 0 projects queries in one step.
    kv_lora_rank: C.
    nope_dim, rope_dim, value_dim: Q, P and V.
    rope: the table of the rotary part.
    bias: biases on q_a, kv_a and o.
    query_gain, branch_gain: factors on the initial size of queries and of the output (``models/initial_values.py``).
    indexer: settings of the indexer for sparse attention; None: dense attention.
    indexer_sparse: attend to the selected keys only. False is the dense warm-up, in which the indexer is trained to predict
      attention but does not select keys.
    indexer_loss_weight: weight of the KL loss; 0 computes none.
    kernel: the kernel that the configuration selects.
    platform: "cpu", "gpu" or "tpu": where the program will run.
    capability: CUDA compute capability of that device; None if it is not an NVIDIA GPU or not known.
    failed: kernels that failed their self-test on that device.
  """

  emb_dim: int
  num_heads: int
  q_lora_rank: int
  kv_lora_rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  rope: RopeConfig
  bias: bool = False
  query_gain: float = 1.0
  branch_gain: float = 1.0
  indexer: IndexerConfig | None = None
  indexer_sparse: bool = True
  indexer_loss_weight: float = 0.0
  kernel: Choice = "auto"
  platform: str = "cpu"
  capability: str | None = None
  failed: tuple[Name, ...] = ()

  def __post_init__(self):
    if self.rope.dim != self.rope_dim:
      raise ValueError(f"MLA: the rotary table has {self.rope.dim} dimensions, but rope_dim={self.rope_dim}")

  def layer(self, precision: Precision) -> "MLA":
    """Return the layer with this configuration."""
    return MLA(self, precision)

  @property
  def scale(self) -> float:
    """(Q + P) ** -0.5, times YaRN's temperature squared."""
    m = 1.0
    if self.rope.kind == "yarn" and self.rope.mscale_all_dim:
      m = yarn_mscale(self.rope.factor, self.rope.mscale_all_dim)
    return (self.nope_dim + self.rope_dim) ** -0.5 * m * m

  @property
  def score_stddev(self) -> float:
    """Standard deviation of the scores before training, for queries and keys whose elements have a mean square of 1."""
    return self.scale / (self.nope_dim + self.rope_dim) ** -0.5 * self.query_gain

  def gathers(self, count: int) -> bool:
    """True if queries that see ``count`` keys should gather the selected keys.

    Gathering takes fewer multiplications for large ``count``, because a query then computes only ``topk`` scores. But the
    latents are wider than the keys and values of a head. TPUs never gather, because they read single rows slowly."""
    if self.indexer is None or not self.indexer_sparse or self.platform == "tpu":
      return False
    work = self.indexer.topk * (2 * self.kv_lora_rank + self.rope_dim)
    return work < count * (self.nope_dim + self.rope_dim + self.value_dim)


@dataclass(frozen=True)
class MLA:
  """Attention whose keys and values are projected from one latent of C numbers per token (DeepSeek-V2, section 2.1)."""

  cfg: MLAConfig
  precision: Precision

  def _latent_norm(self, dim: int) -> RMSNorm:
    return RMSNorm(NormConfig(dim=dim, epsilon=LATENT_EPSILON, round_before_scale=True), self.precision)

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    D, N, R, C, Q, P, V = c.emb_dim, c.num_heads, c.q_lora_rank, c.kv_lora_rank, c.nope_dim, c.rope_dim, c.value_dim
    half = c.branch_gain**0.5  # the initial size of the branch is in equal parts in values and output
    # Keys and values, the output, then queries: in two steps if there is a query latent, else in one.
    spec = {
      "kv_a": Param((D, C + P), ("embed", "kv_lora"), dtype),
      "kv_a_norm": self._latent_norm(C).params(),
      "kv_b": Param((C, N, Q + V), ("kv_lora", "heads", "head_dim"), dtype, fan_in(0, parts=((Q, 1.0), (V, half)))),
      "o": Param((N, V, D), ("heads", "head_dim", "embed"), dtype, fan_in(0, 1, gain=half)),
    }
    # With q_lora_rank the queries go through a latent too.
    if R:
      spec["q_a"] = Param((D, R), ("embed", "q_lora"), dtype)
      spec["q_a_norm"] = self._latent_norm(R).params()
      spec["q_b"] = Param((R, N, Q + P), ("q_lora", "heads", "head_dim"), dtype, fan_in(0, gain=c.query_gain))
    else:
      spec["q"] = Param((D, N, Q + P), ("embed", "heads", "head_dim"), dtype, fan_in(0, gain=c.query_gain))
    if c.bias:
      biases = {"kv_a_bias": C + P, "o_bias": D} | ({"q_a_bias": R} if R else {})
      spec |= {name: Param((size,), (None,), dtype, constant(0.0)) for name, size in biases.items()}
    if c.indexer:
      spec["indexer"] = Indexer(c.indexer, self.precision).params()
    return spec

  def _project(self, p, name, x_BTD):
    y = product(self.precision, "BTD,DR->BTR", x_BTD, p[name], large=True)
    return self.precision.plus(y, p[f"{name}_bias"]) if self.cfg.bias else y

  def _queries(self, p, x_BTD, table):
    """Return rotated queries [B, T, N, Q + P], and the normed latent [B, T, R] (None without q_lora_rank)."""
    c = self.cfg
    latent = None
    if c.q_lora_rank:
      latent = named(self._latent_norm(c.q_lora_rank), p, "q_a_norm", self._project(p, "q_a", x_BTD))
      q = product(self.precision, "BTR,RNH->BTNH", latent, p["q_b"], large=True)
    else:
      q = product(self.precision, "BTD,DNH->BTNH", x_BTD, p["q"], large=True)
    # Only the last part of each head is rotated.
    nope, rope = jnp.split(q, [c.nope_dim], axis=-1)
    return jnp.concatenate([nope, rotate(rope, table, interleave=c.rope.interleave)], axis=-1), latent

  def latents(self, p: dict, x_BTD: jax.Array, table) -> tuple[jax.Array, jax.Array]:
    """Return the entries of the cache: the normed latent [B, T, C], and the rotated part of the keys [B, T, P].

    All heads share the rotated part."""
    c = self.cfg
    latent, k_rope = jnp.split(self._project(p, "kv_a", x_BTD), [c.kv_lora_rank], axis=-1)
    return named(self._latent_norm(c.kv_lora_rank), p, "kv_a_norm", latent), rotate(k_rope, table, interleave=c.rope.interleave)

  def cache_shapes(self, length: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return the number of cache slots for rows of ``length`` tokens, and the shapes of one token's entries.

    "latent" is the normed latent followed by the rotated part of the keys."""
    c = self.cfg
    shapes = {"latent": (c.kv_lora_rank + c.rope_dim,)}
    return length, shapes | ({"index_k": (c.indexer.head_dim,)} if c.indexer else {})

  def shared_kv(self) -> dict[str, tuple[int, ...]]:
    """Shapes of keys and values that later layers reuse: none for this layer."""
    return {}

  def expand(self, kv_b: Any, latent_BSC: jax.Array, k_rope_BSP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Project latents to keys [B, S, N, Q + P] and values [B, S, N, V]."""
    # Expand the latent for every head. All heads share the rotated part of the keys.
    kv = product(self.precision, "BSC,CNH->BSNH", latent_BSC, kv_b, large=True)
    k_nope, v = jnp.split(kv, [self.cfg.nope_dim], axis=-1)
    k_rope: jax.Array = repeated(k_rope_BSP, k_nope.shape[2], 2)
    return jnp.concatenate([k_nope, k_rope], axis=-1), v

  def case(self, length: int, *, images: bool, documents: bool = False, context: int = 1) -> Case:
    """Describe the computation that a kernel must support. See ``Attention.case``. DeepSeek has no images."""
    del images
    c = self.cfg
    # Keys are expanded for every head, so there are as many key-value heads as query heads.
    return Case(
      platform=c.platform,
      capability=c.capability,
      precision=self.precision,
      query_heads=c.num_heads,
      kv_heads=c.num_heads,
      head_dim=c.nope_dim + c.rope_dim,
      value_dim=c.value_dim,
      length=length,
      context=context,
      documents=documents,
      probabilities=c.indexer is not None,  # the indexer selects keys, and its loss reads the probabilities
    )

  def may_gather(self, kv_b: Any, length: int) -> bool:
    """True if queries of rows of ``length`` positions may gather the selected keys. ``MLAConfig.gathers`` makes the choice.

    Short rows never gather, and neither do quantized or adapted weights. float16 does not, because ``risk`` has no bounds for
    the numbers in the absorbed form."""
    plain = isinstance(kv_b, Rounded) or not isinstance(kv_b, Weight)
    return length > sparse_attention_tiles.TILE and plain and self.precision.dtype != "float16"

  def pairs(self, length: int, kv_b: Any, parts: int = 1) -> int:
    """Return the number of (query, key) pairs of a row whose scores are computed in tiles of queries; 0 without tiles.

    Args:
      length: positions of a row.
      kv_b: the weight that projects latents to keys and values.
      parts: number of devices that share a row.
    """
    c = self.cfg
    if (indexer := c.indexer) is None or length <= sparse_attention_tiles.TILE:
      return 0
    gathers = self.may_gather(kv_b, length)
    keys = lambda seen: indexer.topk if gathers and c.gathers(seen) else seen
    return sum(count * keys(seen) for count, seen in sparse_attention_tiles.loop_sizes(length, parts))

  def tile_bytes(self, rows: int, length: int, heads: int, kv_b: Any, parts: int = 1) -> int:
    """Return the bytes that the backward pass of one tile (``sparse_attention_tiles``) needs in addition to its arguments.

    The terms were read from programs compiled for a GPU: the products of index heads once, the scores of the attention heads
    twice, and the gradients of keys and values. If keys are gathered: the gathered latents, and the scores of the attention
    heads.

    Args:
      rows: rows of one device.
      length: number of keys.
      heads: attention heads of one device.
      kv_b: the weight that projects latents to keys and values, or its shape.
      parts: number of devices that share a row.
    """
    c = self.cfg
    if (indexer := c.indexer) is None or length <= sparse_attention_tiles.TILE:
      return 0
    # The largest tile decides, which is the one with most visible keys.
    gathers, tile = self.may_gather(kv_b, length), min(sparse_attention_tiles.TILE, length // parts)

    def floats(seen: int) -> int:
      if gathers and c.gathers(seen):
        return tile * indexer.topk * (2 * heads + c.kv_lora_rank + c.rope_dim)
      width = c.nope_dim + c.rope_dim + c.value_dim
      return tile * (indexer.num_heads + 2 * heads) * seen + heads * width * seen

    return 4 * rows * max(floats(seen) for _, seen in sparse_attention_tiles.loop_sizes(length, parts))

  def standalone(self, p: dict, x_BTD: jax.Array, positions: jax.Array, tokens: Tokens = Tokens()) -> tuple[jax.Array, Aux]:
    """Run the layer outside a decoder, as a module wrapper does. Return the output and all values that it reports."""
    ctx = Context(positions, tokens, capture=frozenset(CAPTURES)).collecting()
    return zeroed(self(p, x_BTD, ctx), tokens.real), ctx.aux

  @jax.named_scope("mla")
  def __call__(self, p: dict, x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Compute attention.

    Args:
      p: parameters.
      x_BTD: normed input.
      ctx: positions and segments; in generation the cache {"latent" [R, S', C + P], "index_k" [R, S', ...]} of earlier tokens.
        With an indexer the layer reports "indexer_loss", and "indexer.topk_idx" [B, T, min(topk, S)] if captured.

    Returns:
      [B, T, D] in ``dtype`` (float32 with float16). The values at padding are undefined if ``Tokens.real`` is set.
    """
    # Project to queries and to the latents of keys and values. The indexer has its own queries and keys.
    c, tokens = self.cfg, ctx.tokens
    T = x_BTD.shape[1]
    table = rope_table(c.rope, ctx.positions)
    q, q_latent = self._queries(p, x_BTD, table)
    latent, k_rope = self.latents(p, x_BTD, table)
    queries, keys = {"q": q}, {"latent": latent, "k_rope": k_rope}
    if c.indexer:
      assert q_latent is not None, "IndexerConfig requires q_lora_rank"
      indexer = Indexer(c.indexer, self.precision)
      queries["index_q"], queries["index_weights"] = indexer.queries(p["indexer"], x_BTD, q_latent, ctx.positions)
      keys["index_k"] = indexer.keys(p["indexer"], x_BTD, ctx.positions)
    named, wanted = False, "indexer" in ctx.capture
    # Attend. There are four cases: generation, rows split over devices, an indexer, and plain attention with a kernel.
    if ctx.step is not None:
      # A cached entry is the latent followed by the rotated part of the keys.
      held = ctx.update_cache(
        latent=jnp.concatenate([latent, k_rope], axis=-1), **{n: k for n, k in keys.items() if n == "index_k"}
      )
      found = self._attend_cached(p["kv_b"], held, queries, ctx.step.mask(T, held["latent"].shape[1], window=None), wanted)
      out_BTNV, indices, loss = found["out"], found.get("indices"), None
    else:
      parts = ctx.rules.row_parts(T)
      kernel = choose(c.kernel, self.case(T, images=False, documents=tokens.several_documents, context=parts), c.failed)
      named = kernel.named
      if parts > 1:
        out_BTNV, indices, loss = self._attend_in_parts(kernel, p["kv_b"], queries, keys, tokens, ctx.rules, wanted)
      elif c.indexer:
        out_BTNV, indices, loss = self._indexed(p["kv_b"], queries, keys, tokens, Keys(tokens, 0), ctx.real, wanted)
      else:
        k, v = self.expand(p["kv_b"], keys["latent"], keys["k_rope"])
        out_BTNV, indices, loss = attend(kernel.name, q, k, v, tokens, rules=ctx.rules, **self._how), None, None
    # Report the indexer's results, and project to the residual stream.
    if indices is not None:
      ctx.tap("indexer.topk_idx", indices)
    if loss is not None:
      ctx.report("indexer_loss", loss)
    if not named:
      out_BTNV = checkpoint_name(out_BTNV, "attention")
    out = product(self.precision, "BTNV,NVD->BTD", out_BTNV, p["o"], out=self.precision.branch_dtype, large=True)
    out = checkpoint_name(out, "output")
    return self.precision.plus(out, p["o_bias"]) if c.bias else out

  @property
  def _how(self) -> dict[str, Any]:
    """Arguments of a kernel for attention without selected keys."""
    return {"window": None, "bidirectional_images": False, "scale": self.cfg.scale, "precision": self.precision}

  def _attend(
    self, keys: Arrays, queries: Arrays, visible: jax.Array, *, wanted: int | None = None, heads_on: Axes = ()
  ) -> Arrays:
    """Compute attention with all scores in memory, or with gathered keys if that needs less work.

    Args:
      keys: "k", "v"; with an indexer "index_k"; if keys may be gathered also "latent", "k_rope" and "kv_b".
      queries: "q"; with an indexer "index_q" and "index_weights".
      visible: bool [B or 1, T, S].
      wanted: the total number of keys if the indices of the selected keys are captured, else None.
      heads_on: inside shard_map, the mesh axes that split heads.

    Returns:
      "out" [B, T, N, V]; with an indexer also "indices" [B, T, min(topk, wanted)] if captured, and the "divergence" [B, T] if
      the indexer is trained.
    """
    c = self.cfg
    plainly = functools.partial(
      dot_product_attention, queries["q"], keys["k"], keys["v"], scale=c.scale, precision=self.precision
    )
    if not c.indexer:
      return {"out": plainly(visible)[0]}
    # Index scores, and the indices for a capture.
    found, indexer = {}, Indexer(c.indexer, self.precision)
    scores = indexer.score(queries["index_q"], queries["index_weights"], keys["index_k"])
    if wanted is not None:
      more = ((0, 0), (0, 0), (0, wanted - scores.shape[-1]))
      found["indices"] = indexer.best(jnp.pad(scores, more), jnp.pad(visible, more))
    # Attention over gathered keys, or over all keys with a mask.
    if "kv_b" in keys and c.gathers(scores.shape[-1]):
      scores, mask, found["out"], probs = self._gathered(keys, queries["q"], scores, visible)
    else:
      mask = chosen(indexer.select(scores, visible)) if c.indexer_sparse else visible
      found["out"], probs = plainly(mask)
      probs = probs[:, :, 0]
    # The divergence of the index scores from the attention probabilities, summed over the heads of all devices.
    if c.indexer_loss_weight:
      heads_summed = jnp.sum(jax.lax.stop_gradient(probs).astype(jnp.float32), axis=1)
      if heads_on:
        heads_summed = jax.lax.psum(heads_summed, heads_on)
      found["divergence"] = divergence(scores, heads_summed, mask)
    return found

  def _attend_cached(self, kv_b: Any, held: Arrays, queries: Arrays, visible: jax.Array, wanted: bool) -> Arrays:
    """Compute attention over the entries of a cache. The arguments and the result are as in ``_attend``.

    A single new token reads the latents, with the weight absorbed into its query: heads are never expanded. Many new tokens
    expand the latents, which takes fewer multiplications. float16 always expands (see ``may_gather``)."""
    c, (T, S) = self.cfg, visible.shape[1:]
    if T > 1 or self.precision.dtype == "float16":
      k, v = self.expand(kv_b, *jnp.split(held["latent"], [c.kv_lora_rank], axis=-1))
      return self._attend(held | {"k": k, "v": v}, queries, visible, wanted=S if wanted else None)
    weight, latent = values(self.precision, kv_b), held["latent"]
    if not c.indexer:
      return {"out": absorbed(weight, queries["q"], latent, visible, scale=c.scale, precision=self.precision)[0]}
    # Of a long row, the latents of the selected keys are gathered. Otherwise the other keys are masked.
    indexer = Indexer(c.indexer, self.precision)
    scores = indexer.score(queries["index_q"], queries["index_weights"], held["index_k"])
    found = {"indices": indexer.best(scores, visible)} if wanted else {}
    # If few of the keys are selected, gather them. Otherwise mask the others.
    if c.indexer_sparse and c.platform != "tpu" and _GATHERED_SHARE * c.indexer.topk < S:
      indices = indexer.best(scores, visible)
      mask = jnp.take_along_axis(visible, indices, axis=-1)
      latent = jax.vmap(rows)(latent, indices)
    else:
      mask = indexer.select(scores, visible) if c.indexer_sparse else visible
    return found | {"out": absorbed(weight, queries["q"], latent, mask, scale=c.scale, precision=self.precision)[0]}

  def _gathered(
    self, keys: Arrays, q_BTNH: jax.Array, scores_BTS: jax.Array, visible: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute attention over gathered keys. All heads share the latents of the selected keys.

    Returns:
      For the K selected keys: index scores [B, T, K], bool [B, T, K] which of them are visible, the output [B, T, N, V], and
      the probabilities [B, N, T, K].
    """
    assert self.cfg.indexer is not None
    # Gather the latents of the selected keys.
    indices = chosen(Indexer(self.cfg.indexer, self.precision).best(scores_BTS, visible))
    seen = jnp.take_along_axis(jnp.broadcast_to(visible, scores_BTS.shape), indices, axis=-1)
    latent_BTKC, rope_BTKP = (jax.vmap(rows)(keys[name], indices) for name in ("latent", "k_rope"))
    with jax.named_scope("qk_product"):
      k_BTKC = jnp.concatenate([latent_BTKC, rope_BTKP], axis=-1)
    out, probs_BNTK = absorbed(keys["kv_b"], q_BTNH, k_BTKC, seen, scale=self.cfg.scale, precision=self.precision)
    return jnp.take_along_axis(scores_BTS, indices, axis=-1), seen, out, probs_BNTK

  def _indexed(
    self,
    kv_b,
    queries: Arrays,
    keys: Arrays,
    tokens: Tokens,
    where: Keys,
    real: jax.Array | None,
    wanted: bool,
    *,
    tokens_on: Axes = (),
    heads_on: Axes = (),
  ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Compute attention with an indexer, one tile of queries at a time.

    Args:
      kv_b: the weight that projects latents to keys and values.
      queries: "q", "index_q" and "index_weights".
      keys: "latent", "k_rope" and "index_k".
      tokens, real: segments of the queries, and bool [B, T]: real tokens.
      where: position of the keys.
      wanted: the indices of the selected keys are captured.
      tokens_on, heads_on: inside shard_map, the mesh axes that split tokens and heads.

    Returns:
      [B, T, N, V], the best keys [B, T, min(topk, S)] or None, and the loss.
    """
    # Expand keys and values once for all tiles. Queries are then processed tile by tile.
    weight, (k, v) = self.cfg.indexer_loss_weight, self.expand(kv_b, keys["latent"], keys["k_rope"])
    attend = functools.partial(self._attend, wanted=k.shape[1] if wanted else None, heads_on=heads_on)
    shared = {"kv_b": values(self.precision, kv_b)} if self.may_gather(kv_b, k.shape[1]) else {}
    found = over_queries(attend, shared, keys | {"k": k, "v": v}, queries, tokens, where)
    loss = weight * indexer_loss(found["divergence"], real, tokens_on) if weight else jnp.zeros((), jnp.float32)
    return found["out"], found.get("indices"), loss

  def _attend_in_parts(
    self, kernel: AttentionKernel, kv_b, queries: Arrays, keys: Arrays, tokens: Tokens, rules: Rules, wanted: bool
  ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Compute attention with the positions of a row split over devices (see ``context_parallel``).

    Each device gathers the latents of the row, which are small, and expands them for its own queries."""
    # Find how queries and the weight are sharded.
    mesh = free_mesh()
    assert mesh is not None, "rows are split over a mesh"
    plain = not isinstance(kv_b, Weight)
    place = rules.spec(queries["q"].shape, ("batch", "sequence", "heads" if plain else None, None), mesh)
    rows = PartitionSpec(*place[:2])
    tokens_on = tuple(a for entry in rows for a in axes_of(entry))
    heads_on = axes_of(place[2]) if len(place) > 2 else ()
    # A quantized or adapted weight is replicated. A plain one stays split over heads, and is gathered over other axes.
    held = ShardedWeight(PartitionSpec())
    if plain:
      own = ("heads",) if heads_on else ()
      held = ShardedWeight.of(rules, mesh, kv_b.shape, self.params()["kv_b"].axes, own, tokens_on)
    part = context_parallel.Part(axes_of(rows[1]))

    # The body runs on each device, with its own queries and with the keys of the complete row.
    def on_device(kv_b, queries, keys, tokens):
      kv_b = jax.tree.map(lambda w: vary(w, (*tokens_on, *heads_on)), held.gather(kv_b))
      keys = {name: part.fetch(x) for name, x in keys.items()}
      B, T = queries["q"].shape[:2]
      tokens, where = part.keys(tokens, B, T)
      # Without an indexer, any kernel can be used on the expanded heads.
      if self.cfg.indexer is None:
        k, v = self.expand(kv_b, keys["latent"], keys["k_rope"])
        return kernel.run(queries["q"], k, v, tokens, keys=where, rules=rules, **self._how), None, None
      # With one, the selection of keys and the loss of the indexer are computed on each device too.
      real = None if tokens.segments is None else tokens.segments > 0
      on = {"tokens_on": tokens_on, "heads_on": heads_on}
      return self._indexed(kv_b, queries, keys, tokens, where, real, wanted, **on)

    # Only the queries are split over heads.
    of_queries = {name: place if name == "q" else rows for name in queries}
    specs = (held.spec, of_queries, rows, rows)
    return on_devices(on_device, mesh, specs, (place, rows, PartitionSpec()))(own_rows(kv_b), queries, keys, tokens)
