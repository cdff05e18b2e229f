"""Multi-head attention with grouped queries: norms of q, k and v, biases, rotary positions, sliding window or global.

B batch, T query, S key, D model, N query heads, K key-value heads, H head.
"""

from dataclasses import dataclass, replace

import jax
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.attention.masks import Tokens, zeroed
from maxtext_like.layers.attention.rope import RopeConfig, rope_table, rotate
from maxtext_like.layers.cache import SCALE, Step, cache_slots
from maxtext_like.layers.context import Context, KeysValues
from maxtext_like.layers.kernels.attention.decode import DecodeName, decode_attention, reads
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.registry import Case, Choice, Name, attend, choose
from maxtext_like.layers.norms import NormConfig, RMSNorm, named
from maxtext_like.layers.param import Param, constant, fan_in
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.weight import product, products


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
  """Settings of an attention layer.

  Attributes:
    emb_dim, num_query_heads, num_kv_heads, head_dim: D, N, K, H.
    scale: factor on q.k: query_pre_attn_scalar ** -0.5 in Gemma 3; 1 in Gemma 4, where the q norm contains it.
    soft_cap: the scaled, unmasked scores become cap * tanh(scores / cap); None: no cap.
    rope: the rotary table of this layer.
    window: number of keys a query sees, including itself; None: global attention.
    norm: norm of the heads of q and k, each with its own scale; None: q and k are not normed.
    value_norm: v is normed in the same way, without a parameter (Gemma 4).
    value_is_key: v is the raw k projection, before norm and rotation (Gemma 4 "k_eq_v").
    qkv_bias, o_bias: biases on q, k and v, and on the output.
    query_gain, branch_gain: factors on the initial size of queries and of the output (``models/initial_values.py``).
    shares_kv_as: name under which later layers reuse the keys and values of this layer; None: no other layer uses them.
    reuses_kv_of: name of the keys and values of an earlier layer that this layer reuses; it projects only q and the output.
      None: it projects its own keys and values.
    bidirectional_images: tokens of one image see each other in this layer.
    kernel: the kernel that the configuration selects.
    decode: the kernel of a single new token in generation: "xla" or "pallas_triton".
    platform: "cpu", "gpu" or "tpu": where the program will run.
    capability: CUDA compute capability of that device; None if it is not an NVIDIA GPU or not known.
    failed: kernels that failed their self-test on that device.
  """

  emb_dim: int
  num_query_heads: int
  num_kv_heads: int
  head_dim: int
  scale: float
  rope: RopeConfig
  soft_cap: float | None = None
  window: int | None = None
  norm: NormConfig | None = None
  value_norm: bool = False
  value_is_key: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  query_gain: float = 1.0
  branch_gain: float = 1.0
  shares_kv_as: str | None = None
  reuses_kv_of: str | None = None
  bidirectional_images: bool = False
  kernel: Choice = "auto"
  decode: DecodeName = "xla"
  platform: str = "cpu"
  capability: str | None = None
  failed: tuple[Name, ...] = ()

  def __post_init__(self):
    # Shapes that must fit each other.
    if self.num_query_heads % self.num_kv_heads:
      raise ValueError(
        f"attention: num_query_heads={self.num_query_heads} is not a multiple of num_kv_heads={self.num_kv_heads}, so "
        "the query heads cannot be grouped\n  fix: change one of the two keys"
      )
    # Values that would leave a query without keys, or scores without a meaning.
    if self.window is not None and self.window < 1:
      raise ValueError(
        f"attention: the sliding window is {self.window}, but a query always sees itself\n  fix: set it to 1 or more"
      )
    if self.soft_cap is not None and not self.soft_cap > 0:
      raise ValueError(f"attention: the soft cap of the scores is {self.soft_cap}\n  fix: set it above 0, or remove it")
    # Rotation and norms apply to the numbers of one head.
    if self.rope.dim != self.head_dim:
      raise ValueError(f"attention: the rotary dimension {self.rope.dim} differs from head_dim={self.head_dim}")
    if self.norm is not None and self.norm.dim != self.head_dim:
      raise ValueError(f"attention: the norm of q and k is for {self.norm.dim} numbers, but head_dim={self.head_dim}")
    if self.value_norm and self.norm is None:
      raise ValueError("attention: value_norm is set, but v is normed in the same way as q and k, and norm is None")
    # A layer shares only keys and values that it computes itself.
    if self.shares_kv_as and self.reuses_kv_of:
      raise ValueError(
        f"attention: the layer reuses the keys and values {self.reuses_kv_of!r}, so it has none to share as "
        f"{self.shares_kv_as!r}"
      )

  @property
  def score_stddev(self) -> float:
    """Standard deviation of the scores before training, for queries and keys whose elements have a mean square of 1."""
    return self.scale / self.head_dim**-0.5 * self.query_gain

  def layer(self, precision: Precision) -> "Attention":
    """Return the layer with this configuration."""
    return Attention(self, precision)


@dataclass(frozen=True)
class Attention:
  """Multi-head attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023)."""

  cfg: AttentionConfig
  precision: Precision

  def params(self) -> dict:
    # Projections. A layer that reuses keys and values has only q and o.
    c, dtype = self.cfg, self.precision.weight_dtype
    D, N, K, H = c.emb_dim, c.num_query_heads, c.num_kv_heads, c.head_dim
    # Names and logical axes of the projected heads.
    heads = {"q": (N, "heads")}
    if not c.reuses_kv_of:
      heads["k"] = (K, "kv_heads")
      if not c.value_is_key:
        heads["v"] = (K, "kv_heads")
    spec: dict = {name: Param((D, count, H), ("embed", axis, "head_dim"), dtype) for name, (count, axis) in heads.items()}
    # The initial size of the branch: in equal parts in values, unless a norm follows them, and in the output projection.
    gain = c.branch_gain
    if "v" in heads and not c.value_norm:
      gain = c.branch_gain**0.5
      spec["v"] = replace(spec["v"], init=fan_in(0, gain=gain))
    spec["o"] = Param((N, H, D), ("heads", "head_dim", "embed"), dtype, fan_in(0, 1, gain=gain))
    # Norms of q and k, and the initial scale of the queries.
    if c.norm:
      spec |= {f"{name}_norm": RMSNorm(c.norm, self.precision).params() for name in heads if name != "v"}
      spec["q_norm"] = RMSNorm(replace(c.norm, initial_scale=c.query_gain), self.precision).params()
    else:
      spec["q"] = replace(spec["q"], init=fan_in(0, gain=c.query_gain))
    # Biases.
    if c.qkv_bias:
      axes = {name: (axis, "head_dim") for name, (_, axis) in heads.items()}
      spec |= {f"{name}_bias": Param((heads[name][0], H), a, dtype, constant(0.0)) for name, a in axes.items()}
    if c.o_bias:
      spec["o_bias"] = Param((D,), (None,), dtype, constant(0.0))
    return spec

  def cache_shapes(self, length: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return the number of cache slots for rows of ``length`` tokens, and the shapes of one token's entries.

    There are no arrays if the layer reuses the keys and values of another layer."""
    c = self.cfg
    shapes = {} if c.reuses_kv_of else {"k": (c.num_kv_heads, c.head_dim), "v": (c.num_kv_heads, c.head_dim)}
    return cache_slots(c.window, length), shapes

  def shared_kv(self) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the keys and values that later layers reuse, by name, without batch and positions."""
    return {self.cfg.shares_kv_as: (self.cfg.num_kv_heads, self.cfg.head_dim)} if self.cfg.shares_kv_as else {}

  def case(self, length: int, *, images: bool, documents: bool = False, context: int = 1) -> Case:
    """Describe the computation that a kernel must support.

    Args:
      length: positions in a row.
      images: the rows contain images.
      documents: a row may contain several documents.
      context: number of devices that the positions of a row are split over.
    """
    c = self.cfg
    return Case(
      platform=c.platform,
      capability=c.capability,
      precision=self.precision,
      query_heads=c.num_query_heads,
      kv_heads=c.num_kv_heads,
      head_dim=c.head_dim,
      value_dim=c.head_dim,
      length=length,
      context=context,
      window=c.window,
      bidirectional_images=c.bidirectional_images and images,
      documents=documents,
      soft_cap=c.soft_cap,
    )

  def _heads(self, p: dict, x_BTD: jax.Array) -> dict[str, jax.Array]:
    """Project to heads [B, T, N or K, H]: "q", and "k" and "v" if the layer has them, before their norms."""
    names = [name for name in ("q", "k", "v") if name in p]
    weights = [p[name] for name in names]
    heads = zip(names, products(self.precision, "BTD,DNH->BTNH", x_BTD, weights, large=True), strict=True)
    return {name: self.precision.plus(y, p[f"{name}_bias"]) if self.cfg.qkv_bias else y for name, y in heads}

  def _positioned(self, p: dict, name: str, y_BTNH: jax.Array, table) -> jax.Array:
    """Norm and rotate the heads of "q" or "k"."""
    norm = self.cfg.norm
    return rotate(named(RMSNorm(norm, self.precision), p, f"{name}_norm", y_BTNH) if norm else y_BTNH, table)

  def _keys_and_values(self, p: dict, heads: dict[str, jax.Array], table) -> KeysValues:
    """Return normed and rotated keys, and values, both [B, T, K, H]."""
    c = self.cfg
    v_BTKH = heads["k" if c.value_is_key else "v"]
    if c.value_norm and c.norm:
      v_BTKH = RMSNorm(replace(c.norm, with_scale=False), self.precision)({}, v_BTKH)
    return self._positioned(p, "k", heads["k"], table), v_BTKH

  def standalone(
    self, p: dict, x_BTD: jax.Array, positions: jax.Array, tokens: Tokens = Tokens(), kv: KeysValues | None = None
  ) -> tuple[jax.Array, KeysValues]:
    """Run the layer outside a decoder, as a module wrapper does. Return the output and the keys and values, both [B, T, K, H].

    Args:
      p, x_BTD, positions, tokens: as in ``__call__`` and its context.
      kv: keys and values of an earlier layer, if this layer reuses them.
    """
    shared = {} if kv is None or not self.cfg.reuses_kv_of else {self.cfg.reuses_kv_of: kv}
    out_BTD, kv = self._attend(p, x_BTD, Context(positions, tokens, shared=shared))
    return zeroed(out_BTD, tokens.real), kv

  def __call__(self, p: dict, x_BTD: jax.Array, ctx: Context) -> jax.Array:
    """Compute attention.

    Args:
      p: parameters.
      x_BTD: normed input.
      ctx: positions and tokens; in generation the cache {"k", "v"} [R, K, C, H] of earlier tokens; shared keys and values. The
        layer adds its own keys and values to ``ctx`` if later layers reuse them.

    Returns:
      [B, T, D] in ``dtype`` (float32 with float16). The values at padding are undefined if ``Tokens.real`` is set.

    Raises:
      ValueError: the context does not contain the keys and values that the layer reuses.
    """
    out, kv = self._attend(p, x_BTD, ctx)
    if self.cfg.shares_kv_as:
      ctx.share_kv(self.cfg.shares_kv_as, kv)
    return out

  @jax.named_scope("attention")
  def _attend(self, p: dict, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, KeysValues]:
    # Project and rotate the queries.
    c, table = self.cfg, rope_table(self.cfg.rope, ctx.positions)
    heads = self._heads(p, x_BTD)
    q_BTNH = self._positioned(p, "q", heads["q"], table)
    # Keys and values: those of an earlier layer, or this layer's own. In generation they include the cached ones.
    if c.reuses_kv_of:
      kv = ctx.shared.get(c.reuses_kv_of)
      if kv is None:
        raise ValueError(
          f"attention: the layer reuses the keys and values {c.reuses_kv_of!r} of an earlier layer, but the context has only "
          f"{sorted(ctx.shared)}"
        )
    else:
      k, v = self._keys_and_values(p, heads, table)
      held = ctx.update_cache(k=k, v=v)
      kv = held["k"], held["v"]
    # Attend. Generation uses the mask of its cache and the unfused kernel; other passes use the kernel that fits the case.
    if ctx.step is not None:
      images = ctx.tokens.images if c.bidirectional_images else None
      # The kernel reads a cache as it is stored, so the rows of the batch must be those of the cache in order.
      if c.decode == "pallas_triton" and ctx.step.decodes(x_BTD.shape[1]) and ctx.step.rows is None:
        arrays: dict[str, jax.Array] = {"k": kv[0], "v": kv[1]} if c.reuses_kv_of else ctx.aux["cache"]
        # It reads all entries of a ring, so none may be older than the window.
        exact = c.window is None or arrays["k"].shape[2] <= c.window
        if exact and reads(q_BTNH.dtype, arrays["k"]):
          return self._output(p, self._decode(q_BTNH, arrays, ctx.step)), kv
      mask = ctx.step.mask(x_BTD.shape[1], kv[0].shape[2], window=c.window, images=images)
      how = {"scale": c.scale, "precision": self.precision, "soft_cap": c.soft_cap}
      out_BTNH, _ = dot_product_attention(q_BTNH, *kv, mask, cached=True, **how)
    else:
      T, tokens = x_BTD.shape[1], ctx.tokens
      # The case decides the kernel: shapes, mask, dtypes, and devices that share a row.
      parts = ctx.rules.row_parts(T)
      case = self.case(T, images=tokens.images is not None, documents=tokens.several_documents, context=parts)
      kernel = choose(c.kernel, case, c.failed)
      out_BTNH = attend(
        kernel.name,
        q_BTNH,
        *kv,
        tokens,
        window=c.window,
        bidirectional_images=c.bidirectional_images,
        scale=c.scale,
        precision=self.precision,
        rules=ctx.rules,
        soft_cap=c.soft_cap,
      )
      if not kernel.named:
        out_BTNH = checkpoint_name(out_BTNH, "attention")
    return self._output(p, out_BTNH), kv

  def _decode(self, q_BTNH: jax.Array, arrays: dict[str, jax.Array], step: Step) -> jax.Array:
    """Attend with the kernel for a single new token. ``arrays`` are those of the cache, which may be an 8-bit one."""
    scales = {f"{name}_scale": arrays.get(name + SCALE) for name in ("k", "v")}
    lengths = step.lengths(arrays["k"].shape[2])
    how = {"scale": self.cfg.scale, "soft_cap": self.cfg.soft_cap, **scales}
    return decode_attention(q_BTNH[:, 0], arrays["k"], arrays["v"], lengths, **how)[:, None]

  def _output(self, p: dict, out_BTNH: jax.Array) -> jax.Array:
    """Project the heads to the residual stream."""
    c = self.cfg
    out_BTD = product(self.precision, "BTNH,NHD->BTD", out_BTNH, p["o"], out=self.precision.branch_dtype, large=True)
    out_BTD = checkpoint_name(out_BTD, "output")
    return self.precision.plus(out_BTD, p["o_bias"]) if c.o_bias else out_BTD
