"""Keys of other trainers that have the same meaning and the same unit under another name here.

A row belongs here only if every value of the other trainer's key means the same for ours. Rows of transformers 5.24, TRL 1.16,
peft 0.21, torchtitan, Megatron-LM, LLaMA-Factory, Axolotl and MaxText were compared with their source, those of nanoGPT,
DeepSpeed, NeMo and torchtune with their documentation as known. Names that count something else, such as steps instead of a
share, are in ``foreign_similar.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

RENAMED: dict[str, str] = {
  # Steps, batches and lengths. A step is one update of the weights; a row is one sequence of a batch.
  "steps": "max_steps num_steps train_steps num_train_steps num_training_steps max_train_steps total_steps max_iters "
  "train_iters",
  "epochs": "num_epoch num_epochs n_epochs max_epochs num_train_epochs train_epochs",
  "gradient_accumulation_steps": "grad_accum grad_accum_steps grad_accumulation_steps accum_steps accumulate_grad_batches "
  "gradient_accumulation num_gradient_accumulation_steps",
  "per_device_batch_size": "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
  "device_batch_size",
  "max_target_length": "max_length max_seq_len max_seq_length max_sequence_length seq_len seq_length sequence_length "
  "sequence_len cutoff_len block_size encoder_seq_length",
  # Optimizer and schedule.
  "learning_rate": "lr max_lr peak_lr peak_learning_rate max_learning_rate",
  "warmup_steps_fraction": "warmup_ratio warmup_fraction warmup_proportion lr_warmup_fraction",
  "learning_rate_final_fraction": "min_lr_ratio min_lr_rate min_lr_factor cosine_min_lr_ratio lr_min_ratio",
  "lr_schedule_steps": "lr_decay_iters",
  "adam_weight_decay": "weight_decay wd",
  "adam_b1": "adam_beta1 beta1 b1",
  "adam_b2": "adam_beta2 beta2 b2",
  "adam_eps": "adam_epsilon optimizer.eps optim.eps",
  "sgd_momentum": "momentum",
  "gradient_clipping_threshold": "max_grad_norm grad_clip clip_grad clip_grad_norm grad_clip_norm max_gradient_norm clip_norm "
  "gradient_clip_val gradient_clip_norm gradient_clipping max_norm gradient_clip",
  "loss_scale_init": "initial_loss_scale native_amp_init_scale",
  "optimizer_in_backward": "optimizer_in_bwd early_step_in_backward",
  "dtype": "compute_dtype",
  # Data.
  "dataset_path": "train_file train_files data_files dataset_files",
  "eval_path": "validation_file val_file eval_file valid_file eval_files eval_data_files",
  "eval_fraction": "val_fraction eval_ratio validation_ratio",
  "text_field": "dataset_text_field text_column text_column_name text_key content_field",
  "images_field": "image_column image_column_name images_column image_field",
  "dataset_documents_max": "max_train_samples max_documents",
  "packing": "neat_packing sample_packing pack_sequences",
  "data_shuffle_seed": "data_seed shuffle_seed dataset_seed",
  "tokenizer": "tokenizer_file",
  # Evaluation, checkpoints and output. Intervals are in steps.
  "eval_interval": "eval_every eval_freq evaluation_steps eval_every_n_steps val_interval eval_interval_steps",
  "eval_steps": "eval_iters",
  "checkpoint_interval": "save_steps save_interval save_every save_freq checkpoint_every checkpoint_every_n_steps "
  "checkpoint_freq checkpoint_frequency checkpoint_steps ckpt_interval checkpoint.interval",
  "max_to_keep": "save_total_limit keep_last_n max_checkpoints keep_latest_k",
  "run_name": "exp_name experiment_name job_name",
  "log_interval": "logging_steps log_every log_every_n_steps log_freq print_every steps_per_print logging_interval",
  "enable_tensorboard": "use_tensorboard",
  "wandb_project": "wandb_project_name",
  # Sizes of a model: config.json, Megatron-LM, and the reference code of DeepSeek and Llama.
  "num_decoder_layers": "num_hidden_layers num_layers n_layer n_layers",
  "emb_dim": "hidden_size d_model n_embd embed_dim dim",
  "mlp_dim": "intermediate_size d_ff ffn_dim ffn_hidden_size inter_dim",
  "num_query_heads": "num_attention_heads n_head n_heads num_heads",
  "num_kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
  "head_dim": "kv_channels",
  "normalization_layer_epsilon": "rms_norm_eps norm_eps layernorm_epsilon norm_epsilon rms_norm_epsilon",
  "logits_via_embedding": "tie_word_embeddings tie_embeddings share_embeddings_and_output_weights",
  "sliding_window_size": "sliding_window",
  "attn_logits_soft_cap": "attn_logit_softcapping attn_logit_softcap attention_logits_soft_cap",
  "final_logits_soft_cap": "final_logit_softcapping final_logit_softcap",
  "share_kv_projections": "attention_k_eq_v",
  "global_num_kv_heads": "num_global_key_value_heads",
  "rope_max_timescale": "rope_theta rope_base rotary_base",
  "local_rope_max_timescale": "rope_local_base_freq",
  "rope_factor": "rotary_scaling_factor",
  "beta_fast": "yarn_beta_fast",
  "beta_slow": "yarn_beta_slow",
  "original_max_position_embeddings": "yarn_original_max_position_embeddings",
  "num_experts": "n_routed_experts num_local_experts num_moe_experts",
  "num_experts_per_tok": "moe_router_topk n_activated_experts top_k_experts moe_top_k moe_topk router_topk "
  "num_experts_per_token k_experts",
  "moe_mlp_dim": "moe_intermediate_size moe_ffn_hidden_size moe_inter_dim",
  "shared_experts": "n_shared_experts num_shared_experts",
  "first_num_dense_layers": "first_k_dense_replace n_dense_layers",
  "n_routing_groups": "n_group n_expert_groups moe_router_num_groups",
  "topk_routing_group": "topk_group n_limited_groups moe_router_group_topk",
  "routed_scaling_factor": "route_scale moe_router_topk_scaling_factor",
  "router_z_loss_weight": "moe_z_loss_coeff",
  "routed_bias": "moe_router_enable_expert_bias",
  "routed_bias_update_rate": "moe_router_bias_update_rate",
  "qk_rope_head_dim": "qk_pos_emb_head_dim",
  "indexer_topk": "index_topk dsa_indexer_topk",
  "indexer_head_dim": "index_head_dim dsa_indexer_head_dim",
  "indexer_n_heads": "index_n_heads dsa_indexer_n_heads",
  "hidden_size_for_vit": "vision_config.hidden_size",
  "intermediate_size_for_vit": "vision_config.intermediate_size",
  "num_hidden_layers_for_vit": "vision_config.num_hidden_layers",
  "num_attention_heads_for_vit": "vision_config.num_attention_heads",
  "head_dim_for_vit": "vision_config.head_dim",
  "patch_size_for_vit": "vision_config.patch_size",
  "image_size_for_vit": "vision_config.image_size",
  "normalization_layer_epsilon_for_vit": "vision_config.layer_norm_eps vision_config.rms_norm_eps",
  "standardize_for_vit": "standardize vision_config.standardize",
  "use_clipped_linears_for_vit": "use_clipped_linears vision_config.use_clipped_linears",
  "pooling_size_for_vit": "pooling_kernel_size vision_config.pooling_kernel_size",
  "num_position_embeddings_for_vit": "position_embedding_size vision_config.position_embedding_size",
  "vision_output_length": "mm_tokens_per_image",
  "image_token_id": "image_token_index",
  "boi_token_id": "boi_token_index",
  "eoi_token_id": "eoi_token_index",
  # Adapters.
  "lora_rank": "lora_r lora_dim r",
  "lora_rslora": "use_rslora peft_use_rslora rslora",
  "lora_dora": "use_dora peft_use_dora dora",
  "lora_modules": "lora_target lora_target_modules target_modules",
  "modules_to_save": "lora_modules_to_save additional_target",
  "lora_from": "adapter_name_or_path lora_model_dir",
  # Parallelism: in how many parts one slice (the devices joined by the fast network) is divided along an axis.
  "ici_tensor_parallelism": "tp tp_size tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree",
  "ici_context_parallelism": "cp cp_size context_parallel_size context_parallel_degree",
  "ici_expert_parallelism": "ep ep_size expert_parallel_size expert_model_parallel_size expert_parallel_degree",
  "ici_data_parallelism": "data_parallel_replicate_degree dp_replicate_size",
  "ici_fsdp_parallelism": "data_parallel_shard_degree dp_shard_size",
}
"""Our key to other names of it."""

DEFINED: dict[str, tuple[str, str, str]] = {
  "router_aux_loss_coef": ("load_balance_loss=huggingface", "load_balance_loss_weight", ""),
  "aux_loss_alpha": (
    "load_balance_loss=deepseek_sequence", "load_balance_loss_weight", " (with seq_aux=false, load_balance_loss=switch)",
  ),
  "moe_aux_loss_coeff": (
    "load_balance_loss=switch", "load_balance_loss_weight",
    " (with moe_router_load_balancing_type=seq_aux_loss, load_balance_loss=deepseek_sequence)",
  ),
}  # fmt: skip
"""Names that are our key under one value of another key: that value, the key, and a remark on other values in parentheses."""

LISTS = frozenset(("lora_modules", "modules_to_save"))
"""Keys that take a list where other trainers take words between commas."""

LIST_WORDS = {"all": "all-linear"}
"""LLaMA-Factory's word for all linear modules, and ours."""

_NO_CLIPPING = {"null": "gradient_clipping_threshold=0", "none": "gradient_clipping_threshold=0"}
UNSET: dict[str, Mapping[str, str]] = {
  "max_steps": {"-1": "", "0": ""},
  "save_total_limit": dict.fromkeys(("null", "none"), "max_to_keep=1000000"),
  "keep_latest_k": {"0": "max_to_keep=1000000"},
  "max_grad_norm": _NO_CLIPPING,
  "gradient_clip_val": _NO_CLIPPING,
  "clip_grad_norm": _NO_CLIPPING,
}
"""Values that switch a setting off there, and what to write here. An empty text means that the key is to be left out."""


@dataclass(frozen=True)
class ByValue:
  """Names whose values have other spellings here.

  Attributes:
    names: other trainers' names.
    says: description of the setting that the key controls.
    values: their value, in lower case, to the words to write; empty: leave the key out.
    otherwise: the advice for any other value.
  """

  names: str
  says: str
  values: Mapping[str, str]
  otherwise: str


def _flag(on: str, off: str) -> dict[str, str]:
  return {"true": on, "1": on, "yes": on, "false": off, "0": off, "no": off}


_COSINE = "lr_schedule_type=cosine learning_rate_final_fraction=0"
_LINEAR = "lr_schedule_type=linear learning_rate_final_fraction=0"
_CONSTANT = "lr_schedule_type=constant warmup_steps_fraction=0"
_SCHEDULES = "lr_schedule_type is cosine, linear, constant or wsd, and learning_rate_final_fraction is the last rate"
_ADAMW_NAMES = "adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla adamw_torch_npu_fused"
_ADAMW = dict.fromkeys(_ADAMW_NAMES.split(), "opt_type=adamw")
_GELU = {"gelu_pytorch_tanh": "mlp_activation=gelu", "gelu_new": "mlp_activation=gelu", "gelu_tanh": "mlp_activation=gelu"}
_BFLOAT16 = "dtype=bfloat16 weight_dtype=float32"
_FLOAT16 = "dtype=float16 weight_dtype=float32"
_FLOAT32 = "dtype=float32 weight_dtype=float32"

_SEQUENCE, _SWITCH = "load_balance_loss=deepseek_sequence", "load_balance_loss=switch"
_BALANCE = "load_balance_loss is the definition of the routers' loss, and load_balance_loss_weight its weight"
_TRAIN_ON = "train_on says which part of a conversation is learned: assistant, last or all"
_ANSWERS, _ALL = "data_format=chat train_on=assistant", "data_format=chat train_on=all"

BY_VALUE: tuple[ByValue, ...] = (
  ByValue("seq_aux", _BALANCE, _flag(_SEQUENCE, _SWITCH), "choose load_balance_loss=deepseek_sequence or switch"),
  # Megatron's aux_loss takes its means over a microbatch, global_aux_loss over the complete batch, as switch does.
  ByValue(
    "moe_router_load_balancing_type", _BALANCE,
    {
      "aux_loss": _SWITCH, "global_aux_loss": _SWITCH, "seq_aux_loss": _SEQUENCE,
      "none": "load_balance_loss_weight=0", "null": "load_balance_loss_weight=0",
    },
    "choose load_balance_loss=switch or deepseek_sequence, one of them; there is no other balancing (no Sinkhorn)",
  ),
  ByValue(
    "output_router_logits", "transformers adds router_aux_loss_coef to the loss only with it; here the weight decides",
    _flag("load_balance_loss=huggingface load_balance_loss_weight=WEIGHT", "load_balance_loss_weight=0"),
    "write load_balance_loss=huggingface load_balance_loss_weight=WEIGHT",
  ),
  ByValue(
    "moe_router_pre_softmax",
    "norm_topk_prob divides the weights of the chosen experts by their sum, as a softmax after the choice does",
    _flag("norm_topk_prob=false", "norm_topk_prob=true"), "write norm_topk_prob=true or false",
  ),
  ByValue(
    "moe_router_dtype", "float32_gate_logits and float32_weight_sum are the dtypes of the router and of the weighted sum",
    {
      "fp32": "float32_gate_logits=true float32_weight_sum=true",
      **dict.fromkeys(("none", "null"), "float32_gate_logits=false float32_weight_sum=false"),
    },
    "choose float32_gate_logits and float32_weight_sum: true or false; there is no float64",
  ),
  ByValue(
    "finetuning_type",
    "lora_rank trains an adapter, trainable_parameters_mask a part of the parameters, and neither of them all",
    {"lora": "lora_rank=RANK", "full": "", "freeze": "trainable_parameters_mask=[PATTERN, ...]"},
    "choose lora_rank=RANK or trainable_parameters_mask=[PATTERN, ...], or leave it out to train all; there is no other method",
  ),
  ByValue(
    "stage", "the verb of the command chooses it: maxtext-like train for pt, maxtext-like sft for sft", {"pt": "", "sft": ""},
    "choose one of these verbs; this project has no preference or reinforcement learning (DPO, KTO, PPO, reward models)",
  ),
  ByValue(
    "stochastic_round sr use_stochastic_rounding", "stochastic_rounding rounds updates of 16-bit weights up or down at random",
    _flag("stochastic_rounding=true", "stochastic_rounding=false"), "write stochastic_rounding=true or false",
  ),
  ByValue(
    "grad_reduce_in_bf16", "reduction_dtype is the dtype of sums that devices share: float32, or that of the activations",
    _flag("reduction_dtype=dtype", "reduction_dtype=float32"), "choose reduction_dtype=float32 or dtype",
  ),
  ByValue(
    "lr_scheduler_type lr_scheduler lr_decay_style",
    _SCHEDULES,
    {"cosine": _COSINE, "linear": _LINEAR, "constant": _CONSTANT, "constant_with_warmup": "lr_schedule_type=constant"},
    "choose lr_schedule_type=cosine, linear, constant or wsd; there is no other schedule, and no restarts",
  ),
  ByValue(
    "optim optimizer optimizer_type optimizer_name optimizer.name optim.name",
    "opt_type is the optimizer: adamw, adafactor, lion or sgd",
    {**_ADAMW, "lion": "opt_type=lion", "lion_32bit": "opt_type=lion"},
    "choose opt_type=adamw, adafactor, lion or sgd; AdamW with moments of 8 bits is mu_dtype=dynamic8 nu_dtype=dynamic8; "
    "there is no other optimizer (no Muon)",
  ),
  ByValue(
    "hidden_act hidden_activation activation_function",
    "mlp_activation is silu or gelu, and gelu is the tanh approximation",
    {**_GELU, "silu": "mlp_activation=silu", "swish": "mlp_activation=silu"},
    "choose mlp_activation=silu or gelu; there is no other activation (nor the exact gelu)",
  ),
  ByValue(
    "untie_embeddings_and_output_weights",
    "logits_via_embedding has the opposite meaning",
    _flag("logits_via_embedding=false", "logits_via_embedding=true"),
    "write logits_via_embedding=true or false",
  ),
  ByValue(
    "bf16 use_bf16 bfloat16", "dtype is the dtype of the activations", _flag(_BFLOAT16, _FLOAT32), "write dtype=bfloat16"
  ),
  ByValue("fp16 use_fp16 half float16", "dtype is the dtype of the activations", _flag(_FLOAT16, ""), "write dtype=float16"),
  ByValue("fp32 float32", "dtype is the dtype of the activations", _flag(_FLOAT32, ""), "write dtype=float32"),
  ByValue(
    "pure_bf16", "dtype is the dtype of the activations, weight_dtype the dtype of the parameters",
    _flag("dtype=bfloat16 weight_dtype=bfloat16", ""), "write dtype=bfloat16 weight_dtype=bfloat16",
  ),
  ByValue(
    "mixed_precision", "dtype is the dtype of the activations, weight_dtype the dtype of the parameters",
    {"bf16": _BFLOAT16, "fp16": _FLOAT16, "no": _FLOAT32}, "choose dtype and weight_dtype: float32, bfloat16 or float16",
  ),
  ByValue(
    "precision", "dtype is the dtype of the activations, weight_dtype the dtype of the parameters",
    {
      "bf16-mixed": _BFLOAT16, "16-mixed": _FLOAT16, "32": _FLOAT32, "32-true": _FLOAT32,
      "bf16-true": "dtype=bfloat16 weight_dtype=bfloat16",
    },
    "choose dtype and weight_dtype: float32, bfloat16 or float16",
  ),
  ByValue(
    "tf32 allow_tf32 use_tf32", "matmul_precision is the precision of float32 products on GPU and TPU",
    _flag("matmul_precision=default", "matmul_precision=highest"), "choose matmul_precision=default or highest",
  ),
  ByValue(
    "gradient_checkpointing activation_checkpointing enable_activation_checkpointing activation_checkpoint remat recompute",
    "remat_policy says what the backward pass computes again: none, minimal, save_mlp, save_outputs, save_attention or full",
    _flag("remat_policy=full", "remat_policy=none"), "choose remat_policy=none, minimal, save_outputs or full",
  ),
  ByValue(
    "disable_gradient_checkpointing",
    "remat_policy says what the backward pass computes again: none, minimal, save_mlp, save_outputs, save_attention or full",
    _flag("remat_policy=none", ""), "choose remat_policy=none, minimal, save_outputs or full",
  ),
  ByValue(
    "assistant_only_loss completion_only_loss completion_only train_on_responses_only train_on_completions_only "
    "answer_only_loss mask_prompt", _TRAIN_ON, _flag(_ANSWERS, _ALL), "choose train_on=assistant, last or all",
  ),
  ByValue(
    "train_on_inputs train_on_prompt train_on_input", _TRAIN_ON, _flag(_ALL, _ANSWERS),
    "choose train_on=assistant, last or all",
  ),
  ByValue(
    "mask_history", _TRAIN_ON,
    _flag("data_format=chat train_on=last", ""), "choose train_on=assistant, last or all",
  ),
)  # fmt: skip
"""Keys whose values have other names here."""
