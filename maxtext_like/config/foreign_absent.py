"""Names of other trainers for settings that this project lacks, with what holds instead.

``NAMES`` has complete names. ``FAMILIES`` has patterns, for settings that come in large groups.
"""

_RL = (
  "this project has no preference or reinforcement learning (DPO, GRPO, PPO, KTO, ORPO, reward models); "
  "objective=language_modeling, the cross-entropy of the next token, is the only objective"
)
_DISTILLATION = "this project has no distillation from a teacher model"
_MTP = (
  "this project does not train multi-token prediction; an import leaves those layers out, and the number of layers of "
  "the model does not include them"
)
_EMA = "this project keeps no moving average of the weights"
_QK_CLIP = "this project does not clip attention weights by their largest score (QK-Clip)"
_OPTIMIZERS = "this project's optimizers are adamw, adafactor, lion and sgd (opt_type), and none of them has this setting"
_ONE_RATE = (
  "one learning rate applies to all trained parameters; there are no rates for groups, embeddings, heads or LoRA's B (LoRA+)"
)
_SCHEDULE = (
  "the schedules are cosine (half a period, without restarts), linear, constant and wsd; this setting belongs to none of them"
)
_ADAPTERS = "the adapters of this project are LoRA, rsLoRA and DoRA, on quantized weights too, and they have no such setting"
_DROPOUT = "only an adapter has dropout (lora_dropout); the models have none"
_NOISE = "no noise is added to embeddings"
_SMOOTHING = "the loss has no label smoothing"
_MASKED = "the loss is the mean over the learned tokens of all devices and microbatches of an update"
_PIPELINE = (
  "there is no pipeline parallelism; the mesh has the axes data, fsdp, expert, context and tensor (docs/guides/parallelism.md)"
)
_DEVICES = (
  "the run uses all devices it finds; the sizes of the mesh axes say what each device does (docs/guides/parallelism.md)"
)
_TP_SEQUENCE = "where activations between layers are placed follows from the mesh; only the axes have sizes"
_HUB = (
  "this program downloads and uploads nothing; weights, tokenizer and data are local files (init_from, tokenizer, dataset_path)"
)
_COMPILED = "every step is compiled"
_READER = "documents are read, tokenized and packed in a background thread, without settings"
_PREPARED = "data are read as they are, and no prepared copy is stored"
_VERB = "the verb of the command chooses it: train, sft, generate, export and others (maxtext-like --help)"
_IMPLEMENTATION = "it chooses an implementation of another trainer; no result here depends on it"
_MAXTEXT = "it belongs to a part of MaxText that this project lacks"
_CAPACITY = "experts have no capacity limit: no token is dropped or padded"
_ROUTING = "the router follows the model family (softmax or sigmoid, top-k), and this setting of it does not exist here"
_GENERATION = "it is a setting of text generation: maxtext-like generate has options of its own"
_FORMATS = "checkpoints have one format, and complete checkpoints one place (output_dir/run_name)"
_BIASES = "the model families fix which layers have biases, gates and norms"
_INIT = "the initial values of the parameters follow from the model family"
_METRICS = "metrics go to metrics.jsonl, TensorBoard, report.html, W&B and MLflow, without this setting"
_LOSS_SCALE = "the dynamic loss scale of float16 has one setting, its first value (loss_scale_init)"
_EVALUATION = "an evaluation computes eval_loss with the dtypes and batches of training"
_FLOAT8 = "products in float8 are one key, matmul_dtype=float8, without further settings"
_QUANTIZATION = "training quantizes weights only below an adapter (lora_rank with base_weights), without this setting"
_PROFILER = "JAX's profiler traces the steps of profile_steps, without further settings"
_XLA_DUMP = "XLA can write its programs: put XLA_FLAGS=--xla_dump_to=DIR before the command"
_FILES_ONLY = (
  "the text comes from files (dataset, dataset_path, text_field), and this setting of other readers does not exist here"
)
_CACHE = "it is the directory of downloads; this program downloads nothing (compiled programs are in compilation_cache_dir)"
_TOKENIZER = "the tokenizer's file decides it, and this project does not change the tokenizer"
_STRUCTURE = (
  "decoder_block chooses a model family with its equations (`maxtext-like models` lists the models), and this setting of other "
  "models does not exist here"
)
_RAMP = "the batch has the same size in every step"
_PARTS = (
  "this method of training a part of the model does not exist here; trainable_parameters_mask chooses the parameters to train"
)
_PART = (
  "what is trained is chosen by regular expressions of parameter names (trainable_parameters_mask), the vision tower by "
  "vision_tower"
)
_IMAGES = "images are resized as the model's own processor does it; there is no sound and no video"
_HOST = "only the moments (optimizer_memory_host_offload) and activations (remat_offload) can be kept in the host's memory"
_FINITE = "every step is checked for NaN and Inf; finite_check_steps, max_skipped_steps and spike_factor say what happens then"
_SPARE = "a run keeps every checkpoint complete: parameters, moments and place in the data"

NAMES: tuple[tuple[str, str], ...] = (
  (
    _RL,
    "dpo grpo ppo kto orpo simpo cpo ipo rloo rlhf rl use_dpo use_grpo beta num_generations max_prompt_length "
    "max_completion_length epsilon_high delta precompute_ref_log_probs sync_ref_model loss_weights kl_coef kl_penalty "
    "rpo_alpha ld_alpha desirable_weight undesirable_weight cpo_alpha simpo_gamma reference_free advantage_estimator "
    "num_generations_eval steps_per_generation scale_rewards ref_model",
  ),
  (
    _MTP,
    "num_nextn_predict_layers num_mtp_layers use_mtp multi_token_prediction mtp",
  ),
  (
    _EMA,
    "ema ema_decay use_ema weight_ema ema_rate",
  ),
  (
    _QK_CLIP,
    "qk_clip qk_clip_threshold qk_clip_alpha use_qk_clip qk_clip_balancing_factor",
  ),
  (
    _OPTIMIZERS,
    "optim_args optimizer_kwargs optim_target_modules adam_beta3 adam_epsilon2 amsgrad nesterov fused foreach "
    "implementation use_adam_mini optimizer.implementation betas3 use_precision_aware_optimizer sophia shampoo sam lookahead "
    "schedule_free kahan paged_adamw",
  ),
  (
    _ONE_RATE,
    "embedding_lr embedding_learning_rate embedding_lr_scale loraplus_lr_ratio loraplus_lr_embedding lr_groups "
    "head_lr_mult decoupled_lr decoupled_min_lr layerwise_lr_decay vision_lr vision_tower_lr mm_projector_lr router_lr "
    "lr_mult param_groups new_param_groups head_learning_rate embedding_lr_multiplier",
  ),
  (
    _SCHEDULE,
    "num_cycles num_restarts lr_decay_rate lr_power power lr_quadratic_warmup lr_warmup_init cosine_constant_lr_ratio "
    "constant_steps decay_lr jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps lr_div_factor "
    "override_opt_param_scheduler use_checkpoint_opt_param_scheduler relora relora_steps start_weight_decay "
    "end_weight_decay weight_decay_incr_style wd_incr_steps lr_cycle_steps learning_rate_decay restarts "
    "cosine_decay_steps init_lr",
  ),
  (
    _ADAPTERS,
    "lora_bias init_lora_weights fan_in_fan_out megatron_config megatron_core loftq_config layer_replication "
    "lora_fan_in_fan_out trainable_token_indices column_init_method row_init_method layer_selection use_bdlora "
    "use_qalora qalora_group_size peft_init_lora_weights merge_lora ensure_weight_tying",
  ),
  (
    _SMOOTHING,
    "label_smoothing label_smoothing_factor",
  ),
  (
    _MASKED,
    "average_tokens_across_devices calculate_per_token_loss loss_agg_mode dft_loss use_dft_loss num_items_in_batch "
    "ignore_pad_token_for_loss label_names eod_mask_loss",
  ),
  (
    _PIPELINE,
    "pp pp_size pipeline pipeline_parallel_size virtual_pipeline_model_parallel_size",
  ),
  (
    _DEVICES,
    "num_gpus n_gpus nproc_per_node devices num_nodes nnodes device device_map accelerator master_addr master_port "
    "local_rank distributed_backend backend use_cpu no_cuda world_size num_slices slices ddp_backend gpus nodes num_hosts "
    "num_processes mesh_shape",
  ),
  (
    _TP_SEQUENCE,
    "sequence_parallel expert_tensor_parallel_size expert_tensor_parallel_degree tp_comm_overlap disable_loss_parallel "
    "enable_async_tensor_parallel fsdp_reshard_after_forward overlap_grad_reduce overlap_param_gather "
    "use_distributed_optimizer",
  ),
  (
    _HUB,
    "use_auth_token token trust_remote_code revision model_revision push_to_hub",
  ),
  (
    _COMPILED,
    "compile torch_compile jit use_compile torch_compile_backend torch_compile_mode enforce_eager",
  ),
  (
    _READER,
    "num_workers preprocessing_num_workers num_proc streaming prefetch_factor dataset_processes "
    "preprocessing_batch_size buffer_size data_shared_file_system",
  ),
  (
    _PREPARED,
    "overwrite_cache dataset_prepared_path data_cache_path tokenized_path skip_prepare_dataset dataset_kwargs data_impl "
    "index_mapping_dir splits_string data_prefix",
  ),
  (
    _VERB,
    "do_train do_predict do_sample eval_only skip_train",
  ),
  (
    _CACHE,
    "cache_dir",
  ),
  (
    "it is a field of a record, not a key of the run (docs/reference/chat-formats.md)",
    "chat_template_kwargs",
  ),
  (
    "gradients are clipped by their global norm (gradient_clipping_threshold), not one value at a time",
    "max_grad_value clip_grad_value gradient_clip_value grad_clip_value",
  ),
  (
    _RAMP,
    "auto_find_batch_size",
  ),
  (
    _EVALUATION,
    "bf16_full_eval fp16_full_eval eval_accumulation_steps eval_on_start eval_delay prediction_loss_only "
    "batch_eval_metrics include_for_metrics eval_start_step eval_mode full_validation compute_accuracy",
  ),
  (
    _LOSS_SCALE,
    "loss_scale_window min_loss_scale hysteresis native_amp_growth_interval fp16_scale_window",
  ),
  (
    _CAPACITY,
    "moe_expert_capacity_factor moe_token_drop_policy moe_pad_expert_input_to_capacity moe_token_dropping "
    "expert_capacity moe_expert_rank_capacity_factor",
  ),
  (
    _ROUTING,
    "scoring_func score_func topk_method moe_router_score_function moe_input_jitter_eps router_jitter_noise router_temperature "
    "moe_router_topk_limited_devices moe_router_force_load_balancing num_expert_group score_before_experts",
  ),
  (
    _BIASES,
    "bias qkv_bias add_qkv_bias add_bias_linear mlp_bias qk_layernorm use_qk_norm_hf gated_linear_unit swiglu "
    "normalization norm_type use_bias attention_output_gate ffn_bias activation qk_norm",
  ),
  (
    _INIT,
    "initializer_range init_method_std init_method use_scaled_init_method embedding_init_method_std initializer_factor "
    "init_std depth_init init_method_xavier_uniform mup mup_width_mult use_mup",
  ),
  (
    _GENERATION,
    "max_new_tokens top_k top_p min_p num_beams repetition_penalty do_generate predict_with_generate gen_kwargs "
    "length_penalty no_repeat_ngram_size num_return_sequences prompt",
  ),
  (
    _TOKENIZER,
    "tokenizer_type use_fast_tokenizer tokenizer_use_fast add_tokens add_special_tokens special_tokens pad_token "
    "eos_token bos_token unk_token additional_special_tokens fix_tokenizer split_special_tokens padding_side "
    "pad_to_multiple_of added_tokens_overrides",
  ),
  (
    _METRICS,
    "logging_first_step logging_strategy log_level log_level_replica log_on_each_node logging_nan_inf_filter "
    "disable_tqdm plot_loss include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics "
    "log_l2_norm_grad_to_tensorboard log_throughput log_params_norm log_memory_to_tensorboard",
  ),
  (
    _STRUCTURE,
    "attention_chunk_size index_topk_freq dsa_indexer_topk_freq dual_chunk_attention_config use_sliding_window "
    "max_window_layers pretraining_tp position_embedding_type is_encoder_decoder architectures model_type spec_name alibi "
    "use_alibi use_rope pos_emb altup_num_inputs laurel_rank logit_scale logits_scaling embedding_multiplier "
    "residual_multiplier attention_multiplier attn_type",
  ),
  (
    _SPARE,
    "last_save_model_only no_save_optim no_save_rng no_load_optim no_load_rng initial_load_model_only "
    "exclude_from_loading finetune save_safetensors always_save_checkpoint enable_first_step_checkpoint",
  ),
  (
    _PARTS,
    "use_llama_pro mixture_of_depths shift_attn lisa use_mod spectrum_top_fraction relora_prune_ratio",
  ),
  (
    _IMAGES,
    "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen audio_sampling_rate "
    "crop_to_patches image_do_pan_and_scan image_resize_algorithm media_dir video_path audio_path image_path "
    "vision_use_head",
  ),
  (
    _VERB,
    "export_dir export_size export_device export_legacy_format export_dtype infer_backend infer_dtype is_preprocess "
    "n_shot task task_dir save_dir_merged convert_checkpoint_if_possible",
  ),
  (
    _HOST,
    "enable_cpu_offload offload_param offload_params offload_folder parameter_memory_host_offload "
    "cpu_offloading_weights use_cpu_initialization init_model_with_meta_device cpu_offload offload",
  ),
  (
    _PROFILER,
    "enable_memory_snapshot record_memory_history memory_snapshot_path device_memory_monitor wall_clock_breakdown",
  ),
  (
    _FINITE,
    "abort_on_nan_loss abort_on_inf_loss check_for_nan_in_loss check_for_spiky_loss check_for_large_grads "
    "detect_anomaly terminate_on_nan grad_norm_skip_threshold skip_nan loss_watchdog_threshold loss_watchdog_patience",
  ),
  (
    _IMPLEMENTATION,
    "accelerator_config parallelism_config debug activation_checkpointing_kwargs enable_jit_checkpoint "
    "save_on_each_node restore_callback_states_from_checkpoint converters batch_invariant deterministic_warn_only "
    "gc_debug use_v1_kernels use_ray reduce_bucket_size contiguous_gradients prescale_gradients sparse_gradients "
    "gradient_predivide_factor fp16_lm_cross_entropy transformer_engine megatron_amp_o2 num_output_chunks "
    "moe_grouped_gemm auto_wrap_policy transformer_layer_cls_to_wrap moe_permute_fusion moe_token_dispatcher_type "
    "moe_shared_expert_overlap use_kernels experts_implementation",
  ),
  (
    _MAXTEXT,
    "activations_in_float32 ar_cache_axis_order async_scheduling attention_out attention_output_dim audio_placeholder "
    "autoregressive_decode_assert batch_split_factor block_diffusion_canvas_policy block_diffusion_logit_alignment "
    "block_diffusion_mask_id block_diffusion_min_noise causal_block_size check_vma checkpoint_conversion_fn "
    "chips_per_vm chunk_attn_window_size colocated_python_checkpointing colocated_python_data_input "
    "communication_overlapping_alpha compile_xla_flags compute_axis_order context_parallel_load_balance "
    "context_parallel_reorder_strategy context_parallel_strategy context_sharding cost_estimate_flops_bwd "
    "cost_estimate_flops_fwd dcn_bandwidth_burst dcn_bandwidth_interface dcn_bandwidth_latency dcn_bandwidth_limit "
    "debug_converter debug_sharding deepstack_visual_indexes_for_vit default_prompt dense_init_scale dq_reduction_steps "
    "dtype_mm enable_checkpoint_cloud_logger enable_dp_attention enable_llm_inference_pool enable_model_warmup "
    "enable_padding_causal_mask enable_prefix_caching enable_single_controller enable_tpu_profiling_options "
    "enable_tunix_perf_metrics eval_corr_lst eval_image_column eval_make_lst eval_sampling_strategy "
    "expansion_factor_real_data first_num_hash_layers force_q_layout force_unroll freeze_audio_encoder_params "
    "indexer_approx_top_k_recall indexer_cutoff_threshold indexer_mask_exact_topk indexer_use_approx_top_k "
    "input_data_sharding_logical_axes internal_compile internal_compile_num_devices jax_debug_log_modules "
    "jax_distributed_initialization_timeout kv_cache_buffer kv_proj load_from_prefill_dir local_use_splash_scheduler "
    "logical_axis_rules_for_eval math_verify_num_procs math_verify_timeout max_checkify max_inflight_computations "
    "max_num_batched_tokens max_num_seqs max_segments_per_seq mla_naive_kvcache mla_qk_head_chunk_size "
    "moe_chunk_barrier moe_dispatch_no_expert_sharding moe_expert_input_dim multi_sampling nope_layer_interval "
    "num_batches num_communication_overlapping_steps num_eval_passes num_moe_emb_chunks num_moe_token_chunks "
    "num_samplers_slices num_test_batches num_trainer_slices o_groups out_hidden_size_for_vit penalty_incorrect_answer "
    "penalty_incorrect_format per_device_batch_size_start pixel_shuffle_ratio_for_vit posemb_type_for_vit "
    "position_id_per_seconds prefix_caching_dram_byte prefix_caching_hbm_byte projector_input_dim_for_vit "
    "projector_output_dim_for_vit prometheus_port qk_norm_with_scale reasoning_end_token reasoning_start_token "
    "reasoning_start_token_in_prompt remat_policy_for_vit reshape_q return_log_prob reuse_example_batch "
    "ring_scan_unroll rope_min_timescale rope_pairwise rope_use_scale sampler_devices_fraction scan_layers_per_stage "
    "set_remat_policy_on_layers_per_stage sft_train_on_completion_only shard_optimizer_over_data sharding_tolerance "
    "skip_jax_distributed_system solution_end_token solution_start_token source_checkpoint_layout "
    "spatial_merge_size_for_vit stack_prefill_result_cache step_deviation_interval_seconds stop_strings subslice_shape "
    "swap_space_vllm_gb te_comm_gemm_overlap temperature_tuning temporal_patch_size_for_vit test_batch_start_index "
    "tile_size_for_vit tokenize_eval_data tokenize_train_data train_image_column train_micro_batch_size "
    "trainable_position_size trainer_devices_fraction ulysses_context_sharding use_chunked_prefill use_custom_sort_vjp "
    "use_gather_mosaic_kernel use_jax_splash use_max_logit_estimate use_mrope use_pathways use_qk_norm_in_gdn "
    "use_ring_of_experts use_sequential_layers use_sliced_mla_proj use_splash_scheduler use_truncation "
    "use_tunix_gradient_accumulation use_untrainable_positional_embedding video_max_grid_h video_max_grid_t "
    "video_max_grid_w video_placeholder vision_output_dim_for_vit vocab_tiling_ag_once weight_sparsity_m "
    "weight_sparsity_n weight_sparsity_start_step weight_sparsity_update_step write_estimator_result",
  ),
  (
    _IMPLEMENTATION,
    "use_liger_kernel enable_liger_kernel use_cache use_reentrant use_reentrant_gc gradient_checkpointing_kwargs "
    "deterministic deterministic_mode full_determinism group_by_length length_column_name remove_unused_columns "
    "use_unsloth use_unsloth_gc low_cpu_mem_usage torch_empty_cache_steps gc_steps gc_freq manual_gc "
    "cross_entropy_loss_fusion chunked_cross_entropy transformer_impl ring_attn_func heads_k_stride benchmark "
    "distributed_timeout_minutes ddp_timeout liger unsloth cut_cross_entropy fused_cross_entropy ring_attention ulysses",
  ),
)
"""Pairs: the rule that applies instead, and complete names."""

FAMILIES: tuple[tuple[str, str], ...] = (
  (
    _RL,
    "*_dpo dpo_* *grpo* ppo_* *_ppo kto_* *_kto orpo_* simpo_* rl_* *reward* rollout_* pref_* vllm_* *_vllm use_vllm "
    "sglang_* kl_* *_rollout num_generation* epsilon_* vespo_* sapo_* bco_* *_ref_* ref_model_* ref_adapter_* use_ref* "
    "trl",
  ),
  (
    _DISTILLATION,
    "*distill* kd_* *_kd teacher_* *_teacher_* *_teacher student_* uld_* use_uld* lmbda seq_kd",
  ),
  (
    _MTP,
    "mtp_* *_mtp num_mtp_* *_mtp_*",
  ),
  (
    _EMA,
    "ema_* *_ema swa swa_start* swa_end* swa_lr* swa_epoch* swa_freq* swa_anneal* swa_decay* swa_model* polyak_* "
    "*weight_averag*",
  ),
  (
    _ONE_RATE,
    "emb_lr embed*_lr unembed*_lr lr_emb* *head_lr lr_head* matrix_lr scalar_lr lr_a lr_b lora_lr_* vision_*_lr "
    "*encoder_lr *projector_lr bias_lr norm_lr expert_lr llrd llrd_* layer*_lr layer*_lr_decay",
  ),
  (
    _CAPACITY,
    "expert_capacity* moe_capacity* *drop_tokens *token_drop*",
  ),
  (
    _OPTIMIZERS,
    "ns_steps newton_schulz* *muon* *galore* *badam* *apollo* lisa_* dion_* soap_* optim_* grokfast_*",
  ),
  (
    _ADAPTERS,
    "*qlora* *loftq* *pissa* *corda* mora mora_* *velora* arrow_config eva_config oft_* *_oft_* *_lora *lora_* peft_* "
    "*_adapter *_adapters adapter_* ia3_* *dora* relora_*",
  ),
  (
    _NOISE,
    "*neftune* noisy_embedding_alpha",
  ),
  (
    _DROPOUT,
    "*dropout* *pdrop layerdrop stochastic_depth drop_path*",
  ),
  (
    _PART,
    "freeze_* unfreeze_*",
  ),
  (
    _PIPELINE,
    "*pipeline* pp_* num_layers_per_virtual* *virtual_stages* *_pp_*",
  ),
  (
    _TP_SEQUENCE,
    "ici_*_parallelism dcn_*_parallelism tp_comm_* *_tensor_parallel* overlap_* *fsdp* custom_mesh* ddp_* *_parallelism "
    "*_parallel_size *_parallel_degree zero_* stage3_* no_overlap_*",
  ),
  (
    _FLOAT8,
    "*fp8* *float8* *fp4* *mxfp*",
  ),
  (
    _QUANTIZATION,
    "*quantiz* *quant quant_* *_quant_* bnb_* llm_int8_* gptq* awq* load_in_*bit *_qwix_* constant_bound_config qat*",
  ),
  (
    _HUB,
    "hf_* hub_* push_* *_hub_* *_hub_token ms_hub_token *modelscope* use_hf*",
  ),
  (
    _FILES_ONLY,
    "grain_* olmo_* tfds_* train_split eval_split eval_dataset_name train_data_columns eval_data_columns "
    "max_corpus_chars dataloader_* dataset_* field_* message_* interleave_* mix_strategy data_*",
  ),
  (
    _GENERATION,
    "inference_* prefill_* decode_* maxengine_* max_prefill_* generation_* generate_* assistant_* eval_max_new_tokens "
    "*_num_beams gradio_*",
  ),
  (
    _PROFILER,
    "profil* *_profiler *_profiler_* xprof_* xplane nsys*",
  ),
  (
    _XLA_DUMP,
    "dump_hlo* dump_jaxpr* dump_step",
  ),
  (
    _METRICS,
    "*goodput* *gcs* *_gcp_* *vertex* *mldiagnostics* *heartbeat* record_internal_* monitor_* *comet* *swanlab* "
    "neptune* *trackio* metrics_file *wandb* *mlflow* log_* *_to_tensorboard tensorboard_* one_logger_* *otel_*",
  ),
  (
    _FORMATS,
    "*multi_tier* *emergency* local_checkpoint* checkpoint_storage_* checkpoint_todelete_* save_checkpoint_on_* "
    "enable_orbax* ckpt_* dist_ckpt_* non_persistent_* *_ckpt_* enable_autocheckpoint enable_continuous_checkpointing "
    "enable_single_replica* elastic_*",
  ),
  (
    "compiling ahead of time is a verb: maxtext-like compile MODEL",
    "compile_topology* compiled_trainstep_file",
  ),
  (
    _IMPLEMENTATION,
    "sa_* local_sa_* wi_tile_* wo_tile_* megablox sparse_matmul *_gmm *_gmm_* ragged_* use_ragged_* use_iota_embed "
    "use_tokamax_* fused_qkv fused_mlp shardy param_scan_axis allow_split_physical_axes optimize_mesh_* enable_nnx "
    "pure_nnx* liger_* *cuda_graph* nccl_* *_fusion fuse_* *_fused_* moe_deepep* moe_flex_* moe_hybridep_* "
    "torch_compile_* tpu_* unsloth_*",
  ),
  (
    _RAMP,
    "*rampup* *_increment batch_size_schedule",
  ),
  (
    _MAXTEXT,
    "*diloco* mhc_* *_mhc_* sinkhorn_* engram_* gdn_* *_for_audio use_audio* moba* mrope_* compress_ratios compressed_* "
    "skip_step_* attention_sink",
  ),
)
"""Pairs: the rule that applies instead, and patterns of complete names (``*`` is any text). The first match counts."""
