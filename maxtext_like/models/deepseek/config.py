"""The ``model:`` keys of DeepSeek V3 and V3.2."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from maxtext_like.config.key_class import Adds, Mathematics, SelectsTrained, Shape, TrainingOnly, When
from maxtext_like.config.model import WITH_EXPERTS, ExpertsConfig, Part, even
from maxtext_like.config.problems import Problem, above_zero, at_least

SPELLINGS = {
  "bos": ("<｜begin▁of▁sentence｜>",),
  "eos": ("<｜end▁of▁sentence｜>",),
  "pad": ("<｜▁pad▁｜>",),
  "user": ("<｜User｜>",),
  "assistant": ("<｜Assistant｜>",),
}

_YARN = When("rope_type", "yarn")
_WITH_INDEXER = When("use_indexer")


def chat_template(model: "Config") -> str:
  """Return the chat template that is published for a model. V3.2 has its own."""
  return "deepseek3.2" if model.use_indexer else "deepseek3"


@dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
  """``model:`` of DeepSeek: latent attention, YaRN, grouped routing, the sparse indexer."""

  rope_types = ("default", "yarn")
  parts = frozenset({"experts", "indexer"})

  attention_bias: Shape[bool]
  # Rotary position embedding.
  rope_factor: Mathematics[Annotated[float, _YARN]]
  beta_fast: Mathematics[Annotated[float, _YARN]]
  beta_slow: Mathematics[Annotated[float, _YARN]]
  mscale: Mathematics[Annotated[float, _YARN]]
  mscale_all_dim: Mathematics[Annotated[float, _YARN]]
  original_max_position_embeddings: Mathematics[Annotated[int, _YARN]]
  rope_interleave: Mathematics[bool]
  # Experts.
  shared_experts: Shape[Annotated[int, WITH_EXPERTS]]
  first_num_dense_layers: Shape[int]
  routed_scaling_factor: Mathematics[Annotated[float, WITH_EXPERTS]]
  routed_bias: Shape[Annotated[bool, WITH_EXPERTS]]
  routed_bias_update_rate: TrainingOnly[float]
  n_routing_groups: Mathematics[Annotated[int, WITH_EXPERTS]]
  topk_routing_group: Mathematics[Annotated[int, WITH_EXPERTS]]
  # Multi-head latent attention and the sparse indexer.
  q_lora_rank: Shape[int]  # 0: one query projection
  kv_lora_rank: Shape[int]
  qk_nope_head_dim: Shape[int]
  qk_rope_head_dim: Shape[int]
  v_head_dim: Shape[int]
  use_indexer: Shape[Annotated[bool, Adds("indexer", "indexer_sparse_training", before=False)]]
  indexer_n_heads: Shape[Annotated[int, _WITH_INDEXER]]
  indexer_head_dim: Shape[Annotated[int, _WITH_INDEXER]]
  indexer_topk: Mathematics[Annotated[int, _WITH_INDEXER]]
  # False: dense warm-up, which trains only the indexer. The two values are stages of one training, so a resumed run may change
  # the key, although attention becomes sparse.
  indexer_sparse_training: TrainingOnly[Annotated[bool, _WITH_INDEXER, SelectsTrained()]]
  indexer_loss_scaling_factor: TrainingOnly[Annotated[float, _WITH_INDEXER]]

  @property
  def trained_part(self) -> tuple[str, str] | None:
    """The only part of a layer that is trained, as in names of parameters, and the reason; None: all parts are trained."""
    if not self.use_indexer or self.indexer_sparse_training:
      return None
    return "indexer", "the dense warm-up (indexer_sparse_training: false) trains only the indexer"

  @property
  def router_bias_rate(self) -> float:
    """Step size of the router biases towards even load after each update; 0: they stay constant."""
    return self.routed_bias_update_rate

  def has(self, part: Part, layer: int | None = None) -> bool:
    """True if the model, or one of its layers, has a part."""
    if part == "indexer":
      return self.use_indexer
    return super().has(part) and (part != "experts" or layer is None or layer >= self.first_num_dense_layers)

  def problems(self) -> Iterator[Problem]:
    """Yield every contradiction between values, with the keys that are involved."""
    yield from super().problems()
    yield from at_least(self, 1, "original_max_position_embeddings", "n_routing_groups", "topk_routing_group")
    counts = ("shared_experts", "first_num_dense_layers", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")
    counts += ("qk_rope_head_dim", "v_head_dim", "indexer_n_heads", "indexer_head_dim", "indexer_topk")
    yield from at_least(self, 0, *counts, "routed_bias_update_rate", "indexer_loss_scaling_factor", "mscale", "mscale_all_dim")
    yield from above_zero(self, "rope_factor", "routed_scaling_factor", "beta_fast", "beta_slow")
    yield from even(self, "qk_rope_head_dim")
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
      if getattr(self, name) == 0:
        yield Problem(
          f"{name} is not set",
          (name,),
          f"set {name} to the size in the released model's config.json: latent attention needs it",
        )
    if self.attn_logits_soft_cap is not None:
      yield Problem(
        f"attn_logits_soft_cap = {self.attn_logits_soft_cap:g} in decoder_block {self.decoder_block}",
        ("attn_logits_soft_cap", "decoder_block"),
        "leave it out: the scores of latent attention, and of the indexer that learns from them, have no soft cap",
      )
    yield from self._dense_layer_problems()
    if self.num_experts:
      yield from self._group_problems()
    if self.routed_bias_update_rate > 0 and not self.routed_bias:
      yield Problem(
        f"routed_bias_update_rate = {self.routed_bias_update_rate:g} with routed_bias: false",
        ("routed_bias_update_rate", "routed_bias"),
        "set routed_bias: true, or the rate to 0",
      )
    if self.use_indexer:
      yield from self._indexer_problems()

  def _dense_layer_problems(self) -> Iterator[Problem]:
    L, dense = self.num_decoder_layers, self.first_num_dense_layers
    if dense > L:
      yield Problem(
        f"first_num_dense_layers = {dense} of num_decoder_layers = {L}",
        ("first_num_dense_layers", "num_decoder_layers"),
        fix=f"set first_num_dense_layers from 0 to {L}",
      )
    elif self.num_experts == 0 and dense < L:
      yield Problem(
        f"num_experts = 0, but {L - dense} layers after the first_num_dense_layers = {dense} have experts",
        ("num_experts", "first_num_dense_layers", "num_decoder_layers"),
        f"set num_experts, or first_num_dense_layers: {L}",
      )

  def _group_problems(self) -> Iterator[Problem]:
    E, k, groups = self.num_experts, self.num_experts_per_tok, self.n_routing_groups
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
        fix=f"set topk_routing_group to at most {groups}",
      )
    elif groups > 0 and k > E // groups * self.topk_routing_group and k <= E:
      yield Problem(
        f"num_experts_per_tok = {k} is more than the {E // groups * self.topk_routing_group} experts of "
        f"topk_routing_group = {self.topk_routing_group} groups",
        ("num_experts_per_tok", "topk_routing_group", "n_routing_groups", "num_experts"),
        "keep more groups",
      )

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
        "nothing would be trained: the dense warm-up trains only the indexer, and the factor of its loss is 0",
        ("indexer_sparse_training", "indexer_loss_scaling_factor"),
        "set indexer_loss_scaling_factor above 0, or indexer_sparse_training: true",
      )

  def ignored_values(self) -> Iterator[Problem]:
    """Yield settings that can be built but have no effect, or another effect than they suggest."""
    yield from super().ignored_values()
    if self.rope_type == "yarn" and self.beta_fast <= self.beta_slow:
      yield Problem(
        f"beta_fast = {self.beta_fast:g} is not above beta_slow = {self.beta_slow:g}",
        ("beta_fast", "beta_slow"),
        fix="set beta_fast above beta_slow; the released models have 32 and 1",
      )
    if self.num_kv_heads != self.num_query_heads:
      yield Problem(
        f"num_kv_heads = {self.num_kv_heads} differs from num_query_heads = {self.num_query_heads}",
        ("num_kv_heads", "num_query_heads"),
        "latent attention expands keys and values to every head: make them equal",
      )
