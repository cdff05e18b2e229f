"""Names that other trainers have and this one has not: what to write instead, or what is lacking here. One table.

A key that is misspelt is best answered with the nearest name. A key of MaxText, transformers, TRL, LLaMA-Factory or
nanoGPT is not misspelt, and its nearest name here is often something else (``lora_rank`` is not ``q_lora_rank``), so it
is looked up first. MaxText's names with a meaning here are in ``maxtext.py``, which translates them.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from maxtext_like.data.registry import DATASETS
from maxtext_like.training.objectives.registry import NAMES as OBJECTIVES
from maxtext_like.training.optimizers.registry import NAMES as OPTIMIZERS


@dataclass(frozen=True)
class Foreign:
  """What is to be said about a name.

  Attributes:
    says: the end of the sentence ``unknown key 'lr': ...``.
    write: what to write; ``{value}`` is what was written. Empty: leave the key out.
    listed: the key takes a list, where other trainers take words between commas.
  """

  says: str
  write: str = ""
  listed: bool = False

  def fix(self, value: str) -> str:
    """What to do, for the value that was given."""
    if "{value}" not in self.write and value.lower() in ("false", "none", "null"):
      return "leave it out"
    if self.listed and not value.startswith("["):
      value = f"[{LIST_WORDS.get(value, value)}]"
    return f"write {self.write.replace('{value}', value)}" if self.write else "leave it out"


def _renamed(ours: str, *names: str) -> dict[str, Foreign]:
  return {name: Foreign(f"here it is {ours}", f"{ours}={{value}}") for name in names}


def _told(says: str, write: str, *names: str) -> dict[str, Foreign]:
  return {name: Foreign(says, write) for name in names}


LIST_WORDS = {"all": "all-linear"}
"""What a word in the place of a list of weights is here: LLaMA-Factory's."""
_AXES = "the mesh has five axes, data, fsdp, expert, context and tensor, with a size each (docs/parallelism.md)"
_HUB = "nothing is downloaded or uploaded by this program"
_ADAPTERS = "of adapters this version has LoRA, rsLoRA and DoRA, on quantised weights too"
_LORA = "lora_rank=16 lora_modules=[all-linear]"
_PART = "trainable_parameters_mask=[PATTERN, ...] to train a part"
_CALL = "or in Python maxtext_like."
_METRICS = "metrics go to metrics.jsonl, TensorBoard and report.html, and where a key asks for it to W&B or MLflow"
_TOWER = "what is trained of the vision tower is one key: frozen, projector, trained or adapted"
_REMAT = "what the backward pass computes again is remat_policy: none, minimal, save_mlp, save_outputs, save_attention, full"

NAMES: dict[str, Foreign] = {
  **_renamed("objective", "training_objective", "loss_type", "loss_fn"),
  # Steps, batches, lengths.
  **_renamed("steps", "max_steps", "num_steps", "train_steps", "num_train_steps", "max_train_steps", "total_steps"),
  **_renamed("steps", "max_iters", "iterations", "num_iterations"),
  **_renamed("epochs", "num_epoch", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"),
  **_renamed("per_device_batch_size", "batch_size", "bs", "micro_batch_size", "train_batch_size", "train_micro_batch_size"),
  **_renamed("per_device_batch_size", "per_device_train_batch_size", "per_gpu_train_batch_size", "device_batch_size"),
  **_told(
    "the batch of all devices is per_device_batch_size x devices x gradient_accumulation_steps",
    "per_device_batch_size=ROWS",
    "global_batch_size", "total_batch_size", "global_train_batch_size",
  ),
  **_told(
    "an evaluation has the batches of training, eval_steps of them", "eval_steps=N",
    "eval_batch_size", "per_device_eval_batch_size", "eval_per_device_batch_size", "eval_iters", "max_eval_steps",
  ),
  **_renamed("gradient_accumulation_steps", "grad_accum", "gradient_accumulation", "grad_accum_steps", "accum_steps"),
  **_renamed("gradient_accumulation_steps", "grad_accumulation_steps", "accumulate_grad_batches"),
  **_renamed("max_target_length", "max_seq_len", "max_seq_length", "seq_len", "seq_length", "sequence_length", "max_length"),
  **_renamed("max_target_length", "context_length", "max_context_length", "cutoff_len", "block_size", "model_max_length"),
  # The optimizer and its schedule.
  **_renamed("learning_rate", "lr", "max_lr", "peak_lr", "base_lr", "peak_learning_rate", "max_learning_rate"),
  **_told(
    "the last learning rate is a share of the peak, learning_rate_final_fraction", "learning_rate_final_fraction=SHARE",
    "min_lr", "min_learning_rate", "final_lr", "end_lr", "min_lr_ratio", "min_lr_rate",
  ),
  **_renamed("warmup_steps_fraction", "warmup_ratio", "warmup_fraction", "warmup_proportion"),
  **_told(
    "the warm-up is a share of the steps, warmup_steps_fraction", "warmup_steps_fraction=SHARE",
    "warmup", "warmup_steps", "num_warmup_steps", "warmup_iters",
  ),
  **_renamed("lr_schedule_type", "lr_scheduler", "lr_scheduler_type", "scheduler", "lr_schedule", "lr_decay_style"),
  **_renamed("opt_type", "optim", "optimizer", "optimizer_type", "optimizer_name"),
  **_renamed("adam_weight_decay", "weight_decay", "wd", "decoupled_weight_decay"),
  **_renamed("adam_b1", "adam_beta1", "beta1", "b1"),
  **_renamed("adam_b2", "adam_beta2", "beta2", "b2"),
  **_renamed("adam_eps", "adam_epsilon", "epsilon", "eps"),
  **_renamed("sgd_momentum", "momentum"),
  **_renamed("gradient_clipping_threshold", "max_grad_norm", "grad_clip", "clip_grad_norm", "gradient_clipping", "clip_norm"),
  **_renamed("gradient_clipping_threshold", "gradient_clip_val", "grad_clip_norm", "max_gradient_norm"),
  **_renamed("z_loss_multiplier", "z_loss", "z_loss_weight", "z_loss_coef"),
  **_told(
    "weight decay is never on norms, scalars and biases, and on everything else", "",
    "adamw_mask", "weight_decay_mask", "no_decay_params",
  ),
  # Numbers.
  **_told("the dtype of the activations is a key", "dtype=bfloat16", "bf16", "use_bf16", "bfloat16"),
  **_told("the dtype of the activations is a key", "dtype=float16", "fp16", "use_fp16", "half", "float16"),
  **_told("the dtype of the activations is a key", "dtype=float32", "fp32", "float32", "no_cuda_amp"),
  **_told("both dtypes are keys", "dtype=bfloat16 weight_dtype=bfloat16", "pure_bf16", "bf16_full_eval"),
  **_told("the precision of float32 matrix products is a key", "matmul_precision=default", "tf32", "allow_tf32", "use_tf32"),
  **_told(
    "activations and parameters have a dtype each", "dtype=bfloat16 weight_dtype=float32",
    "mixed_precision", "precision", "torch_dtype", "compute_type", "compute_dtype", "param_dtype", "amp",
  ),
  **_told(
    _REMAT, "remat_policy=full",
    "gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing", "remat", "recompute",
    "enable_activation_checkpointing", "activation_checkpoint",
  ),
  **_told(_REMAT, "remat_policy=none", "disable_gradient_checkpointing"),
  **_told(
    "what waits in the host's memory for the backward pass is remat_offload: none, layer_inputs, kept, all",
    "remat_policy=full remat_offload=layer_inputs",
    "offload_activations", "activation_offloading", "activation_offload", "enable_activation_offloading",
  ),
  **_told(
    "auto takes the fastest attention kernel that is possible", "attention=auto",
    "flash_attn", "use_flash_attention", "use_flash_attn", "flash_attention", "attn_implementation", "attention_kernel", "sdpa",
  ),
  **_told("every step is compiled", "", "compile", "torch_compile", "jit", "use_compile"),
  # Data.
  **_told(
    "the text comes from files of yours", f"dataset=jsonl dataset_path=FILES ({', '.join(DATASETS)})",
    "dataset_dir", "dataset_name", "datasets", "train_dataset", "data", "train_data", "eval_dataset",
  ),
  **_renamed("dataset_path", "data_path", "data_files", "train_file", "train_files", "train_path", "data_dir", "dataset_files"),
  **_renamed("dataset_weights", "dataset_mixture", "train_weights", "mixture_weights", "interleave_probs", "data_weights"),
  **_renamed("eval_path", "eval_data_path", "val_file", "validation_file", "valid_data", "eval_file", "eval_data_files"),
  **_renamed("text_field", "dataset_text_field", "text_column", "text_key", "content_field"),
  **_renamed("images_field", "image_column", "image_field", "images_column"),
  **_renamed("eval_fraction", "val_size", "val_split", "validation_split", "test_size", "val_fraction", "eval_ratio"),
  **_renamed("dataset_documents_max", "max_samples", "max_train_samples", "max_documents", "num_examples"),
  **_renamed("packing", "neat_packing", "sample_packing", "pack_sequences"),
  **_renamed("tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_file", "tokenizer_model"),
  **_told("the library follows the file of the tokenizer", "", "tokenizer_type", "use_fast_tokenizer"),
  **_told("documents are read and packed in a thread of their own", "", "num_workers", "preprocessing_num_workers"),
  **_told("documents are read and packed in a thread of their own", "", "dataloader_num_workers", "num_proc", "streaming"),
  # Where a run begins, what it keeps and what it shows.
  **_told(
    "the model is the first word, its weights are init_from", "MODEL init_from={value}",
    "model", "base_model", "pretrained", "model_path", "model_id", "model_name_or_path", "pretrained_model_name_or_path",
  ),
  **_renamed("init_from", "load_from", "from_pretrained", "ckpt_path", "checkpoint_path", "checkpoint", "finetune_from"),
  **_told(
    "the same command with the same run_name goes on from its newest checkpoint", "run_name=NAME",
    "resume_from_checkpoint", "resume_from", "load_full_state_path", "restore_from",
  ),
  **_renamed("output_dir", "out_dir", "save_dir", "output", "logging_dir", "work_dir", "default_root_dir"),
  **_renamed("run_name", "exp_name", "experiment_name", "job_name", "wandb_run_name"),
  **_renamed("log_interval", "logging_steps", "log_every", "log_every_n_steps", "print_every", "log_freq"),
  **_renamed("checkpoint_interval", "save_steps", "save_interval", "save_every", "checkpoint_every", "ckpt_interval"),
  **_renamed("checkpoint_interval", "checkpoint_freq", "checkpoint_frequency", "save_freq", "checkpoint_steps"),
  **_renamed("max_to_keep", "save_total_limit", "keep_last", "keep_last_n", "max_checkpoints"),
  **_renamed("eval_interval", "eval_every", "eval_freq", "evaluation_steps", "val_check_interval", "test_interval"),
  **_told("a key gives the steps between evaluations", "eval_interval=N", "eval_strategy", "evaluation_strategy", "do_eval"),
  **_told("a key gives the steps between checkpoints", "checkpoint_interval=N", "save_strategy", "save_only_model"),
  **_told(_METRICS, "wandb_project=NAME, mlflow_experiment=NAME or enable_tensorboard=true", "report_to", "logger"),
  **_told(
    "the first parameters have a seed and the order of the documents has one", "seed={value} data_shuffle_seed={value}",
    "rng_seed", "random_seed", "manual_seed", "global_seed",
  ),
  **_renamed("data_shuffle_seed", "data_seed", "shuffle_seed", "dataset_seed"),
  **_told("train is a verb", "", "do_train", "do_predict", "overwrite_output_dir", "stage"),
  # Sizes of a model, as config.json has them.
  **_renamed("num_decoder_layers", "num_hidden_layers", "num_layers", "n_layer", "n_layers"),
  **_renamed("emb_dim", "hidden_size", "d_model", "n_embd", "hidden_dim", "embed_dim"),
  **_renamed("mlp_dim", "intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"),
  **_renamed("num_query_heads", "num_attention_heads", "n_head", "n_heads", "num_heads"),
  **_renamed("num_kv_heads", "num_key_value_heads", "n_kv_heads", "num_query_groups"),
  **_renamed("rope_max_timescale", "rope_theta", "rope_base", "rotary_base"),
  **_renamed("normalization_layer_epsilon", "rms_norm_eps", "norm_eps", "layer_norm_eps"),
  **_renamed("logits_via_embedding", "tie_word_embeddings", "tie_embeddings"),
  **_renamed("sliding_window_size", "sliding_window", "window_size"),
  **_renamed("attn_logits_soft_cap", "attn_logit_softcapping", "attn_logit_softcap", "attention_logits_soft_cap"),
  **_renamed("final_logits_soft_cap", "final_logit_softcapping", "final_logit_softcap"),
  **_renamed("mlp_activation", "hidden_act", "hidden_activation", "activation_function"),
  **_renamed("num_experts", "n_routed_experts", "num_local_experts"),
  **_renamed("num_experts_per_tok", "moe_topk", "top_k_experts", "router_topk"),
  **_renamed("moe_mlp_dim", "moe_intermediate_size"),
  **_renamed("shared_experts", "n_shared_experts", "num_shared_experts"),
  **_renamed("first_num_dense_layers", "first_k_dense_replace"),
  **_renamed("n_routing_groups", "n_group"),
  **_renamed("topk_routing_group", "topk_group"),
  **_renamed("indexer_topk", "index_topk"),
  **_renamed("indexer_head_dim", "index_head_dim"),
  **_renamed("indexer_n_heads", "index_n_heads"),
  **{
    name: Foreign(
      f"here a load-balancing loss has a definition and a weight; this key's definition is {definition}",
      f"load_balance_loss={definition} load_balance_loss_weight={{value}}",
    )
    for name, definition in {
      "router_aux_loss_coef": "huggingface", "aux_loss_alpha": "deepseek_sequence", "moe_aux_loss_coeff": "switch"
    }.items()
  },
  **_renamed("router_z_loss_weight", "moe_z_loss_coeff"),
  **_told(
    "the z-loss of routers is the sum over layers, where transformers takes the mean over layers",
    "router_z_loss_weight=W, which is router_z_loss_coef divided by the number of layers with experts",
    "router_z_loss_coef",
  ),
  # What is not here, where a family of names below would be too wide or a name of ours too near.
  **_renamed("lora_rank", "lora_r", "lora_dim"),
  **{
    name: Foreign("here it is lora_modules, a list", "lora_modules={value}", listed=True)
    for name in ("lora_target", "lora_target_modules", "target_modules")
  },
  **_renamed("lora_rslora", "use_rslora"),
  **_renamed("lora_dora", "use_dora"),
  **_told(
    _TOWER, "vision_tower=frozen",
    "freeze_vision_tower", "freeze_vision_encoder_params", "freeze_multi_modal_projector", "freeze_vit", "freeze_aligner",
    "freeze_vision_model",
  ),
  **_told(_TOWER, "vision_tower=trained", "finetune_vision_layers", "unfreeze_vision_tower"),
  **_told(_TOWER, "vision_tower=projector", "tune_mm_mlp_adapter"),
  **_told("weights are quantised below an adapter alone", "lora_rank=16 base_weights=int8", "load_in_8bit", "int8"),
  **_told(_HUB, "tokenizer=FILE, init_from=DIRECTORY", "use_auth_token", "token", "trust_remote_code"),
  **_told(_AXES, "ici_fsdp_parallelism=-1, which shards parameters over all devices", "fsdp", "deepspeed", "zero_stage"),
  **_told(_AXES, "ici_data_parallelism=-1, which has all parameters on every device", "ddp"),
  **_renamed("ici_tensor_parallelism", "tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
  **_renamed("ici_context_parallelism", "cp", "cp_size", "context_parallel_size", "sequence_parallel_size"),
  **_renamed("ici_expert_parallelism", "ep", "ep_size", "expert_parallel_size", "expert_model_parallel_size"),
  **_renamed("ici_data_parallelism", "dp", "dp_size", "data_parallel_size"),
  **_told(_AXES, "", "pp", "num_gpus", "n_gpus", "nproc_per_node", "devices", "num_nodes", "nnodes"),
}  # fmt: skip
"""Whole names. Upper case and dashes count as lower case and underscores."""

FAMILIES: tuple[tuple[str, Foreign], ...] = (
  (
    "lora_* *_lora *_lora_* qlora* dora* use_dora loftq* peft* adapter* *_adapter *_adapters finetuning_type",
    Foreign(_ADAPTERS, _LORA),
  ),
  (
    "freeze_* unfreeze_* trainable_layers trainable_params",
    Foreign("what is trained is a list of patterns of parameter names", _PART),
  ),
  (
    "fp8* *_fp8 float8*",
    Foreign("products in float8 are a key, with scales of each tensor as it is", "matmul_dtype=float8"),
  ),
  (
    "quant* *_quant *_quant_* *_quantization *_quantized *_qwix_* load_in_*bit bnb_* gptq* awq* constant_bound_config",
    Foreign("weights are quantised below an adapter alone", "lora_rank=16 base_weights=nf4"),
  ),
  (
    "ici_*_parallelism dcn_*_parallelism tensor_parallel* pipeline_* sequence_parallel* expert_parallel* context_* "
    "num_pipeline_* tensor_model_parallel* num_layers_per_pipeline_stage custom_mesh* scan_pipeline_*",
    Foreign(_AXES, "ici_tensor_parallelism, ici_context_parallelism, ici_expert_parallelism, dcn_data_parallelism"),
  ),
  (
    "num_slices slices",
    Foreign("a run finds its slices, and dcn_* says what lies between them", "dcn_data_parallelism=-1 (its default)"),
  ),
  (
    "use_sft sft_* train_on_* completion_only* mask_history assistant_only_loss",
    Foreign("records are conversations, and what is learned of them is one key", "data_format=chat train_on=assistant"),
  ),
  (
    "use_dpo dpo_* grpo_* ppo_* kto_* orpo_* rl_* reward_* distill_* mtp_* label_smoothing* block_diffusion_*",
    Foreign(f"objectives: {', '.join(OBJECTIVES)}, the next token of a text"),
  ),
  (
    "template chat_template_* use_chat_template apply_chat_template default_system system_prompt",
    Foreign("a conversation is rendered as the model's own template has it", "data_format=chat, chat_template=FILE.jinja"),
  ),
  ("*dropout*", Foreign("an adapter alone has dropout, by lora_dropout")),
  ("neftune*", Foreign("no noise is added to embeddings")),
  ("hf_* hub_* push_to_hub", Foreign(_HUB, "dataset=parquet dataset_path=FILES, tokenizer=FILE, init_from=DIRECTORY")),
  ("wandb* *_wandb", Foreign("Weights & Biases is asked for by its project", "wandb_project=NAME")),
  ("mlflow* *_mlflow", Foreign("MLflow is asked for by its experiment", "mlflow_experiment=NAME")),
  ("comet* swanlab* neptune* metrics_file", Foreign(_METRICS, "enable_tensorboard=true")),
  (
    "early_stopping* load_best_model* metric_for_best* greater_is_better target_eval_loss",
    Foreign(
      "the step of the lowest eval_loss is kept by one key, and the run ends early by another",
      "eval_interval=N keep_best=true early_stopping_patience=3",
    ),
  ),
  (
    "grain_* olmo_* tfds_* train_split eval_split eval_dataset_name train_data_columns eval_data_columns max_corpus_chars",
    Foreign("the text comes from files of yours", "dataset=jsonl dataset_path=FILES text_field=NAME (or parquet, text)"),
  ),
  ("muon* galore* badam* apollo*", Foreign(f"the optimizers are {', '.join(OPTIMIZERS)}", "opt_type=adamw")),
  (
    "profil* *_profiler *_profiler_* xprof_* xplane nsys skip_first_n_steps_for_profiler",
    Foreign("JAX's profiler traces some steps for xprof", "profile_steps=10-12"),
  ),
  ("dump_hlo* dump_jaxpr* dump_step", Foreign("XLA writes its programs", "XLA_FLAGS=--xla_dump_to=DIR before the command")),
  ("*goodput* *gcs* *_gcp_* *vertex* *mldiagnostics* *heartbeat* record_internal_* monitor_step_*", Foreign(_METRICS)),
  (
    "*multi_tier* *emergency* local_checkpoint* checkpoint_storage_* checkpoint_todelete_* save_checkpoint_on_* enable_orbax* "
    "enable_autocheckpoint enable_continuous_checkpointing enable_single_replica* elastic_*",
    Foreign("checkpoints have one form and one place", "checkpoint_interval=N max_to_keep=N"),
  ),
  (
    "inference_* prefill_* decode_* vllm_* maxengine_* prometheus_* max_prefill_predict_length prompt",
    Foreign("generating text is a verb of its own", f"maxtext-like generate --checkpoint RUN {_CALL}generate(...)"),
  ),
  (
    "compile_topology* compiled_trainstep_file",
    Foreign("compiling ahead of time is a verb of its own", f"maxtext-like compile MODEL {_CALL}compile_step(...)"),
  ),
  (
    "sa_* local_sa_* wi_tile_* wo_tile_* megablox sparse_matmul *_gmm *_gmm_* ragged_* use_ragged_* use_iota_embed "
    "use_tokamax_* fused_qkv fused_mlp shardy param_scan_axis allow_split_physical_axes optimize_mesh_* enable_nnx pure_nnx*",
    Foreign("it chooses among implementations of MaxText's, and no result depends on it"),
  ),
  (
    "*diloco* mhc_* *_mhc_* sinkhorn_* engram_* gdn_* *_for_audio use_audio* moba* mrope_* compress_ratios compressed_* "
    "use_qk_clip skip_step_* *rampup* attention_sink",
    Foreign("a part of MaxText that this project has not got"),
  ),
)  # fmt: skip
"""Families of names, as patterns of whole names (``*`` is any text); the first that matches counts."""


def fold(name: str) -> str:
  """A name as it is compared: lower case with underscores."""
  return name.lower().replace("-", "_")


def find(name: str) -> Foreign | None:
  """What is to be said about a name of another trainer; None: none is known."""
  folded = fold(name)
  if folded in NAMES:
    return NAMES[folded]
  return next((said for patterns, said in FAMILIES if any(fnmatchcase(folded, p) for p in patterns.split())), None)
