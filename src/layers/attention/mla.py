"""Multi-head latent attention of DeepSeek V3, and its sparse form in V3.2.

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
from maxtext_like.layers.attention.cache import cached_mask
from maxtext_like.layers.attention.indexer import Indexer, IndexerConfig, divergence, indexer_loss
from maxtext_like.layers.attention.masks import Keys, Tokens, masked_softmax, zeroed
from maxtext_like.layers.attention.rope import RopeConfig, rope_table, rotate, yarn_mscale
from maxtext_like.layers.attention.sparse_attention_tiles import Arrays, chosen, over_queries
from maxtext_like.layers.context import CAPTURES, Aux, Context
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.registry import AttentionKernel, Case, Choice, Name, attend, choose
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, constant, fan_in
from maxtext_like.layers.partition import Held, axes_of, free_mesh, on_devices, repeated, vary
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.sharding_rules import Rules
from maxtext_like.layers.weight import Rounded, Weight, alone, product, rows, values

Axes = tuple[str, ...]

# DeepSeek fixes the epsilon of the latent norms; the configuration's is for the others.
LATENT_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
  """What latent attention needs to know.

  Attributes:
    emb_dim, num_heads: D and N.
    q_lora_rank: R; 0 projects queries in one step.
    kv_lora_rank: C.
    nope_dim, rope_dim, value_dim: Q, P and V.
    rope: the table of the rotary part.
    bias: biases on q_a, kv_a and o.
    query_gain, output_gain: factors on the initial values of queries and of the output projection.
    indexer: sparse attention; None: dense.
    indexer_sparse: attend to the selected keys; False is the dense warm-up, where the indexer is trained to predict
      attention and does not act on it.
    indexer_loss_weight: of the KL loss; 0 computes none.
    kernel: what the configuration asks for.
    platform: "cpu", "gpu" or "tpu", where the program will run.
    capability: CUDA's compute capability there; None: no NVIDIA GPU, or not known.
    failed: kernels that failed their self-test there.
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
  output_gain: float = 1.0
  indexer: IndexerConfig | None = None
  indexer_sparse: bool = True
  indexer_loss_weight: float = 0.0
  kernel: Choice = "auto"
  platform: str = "cpu"
  capability: str | None = None
  failed: tuple[Name, ...] = ()

  def __post_init__(self):
    if self.rope.dim != self.rope_dim:
      raise ValueError(f"rotary table of {self.rope.dim} dimensions for a rotary part of {self.rope_dim}")

  def layer(self, precision: Precision) -> "MLA":
    """The mixer of this configuration."""
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
    """Standard deviation of the scores before training, of queries and keys whose elements have mean square 1."""
    return self.scale / (self.nope_dim + self.rope_dim) ** -0.5 * self.query_gain

  def gathers(self, count: int) -> bool:
    """Whether queries that may see so many keys attend to gathered ones: it takes fewer multiplications, and no TPU has to read
    rows one by one. Latents are wider than the keys and values of a head."""
    if self.indexer is None or not self.indexer_sparse or self.platform == "tpu":
      return False
    work = self.indexer.topk * (2 * self.kv_lora_rank + self.rope_dim)
    return work < count * (self.nope_dim + self.rope_dim + self.value_dim)


@dataclass(frozen=True)
class MLA:
  """Attention whose keys and values are expanded from one latent of C numbers a token (DeepSeek-V2, section 2.1)."""

  cfg: MLAConfig
  precision: Precision

  def _latent_norm(self, dim: int) -> RMSNorm:
    return RMSNorm(NormConfig(dim=dim, epsilon=LATENT_EPSILON, round_before_scale=True), self.precision)

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    D, N, R, C, Q, P, V = c.emb_dim, c.num_heads, c.q_lora_rank, c.kv_lora_rank, c.nope_dim, c.rope_dim, c.value_dim
    spec = {
      "kv_a": Param((D, C + P), ("embed", "kv_lora"), dtype),
      "kv_a_norm": self._latent_norm(C).params(),
      "kv_b": Param((C, N, Q + V), ("kv_lora", "heads", "head_dim"), dtype),
      "o": Param((N, V, D), ("heads", "head_dim", "embed"), dtype, fan_in(0, 1, gain=c.output_gain)),
    }
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
    """Queries [B, T, N, Q + P], rotated, and the normed latent [B, T, R] (None without q_lora_rank)."""
    c = self.cfg
    latent = None
    if c.q_lora_rank:
      latent = named(self._latent_norm(c.q_lora_rank), p, "q_a_norm", self._project(p, "q_a", x_BTD))
      q = product(self.precision, "BTR,RNH->BTNH", latent, p["q_b"], large=True)
    else:
      q = product(self.precision, "BTD,DNH->BTNH", x_BTD, p["q"], large=True)
    nope, rope = jnp.split(q, [c.nope_dim], axis=-1)
    return jnp.concatenate([nope, rotate(rope, table, interleave=c.rope.interleave)], axis=-1), latent

  def latents(self, p: dict, x_BTD: jax.Array, table) -> tuple[jax.Array, jax.Array]:
    """What a cache holds: the normed latent [B, T, C] and the rotated key part all heads share [B, T, P]."""
    c = self.cfg
    latent, k_rope = jnp.split(self._project(p, "kv_a", x_BTD), [c.kv_lora_rank], axis=-1)
    return named(self._latent_norm(c.kv_lora_rank), p, "kv_a_norm", latent), rotate(k_rope, table, interleave=c.rope.interleave)

  def cache_shapes(self, length: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Slots of a cache for rows of ``length`` tokens, and its arrays' shapes without batch and slots."""
    c = self.cfg
    shapes = {"latent": (c.kv_lora_rank,), "k_rope": (c.rope_dim,)}
    return length, shapes | ({"index_k": (c.indexer.head_dim,)} if c.indexer else {})

  def lent(self) -> dict[str, tuple[int, ...]]:
    """No layer shares what this one has."""
    return {}

  def expand(self, kv_b: Any, latent_BSC: jax.Array, k_rope_BSP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [B, S, N, Q + P] and values [B, S, N, V] of cached latents."""
    kv = product(self.precision, "BSC,CNH->BSNH", latent_BSC, kv_b, large=True)
    k_nope, v = jnp.split(kv, [self.cfg.nope_dim], axis=-1)
    k_rope: jax.Array = repeated(k_rope_BSP, k_nope.shape[2], 2)
    return jnp.concatenate([k_nope, k_rope], axis=-1), v

  def case(self, length: int, *, images: bool, documents: bool = False, context: int = 1) -> Case:
    """What a kernel has to do for rows of ``length`` positions, of several documents or of one, on so many devices each;
    DeepSeek has no images."""
    del images
    c = self.cfg
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
      probabilities=c.indexer is not None,  # which selects keys, and whose loss reads them
    )

  def may_gather(self, kv_b: Any, length: int) -> bool:
    """Whether queries of rows of so many positions may attend to gathered keys, given what expands latents; where they see
    enough of them (``MLAConfig.gathers``) they do. Short rows keep to one form, whatever their weights are made of; float16 to
    the numbers whose bounds are known (``risk``)."""
    plain = isinstance(kv_b, Rounded) or not isinstance(kv_b, Weight)
    return length > sparse_attention_tiles.TILE and plain and self.precision.dtype != "float16"

  def pairs(self, length: int, kv_b: Any, parts: int = 1) -> int:
    """(query, key) pairs of a row, which so many devices share, whose scores are made in tiles of queries, given what expands
    latents; 0: it has no tiles."""
    c = self.cfg
    if (indexer := c.indexer) is None or length <= sparse_attention_tiles.TILE:
      return 0
    gathers = self.may_gather(kv_b, length)
    keys = lambda seen: indexer.topk if gathers and c.gathers(seen) else seen
    return sum(count * keys(seen) for count, seen in sparse_attention_tiles.stretches(length, parts))

  def tile_bytes(self, rows: int, length: int, heads: int, kv_b: Any, parts: int = 1) -> int:
    """What the backward pass of a tile of queries (``query_tiles``) has at once beside its arguments, as read in programs
    compiled for a GPU: products of index heads once, what heads make of pairs twice, and gradients of keys and values; where
    keys are gathered these and what heads make of them.

    Args:
      rows: of one device.
      length: of the keys.
      heads: of the attention, of one device.
      kv_b: what expands latents, or its shape.
      parts: devices that share a row.
    """
    c = self.cfg
    if (indexer := c.indexer) is None or length <= sparse_attention_tiles.TILE:
      return 0
    gathers, tile = self.may_gather(kv_b, length), min(sparse_attention_tiles.TILE, length // parts)

    def floats(seen: int) -> int:
      if gathers and c.gathers(seen):
        return tile * indexer.topk * (2 * heads + c.kv_lora_rank + c.rope_dim)
      width = c.nope_dim + c.rope_dim + c.value_dim
      return tile * (indexer.num_heads + 2 * heads) * seen + heads * width * seen

    return 4 * rows * max(floats(seen) for _, seen in sparse_attention_tiles.stretches(length, parts))

  def alone(self, p: dict, x_BTD: jax.Array, positions: jax.Array, tokens: Tokens = Tokens()) -> tuple[jax.Array, Aux]:
    """The layer by itself, as a face calls it: the output and all that it notes and taps."""
    ctx = Context(positions, tokens, capture=frozenset(CAPTURES)).collecting()
    return zeroed(self(p, x_BTD, ctx), tokens.real), ctx.aux

  @jax.named_scope("mla")
  def __call__(self, p: dict, x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Attends.

    Args:
      p: parameters.
      x_BTD: normed input.
      ctx: positions and segments; in generation the cache {"latent" [B, S', C], "k_rope" [B, S', P], "index_k"} of earlier
        tokens. With an indexer it notes "indexer_loss" and taps "indexer.topk_idx" [B, T, min(topk, S)].

    Returns:
      [B, T, D] in ``dtype`` (float32 with float16); of padding anything, where ``Tokens.real`` tells of it.
    """
    c, tokens = self.cfg, ctx.tokens
    T = x_BTD.shape[1]
    table = rope_table(c.rope, ctx.positions)
    q, q_latent = self._queries(p, x_BTD, table)
    latent, k_rope = self.latents(p, x_BTD, table)
    queries, keys = {"q": q}, {"latent": latent, "k_rope": k_rope}
    if c.indexer:
      assert q_latent is not None, "IndexerConfig asks for q_lora_rank"
      indexer = Indexer(c.indexer, self.precision)
      queries["index_q"], queries["index_weights"] = indexer.queries(p["indexer"], x_BTD, q_latent, ctx.positions)
      keys["index_k"] = indexer.keys(p["indexer"], x_BTD, ctx.positions)
    keys = ctx.remember(**keys)
    named, wanted = False, "indexer" in ctx.capture
    if ctx.step is not None:
      visible = cached_mask(ctx.step, T, keys["latent"].shape[1] - T, window=None)
      k, v = self.expand(p["kv_b"], keys["latent"], keys["k_rope"])
      found = self._attend(keys | {"k": k, "v": v}, queries, visible, wanted=k.shape[1] if wanted else None)
      out_BTNV, indices, loss = found["out"], found.get("indices"), None
    else:
      parts = context_parallel.parts(ctx.rules, T)
      kernel = choose(c.kernel, self.case(T, images=False, documents=tokens.several_documents, context=parts), c.failed)
      named = kernel.named
      if parts > 1:
        out_BTNV, indices, loss = self._attend_in_parts(kernel, p["kv_b"], queries, keys, tokens, ctx.rules, wanted)
      elif c.indexer:
        out_BTNV, indices, loss = self._indexed(p["kv_b"], queries, keys, tokens, Keys(tokens, 0), ctx.real, wanted)
      else:
        k, v = self.expand(p["kv_b"], keys["latent"], keys["k_rope"])
        out_BTNV, indices, loss = attend(kernel.name, q, k, v, tokens, rules=ctx.rules, **self._how), None, None
    if indices is not None:
      ctx.tap("indexer.topk_idx", indices)
    if loss is not None:
      ctx.note("indexer_loss", loss)
    if not named:
      out_BTNV = checkpoint_name(out_BTNV, "attention")
    out = product(self.precision, "BTNV,NVD->BTD", out_BTNV, p["o"], float32=self.precision.float32_branches, large=True)
    out = checkpoint_name(out, "output")
    return self.precision.plus(out, p["o_bias"]) if c.bias else out

  @property
  def _how(self) -> dict[str, Any]:
    """Of a kernel that is not told which keys are selected."""
    return {"window": None, "bidirectional_images": False, "scale": self.cfg.scale, "precision": self.precision}

  def _attend(
    self, keys: Arrays, queries: Arrays, visible: jax.Array, *, wanted: int | None = None, heads_on: Axes = ()
  ) -> Arrays:
    """Attention with every score written out, or, where that is less work, those of the chosen keys.

    Args:
      keys: "k", "v"; with an indexer "index_k", and where chosen keys can be gathered "latent", "k_rope" and "kv_b".
      queries: "q"; with an indexer "index_q" and "index_weights".
      visible: bool [B or 1, T, S].
      wanted: how many keys there are in all, where what is chosen of them is asked for.
      heads_on: inside shard_map, the mesh axes that heads are split over.

    Returns:
      "out" [B, T, N, V]; with an indexer "indices" [B, T, min(topk, wanted)], if asked for, and if it is trained the
      "divergence" [B, T].
    """
    c = self.cfg
    plainly = functools.partial(
      dot_product_attention, queries["q"], keys["k"], keys["v"], scale=c.scale, precision=self.precision
    )
    if not c.indexer:
      return {"out": plainly(visible)[0]}
    found, indexer = {}, Indexer(c.indexer, self.precision)
    scores = indexer.score(queries["index_q"], queries["index_weights"], keys["index_k"])
    if wanted is not None:
      more = ((0, 0), (0, 0), (0, wanted - scores.shape[-1]))
      found["indices"] = indexer.best(jnp.pad(scores, more), jnp.pad(visible, more))
    if "kv_b" in keys and c.gathers(scores.shape[-1]):
      scores, mask, found["out"], probs = self._gathered(keys, queries["q"], scores, visible)
    else:
      mask = chosen(indexer.select(scores, visible)) if c.indexer_sparse else visible
      found["out"], probs = plainly(mask)
      probs = probs[:, :, 0]
    if c.indexer_loss_weight:
      heads_summed = jnp.sum(jax.lax.stop_gradient(probs).astype(jnp.float32), axis=1)
      if heads_on:
        heads_summed = jax.lax.psum(heads_summed, heads_on)
      found["divergence"] = divergence(scores, heads_summed, mask)
    return found

  def _gathered(
    self, keys: Arrays, q_BTNH: jax.Array, scores_BTS: jax.Array, visible: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Attention to the chosen keys alone, whose latents all heads share: queries are brought to the latents' numbers, and what
    they attend to is brought back (DeepSeek-V2, section 2.1.2: the weight that expands latents is absorbed).

    Returns:
      Of the K chosen keys the index scores [B, T, K], and which of them are visible; the output [B, T, N, V], and the
      probabilities [B, N, T, K].
    """
    c, precision = self.cfg, self.precision
    assert c.indexer is not None
    indices = chosen(Indexer(c.indexer, precision).best(scores_BTS, visible))
    seen = jnp.take_along_axis(jnp.broadcast_to(visible, scores_BTS.shape), indices, axis=-1)
    latent_BTKC, rope_BTKP = (jax.vmap(rows)(keys[name], indices) for name in ("latent", "k_rope"))
    of_keys, of_values = jnp.split(keys["kv_b"], [c.nope_dim], axis=-1)
    nope, rope = jnp.split(q_BTNH, [c.nope_dim], axis=-1)
    q_BTNC = jnp.concatenate([precision.einsum("BTNQ,CNQ->BTNC", nope, of_keys, large=True), rope], axis=-1)
    with jax.named_scope("qk_product"):
      k_BTKC = jnp.concatenate([latent_BTKC, rope_BTKP], axis=-1)
      products = precision.einsum("BTNC,BTKC->BNTK", q_BTNC, k_BTKC, float32=precision.float32_qk_product) * c.scale
    with jax.named_scope("softmax"):
      products = products.astype(jnp.float32 if precision.float32_logits else precision.dtype)
      probs_BNTK = masked_softmax(products, seen[:, None])
    with jax.named_scope("pv_product"):
      latent_BTNC = precision.einsum("BNTK,BTKC->BTNC", probs_BNTK, latent_BTKC)
    out = precision.einsum("BTNC,CNV->BTNV", latent_BTNC, of_values, large=True)
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
    """Attention with an indexer, a tile of queries at a time.

    Args:
      kv_b: the weight that expands latents.
      queries: "q", "index_q" and "index_weights".
      keys: "latent", "k_rope" and "index_k".
      tokens, real: of the queries; ``real`` is bool [B, T].
      where: the keys stand.
      wanted: whether what is chosen is asked for.
      tokens_on, heads_on: inside shard_map, the mesh axes that they are split over.

    Returns:
      [B, T, N, V], the best keys [B, T, min(topk, S)] or None, and the loss.
    """
    weight, (k, v) = self.cfg.indexer_loss_weight, self.expand(kv_b, keys["latent"], keys["k_rope"])
    attend = functools.partial(self._attend, wanted=k.shape[1] if wanted else None, heads_on=heads_on)
    shared = {"kv_b": values(self.precision, kv_b)} if self.may_gather(kv_b, k.shape[1]) else {}
    found = over_queries(attend, shared, keys | {"k": k, "v": v}, queries, tokens, where)
    loss = weight * indexer_loss(found["divergence"], real, tokens_on) if weight else jnp.zeros((), jnp.float32)
    return found["out"], found.get("indices"), loss

  def _attend_in_parts(
    self, kernel: AttentionKernel, kv_b, queries: Arrays, keys: Arrays, tokens: Tokens, rules: Rules, wanted: bool
  ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The same where the positions of a row are split over devices: each gathers the latents, small as they are, and expands
    them for its own queries. See ``context_parallel``."""
    mesh = free_mesh()
    assert mesh is not None, "rows are split over a mesh"
    plain = not isinstance(kv_b, Weight)
    place = rules.spec(queries["q"].shape, ("batch", "sequence", "heads" if plain else None, None), mesh)
    rows = PartitionSpec(*place[:2])
    tokens_on = tuple(a for entry in rows for a in axes_of(entry))
    heads_on = axes_of(place[2]) if len(place) > 2 else ()
    held = Held(PartitionSpec())
    if plain:
      own = ("heads",) if heads_on else ()
      held = Held.of(rules, mesh, kv_b.shape, self.params()["kv_b"].axes, own, tokens_on)
    part = context_parallel.Part(axes_of(rows[1]))

    def on_device(kv_b, queries, keys, tokens):
      kv_b = jax.tree.map(lambda w: vary(w, (*tokens_on, *heads_on)), held.gather(kv_b))
      keys = {name: part.fetch(x) for name, x in keys.items()}
      B, T = queries["q"].shape[:2]
      tokens, where = part.keys(tokens, B, T)
      if self.cfg.indexer is None:
        k, v = self.expand(kv_b, keys["latent"], keys["k_rope"])
        return kernel.run(queries["q"], k, v, tokens, keys=where, rules=rules, **self._how), None, None
      real = None if tokens.segments is None else tokens.segments > 0
      on = {"tokens_on": tokens_on, "heads_on": heads_on}
      return self._indexed(kv_b, queries, keys, tokens, where, real, wanted, **on)

    of_queries = {name: place if name == "q" else rows for name in queries}
    specs = (held.spec, of_queries, rows, rows)
    return on_devices(on_device, mesh, specs, (place, rows, PartitionSpec()))(alone(kv_b), queries, keys, tokens)
