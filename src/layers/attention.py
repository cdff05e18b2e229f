"""Attention of Gemma 3 and 4: grouped queries, normed q and k (and v), rotary positions, sliding or global.

B batch, T query, S key, D model, N query heads, K key-value heads, H head.
"""

from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name

from maxtext_like.layers.cache import Step, cached_mask, joined
from maxtext_like.layers.kernels.attention.dot_product import dot_product_attention
from maxtext_like.layers.kernels.attention.registry import Case, Choice, attend, choose
from maxtext_like.layers.masks import Tokens
from maxtext_like.layers.norms import NormConfig, RMSNorm
from maxtext_like.layers.param import Param, fan_in
from maxtext_like.layers.precision import Precision
from maxtext_like.layers.rope import RopeConfig, rope_table, rotate


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
  """What attention needs to know.

  Attributes:
    emb_dim, num_query_heads, num_kv_heads, head_dim: D, N, K, H.
    scale: multiplies q.k: query_pre_attn_scalar ** -0.5 in Gemma 3, 1 in Gemma 4, whose q norm absorbs it.
    rope: the rotary table of this layer.
    window: keys a query sees, itself included; None: global.
    epsilon, norm_plus_one: of the q and k norms.
    value_norm: v is normalised, without a parameter (Gemma 4).
    value_is_key: v is the raw k projection, before norm and rotation (Gemma 4 "k_eq_v").
    shared_kv: k and v come from an earlier layer; only q and the output are projected.
    bidirectional_blocks: tokens of one image see each other in this layer.
    kernel: what the configuration asks for.
    platform: "cpu", "gpu" or "tpu", where the program will run.
  """

  emb_dim: int
  num_query_heads: int
  num_kv_heads: int
  head_dim: int
  scale: float
  rope: RopeConfig
  window: int | None = None
  epsilon: float = 1e-6
  norm_plus_one: bool = False
  value_norm: bool = False
  value_is_key: bool = False
  shared_kv: bool = False
  bidirectional_blocks: bool = False
  kernel: Choice = "auto"
  platform: str = "cpu"

  def __post_init__(self):
    if self.num_query_heads % self.num_kv_heads:
      raise ValueError(f"{self.num_query_heads} query heads do not divide among {self.num_kv_heads} key-value heads")
    if self.window is not None and self.window < 1:
      raise ValueError(f"a sliding window needs at least 1 key (the query itself), got {self.window}")
    if self.rope.dim != self.head_dim:
      raise ValueError(f"rotary dimension {self.rope.dim} differs from head_dim {self.head_dim}")


@dataclass(frozen=True)
class Attention:
  """Multi-head attention with grouped queries (Vaswani et al. 2017; Ainslie et al. 2023)."""

  cfg: AttentionConfig
  precision: Precision

  def _norm(self, *, with_scale: bool = True) -> RMSNorm:
    c = self.cfg
    norm = NormConfig(dim=c.head_dim, epsilon=c.epsilon, with_scale=with_scale, scale_plus_one=c.norm_plus_one)
    return RMSNorm(norm, self.precision)

  def params(self) -> dict:
    c, dtype = self.cfg, self.precision.weight_dtype
    D, N, K, H = c.emb_dim, c.num_query_heads, c.num_kv_heads, c.head_dim
    kv_axes = ("embed", "kv_heads", "head_dim")
    spec = {
      "q": Param((D, N, H), ("embed", "heads", "head_dim"), dtype),
      "o": Param((N, H, D), ("heads", "head_dim", "embed"), dtype, fan_in(0, 1)),
      "q_norm": self._norm().params(),
    }
    if not c.shared_kv:
      spec["k"] = Param((D, K, H), kv_axes, dtype)
      spec["k_norm"] = self._norm().params()
      if not c.value_is_key:
        spec["v"] = Param((D, K, H), kv_axes, dtype)
    return spec

  def cache_shapes(self) -> dict[str, tuple[int, ...]]:
    """Shapes of a cache's arrays, without batch and slots; none for a layer that shares keys and values."""
    c = self.cfg
    return {} if c.shared_kv else {"k": (c.num_kv_heads, c.head_dim), "v": (c.num_kv_heads, c.head_dim)}

  def case(self, length: int, *, images: bool) -> Case:
    """What a kernel has to do for rows of ``length`` positions, with images among them or not."""
    c, precision = self.cfg, self.precision
    return Case(
      platform=c.platform,
      dtype=precision.dtype,
      query_heads=c.num_query_heads,
      kv_heads=c.num_kv_heads,
      head_dim=c.head_dim,
      value_dim=c.head_dim,
      length=length,
      window=c.window,
      image_blocks=c.bidirectional_blocks and images,
      float32_qk_product=precision.float32_qk_product,
      float32_logits=precision.float32_logits,
    )

  def keys_and_values(self, p: dict, x_BTD: jax.Array, table) -> tuple[jax.Array, jax.Array]:
    """Normed and rotated keys, and values, both [B, T, K, H]."""
    k_BTKH = self.precision.einsum("BTD,DKH->BTKH", x_BTD, p["k"])
    v_BTKH = k_BTKH if self.cfg.value_is_key else self.precision.einsum("BTD,DKH->BTKH", x_BTD, p["v"])
    if self.cfg.value_norm:
      v_BTKH = self._norm(with_scale=False)({}, v_BTKH)
    return rotate(self._norm()(p["k_norm"], k_BTKH), table), v_BTKH

  def _output(self, p: dict, out_BTNH: jax.Array) -> jax.Array:
    # A float16 sum could overflow; the norm or the residual stream that takes it is float32 then.
    return self.precision.einsum("BTNH,NHD->BTD", out_BTNH, p["o"], float32=self.precision.dtype == "float16")

  @jax.named_scope("attention")
  def __call__(
    self,
    p: dict,
    x_BTD: jax.Array,
    positions: jax.Array,
    tokens: Tokens = Tokens(),
    kv: tuple[jax.Array, jax.Array] | None = None,
    cache: dict | None = None,
    step: Step | None = None,
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attends.

    Args:
      p: parameters.
      x_BTD: normed input.
      positions: int32 [B, T], in tokens; the rotary angle.
      tokens: segments and image blocks.
      kv: keys and values of an earlier layer, for a layer that shares them.
      cache: {"k", "v"} [B, C, K, H] of earlier tokens, in generation.
      step: where the tokens stand, in generation.

    Returns:
      The output [B, T, D] in ``dtype`` (float32 with float16), and the keys and values that were used, both
      [B, S, K, H]; S = T, and C + T in generation.

    Raises:
      ValueError: a layer that shares keys and values got none.
    """
    c = self.cfg
    table = rope_table(c.rope, positions)
    q_BTNH = rotate(self._norm()(p["q_norm"], self.precision.einsum("BTD,DNH->BTNH", x_BTD, p["q"])), table)
    if not c.shared_kv:
      kv = self.keys_and_values(p, x_BTD, table)
      if cache is not None:
        kv = (joined(cache["k"], kv[0]), joined(cache["v"], kv[1]))
    if kv is None:
      raise ValueError("this layer shares the keys and values of an earlier layer, and was given none")
    if step is not None:
      T, S = x_BTD.shape[1], kv[0].shape[1]
      mask = cached_mask(step, T, S - T, window=c.window, blocks=tokens.blocks if c.bidirectional_blocks else None)
      out_BTNH, _ = dot_product_attention(q_BTNH, *kv, mask, scale=c.scale, precision=self.precision)
      return self._output(p, out_BTNH), kv
    kernel = choose(c.kernel, self.case(x_BTD.shape[1], images=tokens.blocks is not None))
    out_BTNH = attend(
      kernel.name,
      q_BTNH,
      *kv,
      tokens,
      window=c.window,
      bidirectional_blocks=c.bidirectional_blocks,
      scale=c.scale,
      precision=self.precision,
    )
    out_BTNH = checkpoint_name(out_BTNH, "attention")
    return self._output(p, out_BTNH), kv
