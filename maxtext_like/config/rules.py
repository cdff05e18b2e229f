"""Rules among the sections of a configuration, and keys that would do nothing in the family they are given to.

``model.py`` and ``schema.py`` refuse what cannot be built. This module judges what a person wrote: a key that is
accepted and then ignored is worse than an error.
"""

import math
from collections.abc import Iterator, Mapping

from maxtext_like.config.layer_precision import layer_problems
from maxtext_like.config.model import ModelConfig
from maxtext_like.config.paths import url_problems
from maxtext_like.config.problems import Problem
from maxtext_like.config.schema import Config, profiled

GEMMA, DEEPSEEK = ("gemma3", "gemma4"), ("deepseek",)

FAMILIES_OF_KEY: dict[str, tuple[str, ...]] = {
  "head_dim": GEMMA,
  "attention_bias": DEEPSEEK,
  "query_pre_attn_scalar": ("gemma3",),
  "layer_types": GEMMA,
  "inhomogeneous_layer_cycle_interval": GEMMA,
  "sliding_window_size": GEMMA,
  "global_head_dim": ("gemma4",),
  "global_num_kv_heads": ("gemma4",),
  "share_kv_projections": ("gemma4",),
  "num_kv_shared_layers": ("gemma4",),
  "use_double_wide_mlp": ("gemma4",),
  "hidden_size_per_layer_input": ("gemma4",),
  "vocab_size_per_layer_input": ("gemma4",),
  "use_bidirectional_image_attn": GEMMA,
  "local_rope_max_timescale": GEMMA,
  "rope_linear_scaling_factor": ("gemma3",),
  "global_rope_proportion": ("gemma4",),
  "rope_factor": DEEPSEEK,
  "beta_fast": DEEPSEEK,
  "beta_slow": DEEPSEEK,
  "mscale": DEEPSEEK,
  "mscale_all_dim": DEEPSEEK,
  "original_max_position_embeddings": DEEPSEEK,
  "rope_interleave": DEEPSEEK,
  "num_experts": ("gemma4", "deepseek"),
  "num_experts_per_tok": ("gemma4", "deepseek"),
  "moe_mlp_dim": ("gemma4", "deepseek"),
  "shared_experts": DEEPSEEK,
  "first_num_dense_layers": DEEPSEEK,
  "norm_topk_prob": ("gemma4", "deepseek"),
  "routed_scaling_factor": DEEPSEEK,
  "routed_bias": DEEPSEEK,
  "routed_bias_update_rate": DEEPSEEK,
  "n_routing_groups": DEEPSEEK,
  "topk_routing_group": DEEPSEEK,
  "load_balance_loss_weight": ("gemma4", "deepseek"),
  "q_lora_rank": DEEPSEEK,
  "kv_lora_rank": DEEPSEEK,
  "qk_nope_head_dim": DEEPSEEK,
  "qk_rope_head_dim": DEEPSEEK,
  "v_head_dim": DEEPSEEK,
  "use_indexer": DEEPSEEK,
  "indexer_n_heads": DEEPSEEK,
  "indexer_head_dim": DEEPSEEK,
  "indexer_topk": DEEPSEEK,
  "indexer_sparse_training": DEEPSEEK,
  "indexer_loss_scaling_factor": DEEPSEEK,
}
"""Model keys that some families do not have; a key that is not here belongs to all."""

VISION_FAMILIES_OF_KEY: dict[str, tuple[str, ...]] = {
  "use_multimodal": GEMMA,
  "image_size_for_vit": ("gemma3",),
  "patch_size_for_vit": GEMMA,
  "hidden_size_for_vit": GEMMA,
  "intermediate_size_for_vit": GEMMA,
  "num_hidden_layers_for_vit": GEMMA,
  "num_attention_heads_for_vit": GEMMA,
  "head_dim_for_vit": ("gemma4",),
  "normalization_layer_epsilon_for_vit": GEMMA,
  "rope_theta_for_vit": ("gemma4",),
  "num_position_embeddings_for_vit": ("gemma4",),
  "pooling_size_for_vit": ("gemma4",),
  "standardize_for_vit": ("gemma4",),
  "use_clipped_linears_for_vit": ("gemma4",),
  "vision_output_length": GEMMA,
  "image_token_id": GEMMA,
  "boi_token_id": GEMMA,
  "eoi_token_id": GEMMA,
  "video_token_id": ("gemma4",),
  "audio_token_id": ("gemma4",),
  "image_placeholder": GEMMA,
  "images_field": GEMMA,
  "max_images_per_row": GEMMA,
}
"""Keys of ``vision:`` and the families that have them."""

ROPE_FAMILIES = {"default": (*GEMMA, *DEEPSEEK), "linear": ("gemma3",), "yarn": DEEPSEEK}


_ROUTER, _EXPERTS = "a router", "experts"


def inactive_precision_keys(model: ModelConfig) -> dict[str, str]:
  """Precision keys that act nowhere in a model, each with what the model lacks.

  ``indexer_float32_logits`` is part of every DeepSeek configuration, where it acts once ``use_indexer`` is on.
  """
  lacking = {}
  if model.decoder_block not in DEEPSEEK:
    lacking["indexer_float32_logits"] = "a sparse indexer"
  if model.decoder_block != "gemma4":
    lacking["float32_vision_pool"] = "the vision pooler of Gemma 4"
  if model.num_experts == 0:
    lacking["float32_gate_logits"] = _ROUTER
    lacking["float32_weight_sum"] = _EXPERTS
  return lacking


def cross_problems(config: Config, defaults: Mapping[str, object], explicit: frozenset[str]) -> Iterator[Problem]:
  """Every conflict that no section can see alone.

  Args:
    config: the sections; they may hold problems of their own.
    defaults: the values of ``configs/base.yml`` by leaf name.
    explicit: leaf names that a file or the command line sets.
  """
  model = config.model
  yield from _foreign_keys(config, defaults, explicit)
  yield from _vision_problems(config)
  yield from _pointless_model_values(model)
  # Only padding is looked up by the model's own number: bos and eos of the data are the tokenizer's, which has to fit.
  if model.pad_token_id is not None and model.pad_token_id >= model.vocab_size >= 1:
    yield Problem(
      f"pad_token_id = {model.pad_token_id} is outside the vocabulary of {model.vocab_size}", ("pad_token_id", "vocab_size")
    )
  length, longest = config.training.max_target_length, model.max_position_embeddings
  if length > longest >= 1:
    yield Problem(
      f"max_target_length = {length} is more than max_position_embeddings = {longest}",
      ("max_target_length", "max_position_embeddings"),
      f"the model knows {longest} positions: shorten the rows",
    )
  if config.training.stochastic_rounding and config.precision.weight_dtype == "float32":
    yield Problem(
      "stochastic_rounding = true does nothing with weight_dtype: float32", ("stochastic_rounding", "weight_dtype"),
      "leave it out: nothing is rounded where weights are stored in float32",
    )  # fmt: skip
  if config.training.spike_factor and not config.checkpoint.enable_checkpointing:
    yield Problem(
      f"spike_factor = {config.training.spike_factor} with enable_checkpointing: false",
      ("spike_factor", "enable_checkpointing"),
      "there is no checkpoint to go back to: set spike_factor to 0, or enable_checkpointing to true",
    )  # fmt: skip
  profile, steps = config.logging.profile_steps, config.training.steps
  if profile is not None and not list(config.logging.problems()) and profiled(profile)[1] > steps >= 1:
    yield Problem(f"profile_steps = {profile} is beyond steps = {steps}", ("profile_steps", "steps"), "name steps of the run")
  if config.logging.sample_every > 0 and config.data.dataset == "synthetic":
    yield Problem(
      f"sample_every = {config.logging.sample_every} with dataset: synthetic", ("sample_every", "dataset"),
      "its tokens are no text: set sample_every to 0, or another dataset",
    )  # fmt: skip
  yield from url_problems(config)
  yield from layer_problems(config)


def _foreign_keys(config: Config, defaults: Mapping[str, object], explicit: frozenset[str]) -> Iterator[Problem]:
  model, precision = config.model, config.precision
  owned = [(model, FAMILIES_OF_KEY), (config.vision, VISION_FAMILIES_OF_KEY)]
  for section, key, families in ((section, *item) for section, table in owned for item in table.items()):
    if model.decoder_block not in families and getattr(section, key) != defaults[key]:
      yield Problem(
        f"{key} = {_shown(getattr(section, key))} does nothing in decoder_block {model.decoder_block}",
        (key, "decoder_block"),
        f"leave it out; it is a key of {' and '.join(families)}",
      )
  for key, lacks in inactive_precision_keys(model).items():
    if key in explicit:
      yield Problem(
        f"{key} = {_shown(getattr(precision, key))} does nothing: the model has not got {lacks}",
        (key, "num_experts" if lacks in (_ROUTER, _EXPERTS) and model.decoder_block != "gemma3" else "decoder_block"),
        "leave it out",
      )


def _pointless_model_values(model: ModelConfig) -> Iterator[Problem]:
  family = model.decoder_block
  if family not in ROPE_FAMILIES[model.rope_type]:
    yield Problem(
      f"rope_type: {model.rope_type} in decoder_block {family}", ("rope_type", "decoder_block"),
      f"{family} has rope_type {' or '.join(t for t, known in ROPE_FAMILIES.items() if family in known)}",
    )  # fmt: skip
  if family == "gemma3" and (model.rope_linear_scaling_factor != 1) != (model.rope_type == "linear"):
    yield Problem(
      f"rope_type: {model.rope_type} with rope_linear_scaling_factor = {model.rope_linear_scaling_factor:g}",
      ("rope_type", "rope_linear_scaling_factor"),
      "rope_type: linear goes with a factor other than 1, rope_type: default with 1",
    )
  if model.rope_type == "yarn" and model.beta_fast <= model.beta_slow:
    yield Problem(f"beta_fast = {model.beta_fast:g} is not above beta_slow = {model.beta_slow:g}", ("beta_fast", "beta_slow"))
  if family == "deepseek" and model.num_kv_heads != model.num_query_heads:
    yield Problem(
      f"num_kv_heads = {model.num_kv_heads} differs from num_query_heads = {model.num_query_heads}",
      ("num_kv_heads", "num_query_heads"),
      "latent attention expands keys and values to every head: make them equal",
    )
  if family == "gemma4":
    yield from _pointless_gemma4_values(model)


def _pointless_gemma4_values(model: ModelConfig) -> Iterator[Problem]:
  cycle, L = model.inhomogeneous_layer_cycle_interval, model.num_decoder_layers
  last_is_sliding = model.layer_types[-1] == "sliding" if model.layer_types else cycle >= 1 and L % cycle != 0
  if last_is_sliding:
    keys = ("layer_types",) if model.layer_types else ("num_decoder_layers", "inhomogeneous_layer_cycle_interval")
    yield Problem(
      f"the last of {L} layers would be sliding; the last layer of Gemma 4 is global", keys,
      "make num_decoder_layers a multiple of inhomogeneous_layer_cycle_interval, or end layer_types with global",
    )  # fmt: skip
  if model.use_double_wide_mlp and model.num_kv_shared_layers == 0:
    yield Problem(
      "use_double_wide_mlp widens the layers that reuse keys and values, and there are none",
      ("use_double_wide_mlp", "num_kv_shared_layers"),
      "set num_kv_shared_layers, or a larger mlp_dim",
    )
  if model.global_num_kv_heads is not None and not model.share_kv_projections:
    yield Problem(
      f"global_num_kv_heads = {model.global_num_kv_heads} without share_kv_projections",
      ("global_num_kv_heads", "share_kv_projections"),
      "global layers have their own kv heads only together with share_kv_projections: true",
    )
  if model.vocab_size_per_layer_input is not None and model.hidden_size_per_layer_input == 0:
    yield Problem(
      f"vocab_size_per_layer_input = {model.vocab_size_per_layer_input} without a per-layer embedding",
      ("vocab_size_per_layer_input", "hidden_size_per_layer_input"),
      "set hidden_size_per_layer_input",
    )


def _vision_problems(config: Config) -> Iterator[Problem]:
  v, model = config.vision, config.model
  if not v.use_multimodal or model.decoder_block not in GEMMA:
    return
  # The image token is never looked up: Gemma 3's lies beyond the 262144 rows that MaxText gives its table.
  for name in ("boi_token_id", "eoi_token_id"):
    value = getattr(v, name)
    if value is not None and value >= model.vocab_size >= 1:
      yield Problem(f"{name} = {value} is outside the vocabulary of {model.vocab_size}", (name, "vocab_size"))
  if v.patch_size_for_vit < 1 or v.vision_output_length < 1:
    return
  if model.decoder_block == "gemma3":
    side, rest = divmod(v.image_size_for_vit, v.patch_size_for_vit)
    if side == 0 or rest:
      yield Problem(
        f"image_size_for_vit = {v.image_size_for_vit} is not a multiple of patch_size_for_vit = {v.patch_size_for_vit}",
        ("image_size_for_vit", "patch_size_for_vit"),
      )
    elif (out := math.isqrt(v.vision_output_length)) ** 2 != v.vision_output_length or side % out:
      yield Problem(
        f"a grid of {side} x {side} patches cannot be pooled to vision_output_length = {v.vision_output_length} tokens",
        ("vision_output_length", "image_size_for_vit", "patch_size_for_vit"),
        "it is a square number whose root divides image_size_for_vit / patch_size_for_vit",
      )
    return
  if v.num_attention_heads_for_vit > 0 and v.head_dim % 4:
    yield Problem(
      f"heads of the vision tower have {v.head_dim} elements, which 4 does not divide",
      ("head_dim_for_vit", "hidden_size_for_vit", "num_attention_heads_for_vit"),
      "one half turns with the column, the other with the row, both in pairs",
    )
  if (longest := v.vision_output_length * v.pooling_size_for_vit) > v.num_position_embeddings_for_vit:
    yield Problem(
      f"num_position_embeddings_for_vit = {v.num_position_embeddings_for_vit}, but a long narrow image of "
      f"vision_output_length = {v.vision_output_length} tokens has {longest} patches in a line",
      ("num_position_embeddings_for_vit", "vision_output_length", "pooling_size_for_vit"),
      f"set num_position_embeddings_for_vit to {longest} or more",
    )


def _shown(value: object) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)
