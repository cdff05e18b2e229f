"""Names of other trainers that look like a key here, but mean something else or have another unit.

The sentence says how the two differ. The advice names our key and leaves the value open: the value of the other trainer would
be wrong here, or the right one depends on other settings.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Similar:
  """Names with one answer.

  Attributes:
    names: other trainers' names.
    says: the difference.
    write: words to type, without the other trainer's value.
    off: words to type if the other trainer's value switches the setting off (``OFF``); empty: leave the key out. None if
      ``write`` fits such a value too.
  """

  names: str
  says: str
  write: str
  off: str | None = None


OFF: tuple[str, ...] = ("false", "no", "none", "null", "off", "0", "disabled")
"""Values that switch a setting off, in lower case."""


_ROWS = "write per_device_batch_size=ROWS"
_FILES = "write dataset=KIND dataset_path=FILES (jsonl, parquet, arrow, arrayrecord or text)"
_WARMUP = "write warmup_steps_fraction=SHARE, which is the number of warm-up steps divided by the steps of the schedule"
_VISION = "vision_tower says which part of the vision tower is trained: trained, projector, frozen or adapted"
_MODEL = "the first word of the command names the model, and init_from is the directory of its weights"
_RUN_DIRECTORY = (
  "it is the directory of one run; here output_dir holds all runs, and run_name is the directory of this run in it"
)
_STORED = "weight_dtype is the dtype of the stored parameters, dtype is the dtype of activations and matrix products"
_MOMENTS = "mu_dtype and nu_dtype are the dtypes of the two moments: float32, bfloat16 or dynamic8"
_QUANTIZED = "training quantizes weights only below an adapter, and the formats are nf4, int8 and fp8_block"
_ROPE = "rope_type is default, linear (Gemma 3) or yarn (DeepSeek), and each has its own keys"
_PACKED = "the key packing applies to both training and evaluation"
_DECAY = "weight decay is always decoupled and its strength is adam_weight_decay; norms, scalars and biases have none"

NAMES: tuple[Similar, ...] = (
  # Batches and lengths.
  Similar("micro_batch_size local_batch_size",
          "it counts the rows of one data-parallel rank; per_device_batch_size is for one device, which is the same "
          "unless tensor or context parallelism shares a row",
          _ROWS),
  Similar("batch_size bs",
          "the name is ambiguous, because some trainers count rows per device and others the rows of all devices; "
          "per_device_batch_size counts rows per device",
          _ROWS),
  Similar("train_batch_size global_batch_size total_batch_size global_train_batch_size",
          "it counts the rows of all devices; that number is per_device_batch_size x devices x "
          "gradient_accumulation_steps here",
          _ROWS),
  Similar("eval_batch_size per_device_eval_batch_size eval_per_device_batch_size eval_micro_batch_size",
          "an evaluation uses the batch size of training",
          "leave it out; eval_steps is the number of batches"),
  Similar("max_eval_steps limit_val_batches eval_batches",
          "eval_steps is the number of batches of an evaluation, not a share",
          "write eval_steps=N"),
  Similar("max_len context_length max_context_length model_max_length max_seqlen n_ctx max_tokens",
          "the longest sequence that a model takes is max_position_embeddings; the length of a training row is "
          "max_target_length",
          "write max_target_length=TOKENS"),
  Similar("iterations num_iterations max_steps_per_epoch",
          "steps is the number of updates of the complete run",
          "write steps=N"),
  Similar("train_samples",
          "it counts rows; steps counts updates",
          "write steps=ROWS / rows of an update"),
  # Learning rate and optimizer.
  Similar("base_lr",
          "some trainers scale it with the batch; learning_rate is the peak rate itself",
          "write learning_rate=RATE"),
  Similar("warmup_steps num_warmup_steps warmup_iters lr_warmup_iters lr_warmup_steps warmup_step warmup",
          "it counts steps; warmup_steps_fraction is a share of the schedule",
          _WARMUP),
  Similar("lr_warmup_samples warmup_tokens",
          "it counts rows or tokens; warmup_steps_fraction is a share of the schedule",
          _WARMUP),
  Similar("min_lr min_learning_rate final_lr end_lr lr_end lr_min eta_min end_learning_rate",
          "it is a learning rate; learning_rate_final_fraction is the last rate divided by the peak",
          "write learning_rate_final_fraction=SHARE, which is the last rate divided by learning_rate"),
  Similar("lr_decay_steps decay_steps",
          "some trainers count the warm-up as part of it, others do not; lr_schedule_steps is the length of the "
          "complete schedule with its warm-up",
          "write lr_schedule_steps=STEPS"),
  Similar("lr_decay_samples",
          "it counts rows; lr_schedule_steps counts steps",
          "write lr_schedule_steps=STEPS"),
  Similar("wsd_decay_steps lr_wsd_decay_iters num_decay_steps num_stable_steps stable_steps cooldown_steps cooldown_iters",
          "it counts steps; wsd_decay_steps_fraction is the share of the schedule in which the rate falls",
          "write lr_schedule_type=wsd wsd_decay_steps_fraction=SHARE"),
  Similar("wsd use_wsd cooldown cooldown_fraction cooldown_frac",
          "lr_schedule_type=wsd keeps the peak rate until the last wsd_decay_steps_fraction of the schedule",
          "write lr_schedule_type=wsd wsd_decay_steps_fraction=SHARE",
          off=""),
  Similar("decay_ratio",
          "it divides by the steps of the run; wsd_decay_steps_fraction is a share of the schedule, which is the same "
          "unless lr_schedule_steps is set",
          "write lr_schedule_type=wsd wsd_decay_steps_fraction=SHARE"),
  Similar("decay_type lr_wsd_decay_style",
          "wsd has one form of decay, linear",
          "write lr_schedule_type=wsd if the decay is linear"),
  Similar("lr_schedule scheduler sched lr_scheduler_kwargs sched.name",
          "lr_schedule_type is cosine, linear, constant or wsd; learning_rate_final_fraction is the last rate as a "
          "share of the peak, 0 in most other trainers and 0.1 here",
          "write lr_schedule_type=NAME learning_rate_final_fraction=SHARE"),
  Similar("adam adamw adafactor lion sgd",
          "opt_type is the optimizer: adamw, adafactor, lion or sgd",
          "write opt_type=NAME"),
  Similar("betas",
          "each of the two decay rates has a key",
          "write adam_b1=FIRST adam_b2=SECOND"),
  Similar("eps epsilon",
          "adam_eps is the epsilon of the optimizer, normalization_layer_epsilon that of the norms",
          "write adam_eps=VALUE"),
  Similar("decoupled_weight_decay adamw_mask weight_decay_mask no_decay_params apply_wd_to_qk_layernorm "
          "no_weight_decay_cond_type do_layer_norm_weight_decay",
          _DECAY,
          "write adam_weight_decay=STRENGTH"),
  Similar("exp_avg_dtype exp_avg_sq_dtype optim_bits optimizer_state_dtype optimizer_dtype optim_dtype moment_dtype adam_dtype",
          _MOMENTS,
          "write mu_dtype=DTYPE nu_dtype=DTYPE"),
  Similar("z_loss z_loss_weight z_loss_coef z_loss_coeff zloss",
          "z_loss_multiplier is the weight of log(Z)^2 over the vocabulary, not over a router's experts",
          "write z_loss_multiplier=WEIGHT"),
  Similar("loss_scale initial_scale_power",
          "loss_scale_init is the first factor of the dynamic loss scale of float16, not a constant and not a power of "
          "2",
          "write loss_scale_init=FACTOR"),
  Similar("offload_optimizer optimizer_cpu_offload optimizer_offload_fraction",
          "optimizer_memory_host_offload keeps the moments of layers in the host's memory, and needs "
          "optimizer_in_backward",
          "write optimizer_in_backward=true optimizer_memory_host_offload=true",
          off=""),
  Similar("ignore_data_skip",
          "a run resumes at its place in the data",
          "leave it out"),
  Similar("early_stopping_steps early_stopping target_eval_loss",
          "early_stopping_patience counts evaluations without a lower eval_loss",
          "write eval_interval=STEPS early_stopping_patience=EVALUATIONS",
          off=""),
  Similar("load_best_model_at_end metric_for_best_model greater_is_better",
          "keep_best also keeps the step with the lowest eval_loss; the run still ends with its last "
          "weights",
          "write eval_interval=STEPS keep_best=true",
          off=""),
  # Numbers.
  Similar("torch_dtype param_dtype params_dtype mixed_precision_param",
          _STORED,
          "write dtype=DTYPE weight_dtype=DTYPE"),
  Similar("compute_type amp",
          _STORED,
          "write dtype=DTYPE weight_dtype=DTYPE"),
  Similar("main_grads_dtype grad_accum_dtype accumulate_allreduce_grads_in_fp32",
          "grad_dtype is the dtype of the gradients that the optimizer reads; float32 is the default",
          "write grad_dtype=DTYPE"),
  Similar("mixed_precision_reduce communication_data_type",
          "reduction_dtype is the dtype of sums that devices share: float32, or that of the activations (dtype)",
          "choose reduction_dtype=float32 or dtype"),
  Similar("attention_softmax_in_fp32",
          "float32_logits computes mask and softmax of attention in float32; it is on by default",
          "write float32_logits=true or false"),
  Similar("offload_activations activation_offloading activation_offload enable_activation_offloading layer_offloading "
          "cpu_offloading fine_grained_activation_offloading",
          "remat_offload says which activations are kept in host memory for the backward pass: layer_inputs, kept or all",
          "write remat_policy=full remat_offload=layer_inputs",
          off=""),
  Similar("use_gradient_checkpointing recompute_granularity recompute_method recompute_num_layers recompute_modules "
          "activations_checkpoint_granularity activations_checkpoint_method activations_checkpoint_num_layers "
          "selective_checkpointing checkpoint_activations recompute_activations",
          "remat_policy says what the backward pass computes again, in every layer",
          "choose remat_policy=none, minimal, save_mlp, save_outputs, save_attention or full",
          off="remat_policy=none"),
  Similar("flash_attn attn_impl use_flash_attention use_flash_attn use_flash_attention_2 flash_attention attn_implementation "
          "attention_kernel sdpa attention_backend eager_attention flex_attention sdp_attention xformers_attention "
          "sage_attention s2_attention",
          "attention chooses the kernel; auto takes the fastest that honors mask and precision",
          "write attention=auto"),
  # Data.
  Similar("dataset_dir dataset_name datasets train_dataset data train_data eval_dataset pretraining_dataset "
          "test_datasets",
          "the text comes from files",
          _FILES),
  Similar("data_path data_dir train_path train_data_path valid_data_path test_data_path eval_data_path valid_data "
          "per_split_data_args_path",
          "it often names files that another trainer has prepared; dataset_path and eval_path take text, JSON lines, "
          "parquet and arrow",
          _FILES),
  Similar("dataset_mixture train_weights mixture_weights interleave_probs data_weights",
          "some trainers weigh records; dataset_weights weighs the tokens of the sources that dataset_path names",
          "write dataset_weights={web: 3, code: 1}"),
  Similar("val_size val_set_size test_size val_split validation_split validation_split_percentage split",
          "it may be a count, a share or a percentage; eval_fraction is the share of the documents held out",
          "write eval_fraction=SHARE"),
  Similar("max_samples num_samples num_examples",
          "some trainers count for each data set; dataset_documents_max is the number of documents of all sources "
          "together",
          "write dataset_documents_max=N"),
  Similar("packed eval_packing eval_sample_packing",
          _PACKED,
          "write packing=true or false"),
  Similar("packing_strategy sample_packing_bin_size sample_packing_group_size padding_free",
          "rows are filled in the order of the documents, and attention never crosses a document",
          "write packing=true or false"),
  Similar("num_images_per_example max_num_images_per_example",
          "max_images_per_row is the number of images in a row, which may hold several documents",
          "write max_images_per_row=N"),
  Similar("tokenizer_name tokenizer_name_or_path tokenizer_model tokenizer_path_or_name tokenizer_config",
          "tokenizer is the path of a tokenizer.json or a sentencepiece model; a checkpoint brings its own",
          "write tokenizer=FILE"),
  Similar("template chat_template_path chat_template_name use_chat_template apply_chat_template default_system "
          "system_prompt chat_template_jinja",
          "chat_template is auto (the model's own), the name of a template or a jinja file",
          "write data_format=chat chat_template=FILE.jinja",
          off=""),
  Similar("use_sft sft train_on_turn train_on_eos roles_to_train",
          "train_on says which part of a conversation is learned: assistant (every answer), last (those after the last "
          "user message) or all",
          "write data_format=chat train_on=assistant",
          off=""),
  Similar("shuffle_documents shuffle_dataset shuffle_data disable_shuffling shuffle_merged_datasets",
          "shuffle puts the documents in random order, another one in each epoch",
          "write shuffle=true or false"),
  Similar("temperature sampling_temperature",
          "sample_temperature is the temperature of the samples during training; generate has its own option",
          "write sample_temperature=NUMBER"),
  # The start of a run and its output.
  Similar("model base_model pretrained model_path model_id model_name_or_path pretrained_model_name_or_path",
          _MODEL,
          "write MODEL init_from=DIRECTORY"),
  Similar("load_from from_pretrained ckpt_path checkpoint_path checkpoint finetune_from pretrained_checkpoint "
          "checkpoint_dir load initial_load_path restore_from_path",
          "init_from takes the weights of a run, an export or a Hugging Face directory, and starts a new run at step 0",
          "write init_from=DIRECTORY"),
  Similar("resume_from_checkpoint resume_from load_full_state_path restore_from auto_resume resume_from_checkpoints "
          "load_step resume_ckpt warm_start",
          "the same command with the same run_name resumes from its newest checkpoint",
          "write run_name=NAME",
          off=""),
  Similar("overwrite_output_dir",
          "nothing is overwritten: the same run_name resumes a run, and another one starts a new run",
          "write run_name=NAME with a new name",
          off=""),
  Similar("out_dir save_dir work_dir default_root_dir save dump_folder exp_dir checkpoint.folder",
          _RUN_DIRECTORY,
          "write output_dir=DIRECTORY run_name=NAME"),
  Similar("logging_dir tensorboard_dir save_tb_folder metrics_dir logdir log_dir",
          "metrics.jsonl and TensorBoard events are written to output_dir/run_name",
          "leave it out"),
  Similar("wandb_run_name wandb_name wandb_exp_name trackio_run_name mlflow_run_name name experiment run_id",
          "run_name is the directory of the run and its name in Weights & Biases and MLflow",
          "write run_name=NAME"),
  Similar("wandb wandb_entity wandb_log use_wandb enable_wandb wandb_mode wandb_log_model wandb_run_id wandb_watch "
          "wandb_save_dir",
          "wandb_project turns Weights & Biases on",
          "write wandb_project=NAME",
          off=""),
  Similar("mlflow use_mlflow mlflow_experiment_name mlflow_tracking_uri",
          "mlflow_experiment turns MLflow on",
          "write mlflow_experiment=NAME",
          off=""),
  Similar("project project_name",
          "wandb_project turns Weights & Biases on",
          "write wandb_project=NAME"),
  Similar("tensorboard",
          "enable_tensorboard writes TensorBoard events",
          "write enable_tensorboard=true or false"),
  Similar("report_to logger metric_logger log_with",
          "metrics go to metrics.jsonl and report.html, and to TensorBoard, W&B or MLflow if a key asks for it",
          "choose enable_tensorboard=true, wandb_project=NAME or mlflow_experiment=NAME",
          off="enable_tensorboard=false"),
  Similar("eval_strategy evaluation_strategy do_eval val_check_interval test_interval evals_per_epoch "
          "check_val_every_n_epoch",
          "eval_interval is the number of steps between evaluations; 0 turns them off",
          "write eval_interval=STEPS",
          off="eval_interval=0"),
  Similar("save_strategy saves_per_epoch checkpointing_steps",
          "checkpoint_interval is the number of steps between checkpoints of the complete training state",
          "write checkpoint_interval=STEPS",
          off="enable_checkpointing=false"),
  Similar("save_only_model",
          "a checkpoint always has the complete training state; maxtext-like export writes the weights alone",
          "leave it out"),
  Similar("keep_last save_top_k save_total",
          "max_to_keep is the number of newest checkpoints; keep_best keeps the best one as well",
          "write max_to_keep=N"),
  Similar("rng_seed random_seed manual_seed global_seed random_state init_seed",
          "seed is the seed of the initial parameters, data_shuffle_seed that of the order of the documents",
          "write seed=N data_shuffle_seed=N"),
  Similar("async_save async_mode",
          "async_checkpointing writes checkpoints while training continues",
          "write async_checkpointing=true or false"),
  Similar("profile profile_step_start profile_step_end profile_freq enable_profiling save_traces_folder nsys_profile "
          "use_pytorch_profiler",
          "profile_steps is the range of steps that JAX's profiler traces",
          "write profile_steps=10-12",
          off=""),
  # Model.
  Similar("hidden_dim",
          "some models use this name for the width of the residual stream (emb_dim), others for the width of the MLP (mlp_dim)",
          "write emb_dim=WIDTH or mlp_dim=WIDTH"),
  Similar("layer_norm_eps",
          "it is the epsilon of a LayerNorm; the norms of these models are RMSNorms, with normalization_layer_epsilon",
          "write normalization_layer_epsilon=EPSILON"),
  Similar("qk_head_dim",
          "Megatron-LM counts the dimensions without rotary position, transformers those with it too (qk_nope_head_dim + "
          "qk_rope_head_dim)",
          "write qk_nope_head_dim=DIMENSIONS without the rotary ones"),
  Similar("window_size attention_window window local_window swa_window swa_window_size",
          "it may count keys on both sides; sliding_window_size counts the keys that a token sees, itself included",
          "write sliding_window_size=KEYS"),
  Similar("sliding_window_pattern",
          "inhomogeneous_layer_cycle_interval is the cycle: every n-th layer is global",
          "write inhomogeneous_layer_cycle_interval=N"),
  Similar("partial_rotary_factor rotary_percent rotary_percentage",
          "global_rope_proportion is the rotated share of a head in global layers of Gemma 4; all other layers rotate "
          "every dimension",
          "write global_rope_proportion=SHARE"),
  Similar("rope_scaling rope_parameters rope_scaling_factor use_rope_scaling seq_len_interpolation_factor "
          "rope_scaling.factor rotary_seq_len_interpolation_factor yarn_factor",
          _ROPE,
          "write rope_type=linear rope_linear_scaling_factor=FACTOR, or rope_type=yarn rope_factor=FACTOR"),
  Similar("rope_local_theta local_rope_theta rope_global_theta global_rope_theta",
          "local_rope_max_timescale is the base of layers with a sliding window, rope_max_timescale that of all other layers",
          "write local_rope_max_timescale=BASE or rope_max_timescale=BASE"),
  Similar("logit_soft_cap logits_soft_cap logit_softcapping logit_softcap logit_cap softcap soft_cap softcapping attn_soft_cap "
          "attn_logit_cap attention_soft_cap final_logit_cap final_soft_cap",
          "attn_logits_soft_cap caps the scores of attention, final_logits_soft_cap the logits of the vocabulary",
          "write attn_logits_soft_cap=CAP or final_logits_soft_cap=CAP"),
  Similar("rotary_interleaved dsa_indexer_rope_interleaved",
          "rope_interleave says which two dimensions form a rotary pair (DeepSeek)",
          "write rope_interleave=true or false"),
  Similar("use_bidirectional_attention",
          "use_bidirectional_image_attn lets the tokens of one image attend to each other",
          "write use_bidirectional_image_attn=true or false"),
  Similar("moe_shared_expert_intermediate_size",
          "it is the width of all shared experts together; shared_experts counts them, each with a width of moe_mlp_dim",
          "write shared_experts=N"),
  Similar("moe_layer_freq mlp_layer_types decoder_sparse_step mlp_only_layers interleave_moe_layer_step",
          "first_num_dense_layers is the number of leading layers without experts; all later layers have experts",
          "write first_num_dense_layers=N"),
  Similar("moe_aux_loss_coef router_aux_loss_factor load_balancing_loss_coef aux_loss aux_loss_coef aux_loss_weight "
          "moe_aux_loss_weight router_aux_loss balance_loss_coef balance_loss_weight lb_loss_coef lb_loss_weight",
          "load_balance_loss_weight is the weight of the loss that load_balance_loss defines, and a weight has another "
          "effect for each definition (docs/explanation/load-balancing.md)",
          "choose load_balance_loss=maxtext, huggingface, deepseek_sequence or switch, and its load_balance_loss_weight"),
  Similar("router_z_loss_coef router_z_loss_coeff router_z_loss_multiplier router_z_loss",
          "router_z_loss_weight multiplies the sum over layers, where transformers takes the mean over layers",
          "write router_z_loss_weight=WEIGHT, which is router_z_loss_coef divided by the number of layers with experts"),
  Similar("sequence_aux_loss_coef seq_aux_loss_weight seq_aux_loss_coef",
          "load_balance_loss=deepseek_sequence is the loss of each sequence",
          "write load_balance_loss=deepseek_sequence load_balance_loss_weight=WEIGHT",
          off=""),
  Similar("bias_update_speed expert_bias_update_rate bias_update_rate router_bias_update_rate",
          "routed_bias_update_rate is the step of the router's bias, in the direction of the sign",
          "write routed_bias_update_rate=STEP"),
  Similar("load_balance_coeff",
          "routed_bias_update_rate is the step of the router's bias; the other trainer removes the mean of the steps",
          "write routed_bias_update_rate=STEP"),
  Similar("dsa_indexer_loss_coeff",
          "indexer_loss_scaling_factor is the weight of the indexer's divergence, summed as in MaxText",
          "write indexer_loss_scaling_factor=WEIGHT"),
  Similar("padded_vocab_size pad_vocab_size resize_vocab make_vocab_size_divisible_by resize_token_embeddings_to_32x "
          "resize_model_vocab",
          "vocab_size is the number of rows of the embedding table, and nothing pads it",
          "write vocab_size=ROWS"),
  Similar("patch_size image_size num_channels vision_config",
          "the keys of a vision tower end in _for_vit, such as patch_size_for_vit",
          "write patch_size_for_vit=N, in the model file of a model with a tower"),
  Similar("text_config",
          "the keys of the text model are in the section model:",
          "write the keys themselves, such as emb_dim=N"),
  Similar("enable_moe_block",
          "num_experts is the number of experts; 0 is a dense model",
          "write num_experts=N"),
  # Adapters and training of a part.
  Similar("lora adapter adapter_type peft use_peft peft_scheme",
          "an adapter is switched on by its rank: LoRA, with lora_rslora and lora_dora for rsLoRA and DoRA",
          "write lora_rank=RANK",
          off=""),
  Similar("alpha adapter_dim",
          "lora_rank is the rank of the adapter; its output is multiplied by lora_alpha / lora_rank",
          "write lora_rank=RANK lora_alpha=ALPHA"),
  Similar("rank_pattern alpha_pattern",
          "lora_rank_pattern and lora_alpha_pattern take the names that lora_modules takes",
          "write lora_rank_pattern={mlp.down: 4}"),
  Similar("adapter_dropout",
          "lora_dropout is the share of an adapter's inputs that are zero in training",
          "write lora_dropout=SHARE",
          off=""),
  Similar("layers_to_transform layers_pattern exclude_modules peft_layers_to_transform peft_layers_pattern "
          "lora_target_linear lora_target_parameters target_parameters peft_exclude_modules",
          "lora_modules is a list of names or regular expressions of the weights that get an addition",
          "write lora_modules=[NAME, ...]"),
  Similar("load_in_8bit load_in_4bit int8 quantization_bit quantization_method quantize_base double_quantization "
          "bnb_4bit_quant_type nf4 use_nf4 quant_type bits",
          _QUANTIZED,
          "write base_weights=nf4 (or int8, fp8_block), and in training lora_rank=RANK",
          off=""),
  Similar("freeze_vision_tower freeze_vision_encoder_params freeze_multi_modal_projector freeze_vit freeze_aligner "
          "freeze_vision_model finetune_vision_layers unfreeze_vision_tower tune_mm_mlp_adapter train_vision",
          _VISION,
          "choose vision_tower=trained, projector, frozen or adapted"),
  Similar("unfrozen_parameters trainable_layers trainable_params freeze_trainable_layers freeze_trainable_modules "
          "freeze_layers finetune_language_layers finetune_attention_modules finetune_mlp_modules freeze_language_model freeze "
          "frozen_layers train_layers trainable",
          "trainable_parameters_mask is a list of regular expressions of the parameters to train",
          "write trainable_parameters_mask=[PATTERN, ...]"),
  # Parallelism.
  Similar("dp dp_size data_parallel_size ddp hsdp",
          "it counts all data-parallel ranks; here the data axis replicates parameters and the fsdp axis shards them",
          "write ici_data_parallelism=N or ici_fsdp_parallelism=N"),
  Similar("fsdp fsdp_config deepspeed zero_stage zero_optimization fsdp_version",
          "the fsdp axis of the mesh shards parameters, gradients and moments; -1, the default, takes all remaining "
          "devices",
          "write ici_fsdp_parallelism=-1",
          off=""),
  Similar("sequence_parallel_size sequence_parallel_degree ulysses_sequence_parallel_size",
          "the context axis of the mesh shares the positions of a row among devices",
          "write ici_context_parallelism=N"),
  Similar("vocab_tiling loss_chunk_size chunked_loss",
          "num_vocab_tiling is the number of parts of the vocabulary for which logits are in memory at a time",
          "write num_vocab_tiling=PARTS",
          off=""),
  Similar("objective_function training_objective loss_type loss_fn",
          "objective is language_modeling, the cross-entropy of the next token",
          "write objective=language_modeling"),
)  # fmt: skip
"""One row for each difference."""
