"""Section ``model:``: the keys that all or several families have. Key names follow MaxText where it has the same key.

Each family extends these classes with its own keys and checks in ``models/<family>/config.py``. Code that is independent of
the family uses ``has``, ``effective`` and the other methods.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from maxtext_like.config.key_class import Mathematics, Shape, TrainingOnly, When, does_something
from maxtext_like.config.problems import InvalidSectionError, Problem, above_zero, at_least
from maxtext_like.layers.moe.router_losses import Definition, RouterLosses

RopeType = Literal["default", "linear", "yarn"]
Part = Literal["experts", "indexer", "vision pooler"]
"""Parts that only some models have, and that keys of ``precision:`` refer to."""

WITH_EXPERTS = When("num_experts")

SCORE_CAPS = (1e-4, 65504.0)
"""Smallest and largest soft cap of attention scores: the range of normal float16 numbers."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Sizes (in elements), lengths (in tokens), rotary embedding and token ids of a model.

  Class attributes, set by the family:
    rope_types: kinds of rotary embedding that the family supports.
    parts: optional parts that a model of the family may have.
  """

  rope_types: ClassVar[tuple[RopeType, ...]] = ("default",)
  parts: ClassVar[frozenset[Part]] = frozenset()

  model_name: TrainingOnly[str]
  decoder_block: Shape[str]  # one of models.registry.FAMILIES
  vocab_size: Shape[int]
  emb_dim: Shape[int]
  mlp_dim: Shape[int]
  num_decoder_layers: Shape[int]
  num_query_heads: Shape[int]
  num_kv_heads: Shape[int]
  mlp_activation: Mathematics[Literal["gelu", "silu"]]  # gelu is the tanh approximation, as in every Gemma
  normalization_layer_epsilon: Mathematics[float]
  logits_via_embedding: Shape[bool]
  max_position_embeddings: TrainingOnly[int]
  attn_logits_soft_cap: Mathematics[float | None]
  final_logits_soft_cap: Mathematics[float | None]
  rope_type: Mathematics[RopeType]
  rope_max_timescale: Mathematics[float]
  pad_token_id: TrainingOnly[int | None]
  bos_token_id: TrainingOnly[int | None]
  eos_token_id: TrainingOnly[int | tuple[int, ...] | None]

  def __post_init__(self):
    if problems := list(self.problems()):
      raise InvalidSectionError(problems)

  @property
  def eos_token_ids(self) -> tuple[int, ...]:
    """The tokens that end an answer, as a tuple."""
    ids = self.eos_token_id
    return () if ids is None else ids if isinstance(ids, tuple) else (ids,)

  @property
  def trained_part(self) -> tuple[str, str] | None:
    """(part, reason) if only one part of each layer is trained, with its name in parameter paths; None if all parts are."""
    return None

  @property
  def router_bias_rate(self) -> float:
    """Change of the routers' biases per update, towards equal load; 0: the biases are fixed."""
    return 0.0

  def has(self, part: Part, layer: int | None = None) -> bool:
    """Return True if the model has a part, or if one of its layers has it."""
    return part in self.parts

  def effective(self, key: str) -> Any:
    """Return the value of a key, with null replaced by what it means; None if the other values leave the key without effect.

    Two models compute the same if the effective values of all keys are equal.
    """
    return getattr(self, key) if does_something(self, key) else None

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values, with the keys involved."""
    sizes = ("vocab_size", "emb_dim", "mlp_dim", "num_decoder_layers", "num_query_heads", "num_kv_heads")
    yield from at_least(self, 1, *sizes, "max_position_embeddings")
    yield from at_least(self, 0, "bos_token_id", "pad_token_id")
    for token in self.eos_token_ids:
      if token < 0:
        yield Problem(f"eos_token_id = {token} is below 0", ("eos_token_id",), "token ids start at 0")
    yield from above_zero(self, "normalization_layer_epsilon", "rope_max_timescale", "final_logits_soft_cap")
    yield from self._soft_cap_problems()
    yield from divides_heads(self, "num_kv_heads")

  def _soft_cap_problems(self) -> Iterator[Problem]:
    """Yield problems of ``attn_logits_soft_cap``, which must be valid in float16 too, since scores may have that dtype."""
    yield from above_zero(self, "attn_logits_soft_cap")
    cap, (low, high) = self.attn_logits_soft_cap, SCORE_CAPS
    if cap is not None and cap > 0 and not low <= cap <= high:
      yield Problem(
        f"attn_logits_soft_cap = {cap:g} is outside the range of float16, {low:g} to {high:g}", ("attn_logits_soft_cap",),
        "set a number within this range, or null for no soft cap",
      )  # fmt: skip

  def ignored_values(self) -> Iterator[Problem]:
    """Yield problems of values that could be built, but that the family ignores."""
    if self.rope_type not in self.rope_types:
      yield Problem(
        f"rope_type: {self.rope_type} is not supported by decoder_block {self.decoder_block}", ("rope_type", "decoder_block"),
        f"set rope_type to {' or '.join(self.rope_types)}",
      )  # fmt: skip


def divides_heads(model: ModelConfig, key: str) -> Iterator[Problem]:
  """Yield a problem if the number of query heads is not a multiple of the number of kv heads."""
  n = getattr(model, key)
  if n and model.num_query_heads % n:
    yield Problem(
      f"num_query_heads = {model.num_query_heads} is not divisible by {key} = {n}",
      ("num_query_heads", key),
      "each kv head serves an equal number of query heads",
    )


def even(model: ModelConfig, *keys: str) -> Iterator[Problem]:
  """Yield a problem for each odd size, which rotary embedding cannot divide into pairs."""
  for key in keys:
    if (getattr(model, key) or 0) % 2:
      yield Problem(
        f"{key} = {getattr(model, key)} is odd", (key,), "set an even number: rotary embedding rotates pairs of dimensions"
      )


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig(ModelConfig):
  """A model with grouped-query attention: heads of size ``head_dim``, and groups of query heads that share a kv head."""

  head_dim: Shape[int]

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values, with the keys involved."""
    yield from super().problems()
    yield from at_least(self, 0, "head_dim")
    yield from even(self, "head_dim")
    if self.head_dim == 0:
      yield Problem("head_dim is not set", ("head_dim",), "set the size of a head")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ModelConfig):
  """A model that may have a mixture of experts (``num_experts`` above 0)."""

  num_experts: Shape[int]  # 0: none
  num_experts_per_tok: Mathematics[Annotated[int, WITH_EXPERTS]]
  moe_mlp_dim: Shape[Annotated[int, WITH_EXPERTS]]
  norm_topk_prob: Mathematics[Annotated[bool, WITH_EXPERTS]]
  load_balance_loss: TrainingOnly[Definition]
  load_balance_loss_weight: TrainingOnly[float]
  router_z_loss_weight: TrainingOnly[float]

  @property
  def router_losses(self) -> RouterLosses:
    """The auxiliary losses of the routers."""
    return RouterLosses(self.load_balance_loss, self.load_balance_loss_weight, self.router_z_loss_weight)

  def has(self, part: Part, layer: int | None = None) -> bool:
    """Return True if the model has a part, or if one of its layers has it."""
    return self.num_experts > 0 if part == "experts" else super().has(part, layer)

  def problems(self) -> Iterator[Problem]:
    """Yield a problem for every invalid value or combination of values, with the keys involved."""
    yield from super().problems()
    yield from at_least(self, 0, "num_experts", "num_experts_per_tok", "moe_mlp_dim")
    yield from at_least(self, 0, "load_balance_loss_weight", "router_z_loss_weight")
    E, k = self.num_experts, self.num_experts_per_tok
    if E == 0:
      return
    if k > E:
      yield Problem(
        f"num_experts_per_tok = {k} is more than num_experts = {E}", ("num_experts_per_tok", "num_experts"),
        f"set num_experts_per_tok to a number from 1 to {E}",
      )  # fmt: skip
    for name in ("num_experts_per_tok", "moe_mlp_dim"):
      if getattr(self, name) == 0:
        yield Problem(f"{name} = 0 with num_experts = {E}", (name, "num_experts"), f"set {name}")
