"""``model:``, the dimensions and the layer pattern of one model. Names are MaxText's where MaxText has the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from maxtext_like.config.problems import InvalidSectionError, Problem, above_zero, at_least

LayerType = Literal["sliding", "global"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """What a model is: sizes, layer pattern, rotary tables, experts. Sizes are counts of elements; lengths are tokens."""

  model_name: str
  decoder_block: Literal["gemma3", "gemma4", "deepseek"]
  vocab_size: int
  emb_dim: int
  mlp_dim: int
  num_decoder_layers: int
  num_query_heads: int
  num_kv_heads: int
  head_dim: int  # 0 with DeepSeek, whose head sizes are qk_nope_head_dim, qk_rope_head_dim and v_head_dim
  mlp_activation: Literal["gelu", "silu"]  # gelu is the tanh approximation, as in every Gemma
  normalization_layer_epsilon: float
  logits_via_embedding: bool
  max_position_embeddings: int
  final_logits_soft_cap: float | None
  attention_bias: bool
  query_pre_attn_scalar: float | None  # Gemma 3: scores are scaled by this ** -0.5; None is head_dim

  # Layer pattern of the Gemma families.
  layer_types: tuple[LayerType, ...] | None  # None: every inhomogeneous_layer_cycle_interval-th layer is global
  inhomogeneous_layer_cycle_interval: int
  sliding_window_size: int | None
  global_head_dim: int | None
  global_num_kv_heads: int | None
  share_kv_projections: bool  # Gemma 4 "k_eq_v": global layers take v from the raw k projection
  num_kv_shared_layers: int
  use_double_wide_mlp: bool
  hidden_size_per_layer_input: int
  vocab_size_per_layer_input: int | None  # None: vocab_size
  use_bidirectional_image_attn: bool

  # Rotary position embedding. For Gemma, rope_max_timescale is the global layers'.
  rope_type: Literal["default", "linear", "yarn"]
  rope_max_timescale: float
  local_rope_max_timescale: float
  rope_linear_scaling_factor: float
  global_rope_proportion: float
  rope_factor: float
  beta_fast: float
  beta_slow: float
  mscale: float
  mscale_all_dim: float
  original_max_position_embeddings: int
  rope_interleave: bool

  # Mixture of experts.
  num_experts: int  # 0: none
  num_experts_per_tok: int
  moe_mlp_dim: int
  shared_experts: int
  first_num_dense_layers: int
  norm_topk_prob: bool
  routed_scaling_factor: float
  routed_bias: bool
  routed_bias_update_rate: float
  n_routing_groups: int
  topk_routing_group: int
  load_balance_loss_weight: float

  # Multi-head latent attention and the sparse indexer of DeepSeek.
  q_lora_rank: int  # 0: one query projection
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  use_indexer: bool
  indexer_n_heads: int
  indexer_head_dim: int
  indexer_topk: int
  indexer_sparse_training: bool  # False: dense warm-up, only the indexer is trained
  indexer_loss_scaling_factor: float

  # Token ids with a meaning for the model.
  pad_token_id: int | None
  bos_token_id: int | None
  eos_token_id: int | tuple[int, ...] | None

  def __post_init__(self):
    if problems := list(self.problems()):
      raise InvalidSectionError(problems)

  @property
  def eos_token_ids(self) -> tuple[int, ...]:
    """The tokens that end an answer, in order."""
    ids = self.eos_token_id
    return () if ids is None else ids if isinstance(ids, tuple) else (ids,)

  def attention_types(self) -> tuple[LayerType, ...]:
    """The type of every layer, spelt out."""
    if self.layer_types is not None:
      return self.layer_types
    if self.decoder_block == "deepseek":
      return ("global",) * self.num_decoder_layers
    cycle = self.inhomogeneous_layer_cycle_interval
    types: tuple[LayerType, ...] = tuple("sliding" if (i + 1) % cycle else "global" for i in range(self.num_decoder_layers))
    return types

  def problems(self) -> Iterator[Problem]:
    """Every contradiction among the values, each with the keys that take part."""
    sizes = ["vocab_size", "emb_dim", "mlp_dim", "num_decoder_layers", "num_query_heads", "num_kv_heads"]
    sizes += ["max_position_embeddings", "inhomogeneous_layer_cycle_interval"]
    sizes += ["original_max_position_embeddings", "n_routing_groups", "topk_routing_group"]
    yield from at_least(self, 1, *sizes)
    counts = ["head_dim", "num_kv_shared_layers", "hidden_size_per_layer_input", "num_experts", "num_experts_per_tok"]
    counts += ["moe_mlp_dim", "shared_experts", "first_num_dense_layers", "q_lora_rank", "kv_lora_rank"]
    counts += ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "indexer_n_heads", "indexer_head_dim"]
    counts += ["indexer_topk", "routed_bias_update_rate", "load_balance_loss_weight", "indexer_loss_scaling_factor"]
    yield from at_least(self, 0, *counts, "mscale", "mscale_all_dim", "bos_token_id", "pad_token_id")
    for token in self.eos_token_ids:
      if token < 0:
        yield Problem(f"eos_token_id = {token} is below 0", ("eos_token_id",), "token ids begin at 0")
    yield from at_least(self, 1, "global_head_dim", "global_num_kv_heads", "vocab_size_per_layer_input")
    positive = ["normalization_layer_epsilon", "rope_max_timescale", "local_rope_max_timescale", "rope_factor"]
    positive += ["rope_linear_scaling_factor", "routed_scaling_factor", "beta_fast", "beta_slow"]
    yield from above_zero(self, *positive, "final_logits_soft_cap", "query_pre_attn_scalar")
    yield from self._head_problems()
    yield from self._expert_problems()
    yield from self._deepseek_problems() if self.decoder_block == "deepseek" else self._gemma_problems()

  def _head_problems(self) -> Iterator[Problem]:
    for heads in ("num_kv_heads", "global_num_kv_heads"):
      n = getattr(self, heads)
      if n and self.num_query_heads % n:
        yield Problem(
          f"num_query_heads = {self.num_query_heads} is not divisible by {heads} = {n}",
          ("num_query_heads", heads),
          "each kv head serves an equal number of query heads",
        )
    for size in ("head_dim", "global_head_dim", "qk_rope_head_dim"):
      if (getattr(self, size) or 0) % 2:
        yield Problem(f"{size} = {getattr(self, size)} is odd", (size,), "rotary embedding turns pairs: make it even")

  def _expert_problems(self) -> Iterator[Problem]:
    E, k, groups = self.num_experts, self.num_experts_per_tok, self.n_routing_groups
    if E == 0:
      return
    if k > E:
      yield Problem(
        f"num_experts_per_tok = {k} is more than num_experts = {E}", ("num_experts_per_tok", "num_experts"),
        f"num_experts_per_tok may be 1 to {E}",
      )  # fmt: skip
    for name in ("num_experts_per_tok", "moe_mlp_dim"):
      if getattr(self, name) == 0:
        yield Problem(f"{name} = 0 with num_experts = {E}", (name, "num_experts"), f"set {name}")
    if groups > 1 and E % groups:
      yield Problem(
        f"num_experts = {E} is not divisible by n_routing_groups = {groups}", ("num_experts", "n_routing_groups"),
        "groups of experts have equal sizes",
      )  # fmt: skip
    elif groups > 1 and E // groups < 2:
      yield Problem(
        f"n_routing_groups = {groups} leaves groups of {E // groups} of num_experts = {E}",
        ("n_routing_groups", "num_experts"),
        "a group is scored by its two best experts: make groups of at least 2",
      )
    if self.topk_routing_group > groups:
      yield Problem(
        f"topk_routing_group = {self.topk_routing_group} is more than n_routing_groups = {groups}",
        ("topk_routing_group", "n_routing_groups"),
      )
    elif groups > 0 and k > E // groups * self.topk_routing_group and k <= E:
      yield Problem(
        f"num_experts_per_tok = {k} is more than the {E // groups * self.topk_routing_group} experts of "
        f"topk_routing_group = {self.topk_routing_group} groups",
        ("num_experts_per_tok", "topk_routing_group", "n_routing_groups", "num_experts"),
        "keep more groups",
      )

  def _gemma_problems(self) -> Iterator[Problem]:
    L = self.num_decoder_layers
    if self.head_dim == 0:
      yield Problem("head_dim is not set", ("head_dim",), "set the size of a head")
    if self.sliding_window_size is None:
      yield Problem("sliding_window_size is not set", ("sliding_window_size",), "set it to the number of keys a token sees")
    elif self.sliding_window_size < 1:
      yield Problem(
        f"sliding_window_size = {self.sliding_window_size}", ("sliding_window_size",),
        "the window counts the token itself, so it is at least 1",
      )  # fmt: skip
    if self.layer_types is not None and len(self.layer_types) != L:
      yield Problem(
        f"layer_types has {len(self.layer_types)} entries, num_decoder_layers is {L}",
        ("layer_types", "num_decoder_layers"),
      )
    elif L >= 1 and self.inhomogeneous_layer_cycle_interval >= 1:
      yield from self._sharing_problems()
    if not 0 < self.global_rope_proportion <= 1:
      yield Problem(f"global_rope_proportion = {self.global_rope_proportion:g} is outside (0, 1]", ("global_rope_proportion",))

  def _sharing_problems(self) -> Iterator[Problem]:
    L, types, shared = self.num_decoder_layers, self.attention_types(), self.num_kv_shared_layers
    if shared >= L:
      yield Problem(
        f"num_kv_shared_layers = {shared} of num_decoder_layers = {L}", ("num_kv_shared_layers", "num_decoder_layers"),
        "the first layers own the keys and values that the rest share, so at least one must be left",
      )  # fmt: skip
    elif shared > 0:
      owners, sharers = types[: L - shared], types[L - shared :]
      for kind in sorted(set(sharers) - set(owners)):
        yield Problem(
          f"a {kind} layer among the last {shared} reuses keys and values, but none of the first {L - shared} is {kind}",
          ("num_kv_shared_layers", "num_decoder_layers", "inhomogeneous_layer_cycle_interval", "layer_types"),
          "share fewer layers",
        )

  def _deepseek_problems(self) -> Iterator[Problem]:
    L, dense = self.num_decoder_layers, self.first_num_dense_layers
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
      if getattr(self, name) == 0:
        yield Problem(f"{name} is not set", (name,), "latent attention needs it")
    if dense > L:
      yield Problem(
        f"first_num_dense_layers = {dense} of num_decoder_layers = {L}",
        ("first_num_dense_layers", "num_decoder_layers"),
      )
    elif self.num_experts == 0 and dense < L:
      yield Problem(
        f"num_experts = 0, but {L - dense} layers after the first_num_dense_layers = {dense} have experts",
        ("num_experts", "first_num_dense_layers", "num_decoder_layers"),
        f"set num_experts, or first_num_dense_layers: {L}",
      )
    if self.routed_bias_update_rate > 0 and not self.routed_bias:
      yield Problem(
        f"routed_bias_update_rate = {self.routed_bias_update_rate:g} with routed_bias: false",
        ("routed_bias_update_rate", "routed_bias"),
        "set routed_bias: true, or the rate to 0",
      )
    if self.use_indexer:
      yield from self._indexer_problems()

  def _indexer_problems(self) -> Iterator[Problem]:
    for name in ("indexer_n_heads", "indexer_head_dim", "indexer_topk"):
      if getattr(self, name) == 0:
        yield Problem(f"{name} is not set", (name, "use_indexer"), "the indexer needs it")
    if self.q_lora_rank == 0:
      yield Problem("use_indexer with q_lora_rank = 0", ("use_indexer", "q_lora_rank"), "the indexer reads the query latent")
    if 0 < self.indexer_head_dim < self.qk_rope_head_dim:
      yield Problem(
        f"indexer_head_dim = {self.indexer_head_dim} is less than qk_rope_head_dim = {self.qk_rope_head_dim}",
        ("indexer_head_dim", "qk_rope_head_dim"),
        "the first qk_rope_head_dim entries of an indexer head are rotated",
      )
    if not self.indexer_sparse_training and self.indexer_loss_scaling_factor == 0:
      yield Problem(
        "nothing would be trained: the dense warm-up trains the indexer alone, and the factor of its loss is 0",
        ("indexer_sparse_training", "indexer_loss_scaling_factor"),
        "set indexer_loss_scaling_factor above 0, or indexer_sparse_training: true",
      )
