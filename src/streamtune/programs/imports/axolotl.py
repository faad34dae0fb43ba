"""Recipes of axolotl."""

from __future__ import annotations

import re
from typing import Any

from .axolotl_datasets import ENTRY_FIELDS, SETS, take_datasets
from .conversion import Conversion, PeerTrainer
from .field_rules import (
    FieldRule,
    UnconvertedError,
    by_itself,
    first_values,
    no_counterpart,
    optimizer,
    rope_scaling,
    same,
    special_tokens,
    split_names,
    switches,
    to,
    together,
    whole_modules,
    without,
)
from .templates import report_empty_thoughts
from .trainer_arguments import (
    CHECKPOINTING,
    KERNELS,
    TRAINER_FIELDS,
    one_loss,
    take_trackers,
    take_warmup,
)

OBJECTIVES: dict[str, tuple[str, str]] = {
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "orpo": ("dpo", "orpo"),
    "simpo": ("dpo", "simpo"),
    "kto": ("dpo", "kto"),
    "grpo": ("grpo", ""),
}
"""Value of ``rl`` -> our objective and loss."""

VLLM = "a server of vLLM is not asked: use_vllm runs vLLM in the process of the training"
VLLM_OWN = "vLLM runs in the process of the training, which says it"
IMPORTANCE = [f"trl.vllm_importance_sampling_{name}" for name in ("cap", "clip_max", "clip_min", "correction", "mode")]
HEAD = "the streamed head computes the loss in chunks"
NOT_HERE = "of an optimizer that is not here"
QUANTISED = "quantised loading of its own kind"
EVERY_ROLE = ("system", "developer", "user", "assistant", "tool")
PREPARED = "rows are prepared when the run starts"
TOKENIZER = "the tokenizer is taken as it is"


def _precision(value: Any) -> Any:
    return True if value == "auto" else value


def _functions(value: Any) -> Any:
    """Return reward functions as ``module:function``; axolotl writes ``module.function``."""
    if not isinstance(value, list):
        raise UnconvertedError("a list of functions was expected")
    return [re.sub(r"\.(\w+)$", r":\1", name) if isinstance(name, str) else name for name in value]


FIELDS: dict[str, FieldRule] = {
    **TRAINER_FIELDS,
    "optimizer": to("optim", optimizer),
    **same("base_model", "sequence_len", "micro_batch_size", "num_epochs", "lora_r", "lora_alpha"),
    **same("lora_dropout", "sample_packing", "val_set_size", "rl_beta", "rpo_alpha", "simpo_gamma", "cpo_alpha"),
    **same("dpo_label_smoothing", "kto_desirable_weight", "kto_undesirable_weight"),
    **same("eval_batch_size", "context_parallel_size", trains=False),
    "sequence_parallel_degree": to("sequence_parallel_size", trains=False),
    "lr_scheduler": to("lr_scheduler_type"),
    "orpo_alpha": to("beta", why="orpo's weight of the odds ratio is our beta"),
    "tokenizer_config": to("tokenizer", lambda name: {"path": name}),
    "bf16": to("bf16", _precision),
    "dpo_use_weighting": no_counterpart("WPO weighting of pairs"),
    "dpo_norm_loss": to("length_normalization"),
    "precompute_ref_log_probs": to("precompute_ref_log_probs", trains=False),
    "max_prompt_len": to("max_prompt_length"),
    # groups
    "trl.beta": to("beta"),
    "trl.reward_funcs": to("reward_funcs", _functions, why="code of your own: needs allow_code: true"),
    **{
        f"trl.{name}": to(name)
        for name in ("max_completion_length", "reward_weights", "num_generations", "temperature")
    },
    **{f"trl.{name}": to(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty", "num_iterations")},
    **{f"trl.{name}": to(name) for name in ("epsilon", "epsilon_high", "delta", "loss_type", "scale_rewards")},
    **{f"trl.{name}": to(name) for name in ("mask_truncated_completions", "importance_sampling_level")},
    **{f"trl.{name}": to(name) for name in ("chat_template_kwargs", "generation_batch_size")},
    **{f"trl.{name}": to(name, trains=False) for name in ("use_vllm", "vllm_gpu_memory_utilization")},
    "trl.num_completions_to_print": to("num_completions_to_print", trains=False),
    "vllm.gpu_memory_utilization": to("vllm_gpu_memory_utilization", trains=False),
    **by_itself("completions.jsonl has them", "trl.log_completions trl.log_multimodal"),
    **without(VLLM, "trl.vllm_server_host trl.vllm_server_port trl.vllm_server_timeout", trains=False),
    **without(VLLM, "trl.vllm_mode", trains=False, off=("colocate",)),
    **without(VLLM, "vllm.host vllm.port vllm.serve_module vllm.worker_extension_cls", trains=False),
    **by_itself(VLLM_OWN, "trl.vllm_device trl.vllm_dtype trl.vllm_max_model_len trl.vllm_enable_prefix_caching"),
    **by_itself(VLLM_OWN, "trl.vllm_enable_sleep_mode trl.vllm_lora_sync trl.vllm_sync_interval"),
    **by_itself(
        VLLM_OWN, "vllm.device vllm.tensor_parallel_size vllm.data_parallel_size vllm.dtype vllm.enforce_eager"
    ),
    **by_itself(VLLM_OWN, "vllm.max_model_len vllm.enable_prefix_caching vllm.enable_reasoning vllm.reasoning_parser"),
    **without("the reference stays as it is", "trl.sync_ref_model"),
    **by_itself("the reference stays as it is", "trl.ref_model_mixup_alpha trl.ref_model_sync_steps"),
    **without("a bonus on entropy", "trl.entropy_coef trl.use_adaptive_entropy"),
    **by_itself("read with entropy_coef only", "trl.entropy_coef_delta trl.entropy_coef_max trl.entropy_coef_min"),
    **by_itself("read with entropy_coef only", "trl.entropy_target"),
    **without("further settings of generation", "trl.generation_kwargs trl.vllm_guided_decoding_regex"),
    **without("code that writes completions", "trl.rollout_func"),
    "trl.multi_objective_aggregation": no_counterpart("rewards are summed", off=("sum_then_normalize",)),
    "trl.off_policy_mask_threshold": no_counterpart("a mask on tokens far from the policy that wrote them"),
    "trl.use_bias_correction_kl": no_counterpart("the corrected KL of new and old policy"),
    **by_itself("the log-probabilities of the trained model are taken", *IMPORTANCE),
    **without("completions of earlier steps", "trl.replay_buffer_size"),
    "trl.skip_zero_advantage_batches": FieldRule(why="skip_limit: such batches are drawn anew", needed=False),
    **by_itself(
        "completions are written before each batch", "trl.async_prefetch trl.prefetch_depth trl.use_data_producer"
    ),
    **by_itself("read with replay_buffer_size only", "trl.replay_recompute_logps"),
    **by_itself("groups without advantages are drawn anew", "trl.reroll_max_groups trl.reroll_start_fraction"),
    **by_itself("completions are written before each batch", "trl.streaming_min_groups trl.streaming_partial_batch"),
    **by_itself("rewards are computed by one process", "trl.reward_num_workers"),
    **by_itself(HEAD, "trl.use_liger_loss"),
    # what StreamTune does by itself
    **by_itself(KERNELS, "flash_attention", "sdp_attention", "xformers_attention", "flex_attention", "eager_attention"),
    **by_itself(
        KERNELS, "flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_qkv", "flash_attn_fuse_mlp"
    ),
    **by_itself(KERNELS, "flash_optimum", "unsloth_cross_entropy_loss", "unsloth_lora_mlp", "unsloth_lora_qkv"),
    **by_itself(KERNELS, "unsloth_lora_o", "unsloth_rms_norm", "unsloth_rope", "lora_mlp_kernel", "lora_qkv_kernel"),
    **by_itself(
        KERNELS, "lora_o_kernel", "llama4_linearized_experts", "use_kernels", "attn_implementation", "heads_k_stride"
    ),
    **by_itself(
        "the streamed head computes the loss in chunks", "liger_rope", "liger_rms_norm", "liger_glu_activation"
    ),
    **by_itself(
        "the streamed head computes the loss in chunks", "liger_layer_norm", "liger_fused_linear_cross_entropy"
    ),
    **by_itself(
        "the streamed head computes the loss in chunks",
        "liger_cross_entropy",
        "cut_cross_entropy",
        "chunked_cross_entropy",
    ),
    **by_itself(CHECKPOINTING, "layer_offloading", "tiled_mlp", "tiled_mlp_num_shards", "dpo_use_logits_to_keep"),
    **by_itself(PREPARED, "dataset_prepared_path", "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory"),
    **by_itself(
        PREPARED, "skip_prepare_dataset", "is_preprocess", "preprocess_iterable", "streaming", "axolotl_config_path"
    ),
    **by_itself(
        "packing fills every sequence as far as rows fit", "sample_packing_group_size", "sample_packing_bin_size"
    ),
    **by_itself(
        "packing fills every sequence as far as rows fit", "sample_packing_sequentially", "eval_sample_packing"
    ),
    **by_itself("packing fills every sequence as far as rows fit", "sample_packing_eff_est", "pad_to_sequence_len"),
    **by_itself("packing fills every sequence as far as rows fit", "multipack_real_batches", "batch_flattening"),
    **by_itself(
        "packing fills every sequence as far as rows fit", "pretrain_multipack_buffer_size", "pretrain_multipack_attn"
    ),
    **by_itself(
        "rows of a packed sequence never see each other", "pretraining_sample_concatenation", "micro_batch_packing"
    ),
    **by_itself(
        "the model's configuration says it", "model_type", "tokenizer_type", "processor_type", "cls_model_config"
    ),
    **by_itself(
        "the model's configuration says it", "base_model_config", "is_falcon_derived_model", "is_llama_derived_model"
    ),
    **by_itself("the model's configuration says it", "is_mistral_derived_model", "is_qwen_derived_model"),
    **by_itself("models are placed by themselves", "device", "device_map", "max_memory", "gpu_memory_limit", "ddp"),
    **by_itself("models are placed by themselves", "low_cpu_mem_usage", "lora_on_cpu", "qlora_sharded_model_loading"),
    **by_itself("models are placed by themselves", "experimental_skip_move_to_device", "gc_steps", "world_size"),
    **by_itself(TOKENIZER, "tokenizer_use_fast", "tokenizer_legacy", "tokenizer_save_jinja_files"),
    **by_itself("checkpoints are resumed by themselves", "auto_resume_from_checkpoints", "fsdp_final_state_dict_type"),
    **by_itself("recipes are always read strictly", "strict"),
    **by_itself("counted when the rows are prepared", "total_num_tokens", "total_supervised_tokens"),
    **by_itself("a token for the hub belongs in HF_TOKEN", "hf_use_auth_token"),
    **by_itself("`streamtune export` merges", "merge_lora", "merge_method"),
    **by_itself(KERNELS, "flash_attn_d512 sage_attention sdpa_varlen flex_attn_compile_kwargs fused_attn_kernel"),
    **by_itself(KERNELS, "gemma4_hybrid_attn_impl large_head_attention ring_attn_func experts_implementation"),
    **by_itself(KERNELS, "expert_backend use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels"),
    **by_itself(KERNELS, "dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel moe_bnb_fast moe_dequant_chunk_size"),
    **by_itself(KERNELS, "moe_grouped_backend lora_embedding_kernel torch_compile_options deepcompile"),
    **by_itself(HEAD, "liger_kernel_impl liger_rms_norm_gated liger_swiglu liger_use_token_scaling"),
    **by_itself(HEAD, "dpo_use_liger_kernel chunked_cross_entropy_num_chunks"),
    **by_itself(CHECKPOINTING, "selective_checkpointing tiled_mlp_use_original_mlp"),
    **by_itself(PREPARED, "num_dataset_shards_to_save sample_packing_mp_start_method streaming_multipack_buffer_size"),
    **by_itself("chunks need no padding", "pad_to_multiple_of dpo_padding_free"),
    **by_itself("models are placed by themselves", "ple_cpu_offload fsdp_version gc_collect_steps dp_shard_size"),
    **by_itself("metrics.jsonl has every step", "include_tkps"),
    **by_itself("the chat template shows which token ends a turn", "eot_tokens"),
    **by_itself("read by reward models only", "center_rewards_coefficient"),
    **by_itself("read with an optimizer that is not here only", "dion_lr dion_momentum dion_rank_fraction"),
    **by_itself("read with an optimizer that is not here only", "dion_rank_multiple_of qgalore_cos_threshold"),
    **by_itself("read with an optimizer that is not here only", "qgalore_gamma_proj qgalore_proj_bits qgalore_rank"),
    **by_itself("read with an optimizer that is not here only", "qgalore_proj_group_size qgalore_proj_quant"),
    **by_itself("read with an optimizer that is not here only", "qgalore_proj_type qgalore_queue_size qgalore_scale"),
    **by_itself("read with an optimizer that is not here only", "qgalore_update_proj_gap"),
    **by_itself("read with use_eaft only", "eaft_alpha eaft_k"),
    **by_itself("read with kd_trainer only", "kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_online_server"),
    **by_itself("read with kd_trainer only", "kd_online_server_base_url kd_online_timeout kd_online_topk"),
    **by_itself("read with kd_trainer only", "kd_temperature kd_temperature_min"),
    **by_itself("read with generate_samples only", "num_generation_samples generation_do_sample generation_top_k"),
    **by_itself("read with generate_samples only", "generation_max_new_tokens generation_prompt_ratio"),
    **by_itself("read with generate_samples only", "generation_temperature generation_top_p"),
    **by_itself("read with use_swanlab only", "swanlab_api_host swanlab_api_key swanlab_completion_log_interval"),
    **by_itself("read with use_swanlab only", "swanlab_completion_max_buffer swanlab_description swanlab_lark_secret"),
    **by_itself(
        "read with use_swanlab only", "swanlab_experiment_name swanlab_lark_webhook_url swanlab_log_completions"
    ),
    **by_itself("read with use_swanlab only", "swanlab_log_model swanlab_mode swanlab_web_host swanlab_workspace"),
    **by_itself("read with use_comet only", "comet_experiment_config comet_experiment_key comet_mode comet_online"),
    **by_itself("read with use_otel_metrics only", "otel_metrics_host otel_metrics_port"),
    **by_itself("images are not trained on", "freeze_mm_modules processor_kwargs"),
    **by_itself(
        "read with the plugin lm_eval only", "lm_eval_batch_size lm_eval_model lm_eval_post_train lm_eval_tasks"
    ),
    **by_itself("read with the plugin expert_parallel only", "expert_parallel_backend expert_parallel_token_capacity"),
    **by_itself("read with the plugin expert_parallel only", "expert_parallel_fallback_on_unsupported"),
    **by_itself("read with the plugin expert_parallel only", "expert_parallel_num_nvl_bytes"),
    **by_itself("read with the plugin expert_parallel only", "expert_parallel_num_rdma_bytes"),
    **by_itself("experts are quantised with the linear layers", "quantize_moe_experts"),
    # taken together
    **together("fsdp_config", ours="fsdp"),
    **together("rl reward_model process_reward_model", why="the objective of the recipe"),
    **together("dpo_loss_type", ours="loss_type"),
    **together("adapter", ours="finetuning_type"),
    **together("load_in_4bit load_in_8bit", ours="quantization"),
    **together("lora_target_linear lora_target_modules", ours="lora_target"),
    **together("bfloat16 float32", ours="dtype"),
    **together("chat_template chat_template_jinja", ours="chat_template"),
    **together("train_on_inputs", ours="train_on"),
    **together("batch_size", ours="train_batch_size"),
    **together("warmup_steps", ours="warmup_steps"),
    **together("warmup_ratio", ours="warmup_ratio"),
    **together("cosine_min_lr_ratio", ours="lr_scheduler_kwargs"),
    **together("use_wandb wandb_project use_mlflow mlflow_tracking_uri use_tensorboard use_trackio", ours="report_to"),
    **together("datasets pretraining_dataset", ours="datasets"),
    **together("test_datasets", ours="eval_datasets"),
    **together("excess_length_strategy", ours="overlength"),
    **together("model_config overrides_of_model_config", ours="rope_scaling"),
    **{f"{group}.{name}": rule for group in SETS for name, rule in ENTRY_FIELDS.items()},
    # lost
    "special_tokens": to("special_tokens", special_tokens),
    **{f"special_tokens.{name}": to("special_tokens") for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
    "special_tokens.additional_special_tokens": to("special_tokens"),
    **without("code of axolotl's plugins", "trainer_cls dense_mixer mora"),
    **without("an objective that is not here", "diffusion ebft hatchery nemo_gym_enabled kd_trainer"),
    **by_itself("read with the plugin nemo_gym only", "nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths"),
    **by_itself("read with the plugin nemo_gym only", "nemo_gym_datasets nemo_gym_dir nemo_gym_head_port"),
    **by_itself("read with the plugin nemo_gym only", "nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn"),
    **by_itself("read with the plugin nemo_gym only", "nemo_gym_run_timeout nemo_gym_server_timeout"),
    **by_itself("read with the plugin nemo_gym only", "nemo_gym_verify_timeout"),
    **without("a part of the layers is trained", "spectrum_top_fraction"),
    **by_itself("read with spectrum_top_fraction only", "spectrum_model_name"),
    **without("the Grokfast filter of gradients", "grokfast_alpha grokfast_lamb"),
    **without("compression while it trains", "llmcompressor qat use_onebitllms nvfp4_merge_aware"),
    **by_itself("read with nvfp4_merge_aware only", "nvfp4_merge_aware_start_step"),
    **without(QUANTISED, "dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_nonexpert_mode gemma4_fp8_nonexpert"),
    **without(QUANTISED, "gemma4_nf4_nonexpert nonexpert_quantization model_kwargs fp8_config"),
    **without("the model's attention changes", "scaling_softmax"),
    **by_itself("read with scaling_softmax only", "scaling_softmax_bias scaling_softmax_factor"),
    **without("norms in fp32; write dtype: float32 for all weights", "fp32_norms"),
    **by_itself("read with fp32_norms only", "fp32_norm_classes"),
    **without("embeddings keep the precision of the weights", "embeddings_skip_upcast", trains=False),
    **without("the EAFT loss", "use_eaft"),
    **without("a sum of several losses", "dpo_loss_weights"),
    **without("axolotl has taken it out", "max_packed_sequence_len", trains=False),
    **without("noise on embeddings", "noisy_embedding_alpha"),
    **without("masks by the borders of roles; the chat template shows them here", "role_boundaries"),
    **without("`streamtune export` quantises what was trained", "quantization", trains=False),
    **without("evaluation has the length of training", "eval_sequence_len", trains=False),
    **without("a run that is interrupted saves", "dynamic_checkpoint save_first_step", trains=False),
    **without(
        "tensors are not shared", "tensor_parallel_size dp_replicate_size expert_parallel_size", trains=False, off=(1,)
    ),
    **without("write sample: {prompt: ...}", "generate_samples dpo_generate_during_eval", trains=False),
    **without("this tracker is not here", "use_otel_metrics", trains=False),
    **without("set by the tracker's environment variables", "mlflow_run_name trackio_project_name", trains=False),
    **without("set by the tracker's environment variables", "trackio_run_name", trains=False),
    **without("`streamtune bench` measures", "profiler_steps_start", trains=False),
    **without(
        "`streamtune generate` tries a model",
        "gradio_max_new_tokens gradio_server_port gradio_temperature",
        trains=False,
    ),
    **same("lora_alpha_pattern lora_rank_pattern"),
    "rope_scaling": to("rope_scaling", rope_scaling),
    "dpo_beta": to("beta"),
    "type_of_model": FieldRule(why="the model's configuration says it", needed=False),
    "model_revision": no_counterpart("a revision of the model: download it and name its folder", off=("main",)),
    "tokens": to("added_tokens"),
    "added_tokens_overrides": no_counterpart("tokens of the tokenizer keep their text"),
    **without("the tokenizer is taken as it is", "tokenizer_use_mistral_common"),
    **without(
        "embeddings keep their size", "resize_token_embeddings_to_32x", "mean_resizing_embeddings", "shrink_embeddings"
    ),
    **without("embeddings keep their values", "fix_untrained_tokens", "reinit_weights"),
    **without("training in 8 bits floating point", "fp8", "fp8_enable_fsdp_float8_all_gather"),
    "float16": no_counterpart("weights in float16; write dtype: bfloat16"),
    "revision_of_model": no_counterpart("a revision of the model: download it and name its folder"),
    "overrides_of_model_kwargs": no_counterpart("changes of the model's configuration"),
    "model_quantization_config": no_counterpart("quantised loading of its own kind"),
    "model_quantization_config_kwargs": no_counterpart("quantised loading of its own kind"),
    "unfrozen_parameters": no_counterpart("training of named parameters only; finetuning_type takes full, lora, qlora"),
    "gptq": no_counterpart("weights quantised by GPTQ"),
    "bnb_config_kwargs": no_counterpart("settings of bitsandbytes"),
    "lora_model_dir": no_counterpart("a trained adapter to begin with: merge it first with `streamtune export`"),
    "lora_modules_to_save": to("modules_to_save", whole_modules),
    "lora_target_parameters": no_counterpart("adapters on parameters that are no linear layers"),
    "lora_fan_in_fan_out": no_counterpart("transposed weights"),
    "peft.loftq_config": FieldRule(why="read with peft_init_lora_weights: loftq only", needed=False),
    **switches("peft_use_dora", "peft_use_rslora"),
    "peft_init_lora_weights": to("adapter_type", first_values),
    **without("adapters on some layers", "peft_layers_to_transform", "peft_layers_pattern", "peft_layer_replication"),
    **without("trained tokens beside the adapters", "peft_trainable_token_indices", "peft_ensure_weight_tying"),
    **without("LoRA+: write lr_groups: [{match: lora_B, learning_rate: ...}]", "loraplus_lr_ratio"),
    **by_itself("read with loraplus_lr_ratio only", "loraplus_lr_embedding"),
    "peft_autocast_adapter_dtype": no_counterpart("adapters are trained in fp32", trains=False, off=(True,)),
    **without(
        "ReLoRA",
        "relora",
        "relora_steps",
        "relora_warmup_steps",
        "relora_anneal_steps",
        "jagged_restart_steps",
        "jagged_restart_anneal_steps",
        "jagged_restart_warmup_steps",
    ),
    **by_itself("read with relora only", "relora_prune_ratio", "relora_prune_method", "relora_cpu_offload"),
    **without("LISA", "lisa_n_layers", "lisa_step_interval", "lisa_layers_attribute"),
    **without("learning rates of groups: write lr_groups", "embedding_lr", "embedding_lr_scale", "lr_groups"),
    **without(
        "a schedule of its own",
        "lr_quadratic_warmup",
        "cosine_constant_lr_ratio",
        "lr_div_factor",
    ),
    **without("of an optimizer that is not here", "adam_epsilon2", "adam_beta3", "torchdistx_path"),
    **without("one classifier or reward model", "num_labels"),
    **without(
        "positions that are skipped", "use_pose", "pose_split_on_token_ids", "pose_max_context_len", "pose_num_chunks"
    ),
    **without("attention is exact", "s2_attention"),
    "curriculum_sampling": to("shuffle", lambda value: not value),
    **by_itself("each epoch visits the rows in another order anyway", "shuffle_merged_datasets"),
    "shuffle_before_merging_datasets": no_counterpart("rows of all datasets are shuffled together", trains=False),
    "dataset_exact_deduplication": no_counterpart("rows that are equal are all trained"),
    "min_sample_len": no_counterpart("short rows are trained as well"),
    **without("rows are not sharded", "dataset_shard_num", "dataset_shard_idx"),
    "plugins": no_counterpart("code of axolotl's plugins", trains=False),
    "early_stopping_patience": to("early_stopping_patience"),
    **without(
        "on_nan: stop ends a run whose loss is not finite",
        "loss_watchdog_threshold",
        "loss_watchdog_patience",
        trains=False,
    ),
    **without("write save_steps: N", "saves_per_epoch", trains=False),
    **without("write eval_steps: N", "evals_per_epoch", trains=False),
    **without("write sample: {prompt: ...}", "eval_table_size", "eval_max_new_tokens", trains=False),
    **without(
        "evaluation computes losses only", "do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval", trains=False
    ),
    **without("evaluation computes losses only", "bench_dataset", "bench_split", trains=False),
    "push_dataset_to_hub": no_counterpart("a run uploads nothing", trains=False),
    "profiler_steps": no_counterpart("`streamtune bench` measures", trains=False),
    **without(
        "set by the tracker's environment variables",
        "wandb_entity",
        "wandb_name",
        "wandb_run_id",
        "wandb_watch",
        trains=False,
    ),
    **without(
        "set by the tracker's environment variables", "wandb_mode", "wandb_log_model", "wandb_silent", trains=False
    ),
    **without(
        "set by the tracker's environment variables", "mlflow_experiment_name", "hf_mlflow_log_artifacts", trains=False
    ),
    **without(
        "this tracker is not here", "use_comet", "comet_project_name", "comet_workspace", "comet_api_key", trains=False
    ),
    **without("this tracker is not here", "use_swanlab", "swanlab_project", trains=False),
    **without(
        "Ray does not start runs", "use_ray", "ray_run_name", "ray_num_workers", "resources_per_worker", trains=False
    ),
    **without(
        "`streamtune generate` tries a model", "gradio_title", "gradio_share", "gradio_server_name", trains=False
    ),
    **without("images are not trained on", "image_size", "image_resize_algorithm"),
    **same("chat_template_kwargs", "default_system_message"),
}


def _objective(conversion: Conversion) -> str:
    for name in ("reward_model", "process_reward_model"):
        if conversion.get(name):
            raise conversion.refuse(name, what=f"'{name}' trains a reward model, which no command here does")
    rl = str(conversion.get("rl", ""))
    if not rl:
        return "sft"
    if rl not in OBJECTIVES:
        raise conversion.refuse("rl", what=f"'rl: {rl}' has no counterpart", mend=f"known are {', '.join(OBJECTIVES)}")
    return OBJECTIVES[rl][0]


def _special(conversion: Conversion) -> None:
    for name in ("rl", "reward_model", "process_reward_model"):
        if name in conversion.file.fields:
            value = conversion.take(name)
            loss = OBJECTIVES.get(str(value), ("", ""))[1]
            conversion.put("loss_type", loss, name) if loss else conversion.unneeded(name, why="see objective")
    losses = conversion.take("dpo_loss_type")
    if "dpo_loss_type" in conversion.file.fields:
        conversion.convert("loss_type", one_loss, losses, "dpo_loss_type")
    for name in ("overrides_of_model_config", "model_config"):
        _take_configuration(conversion, name)
    _take_adapter(conversion)
    _take_precision(conversion)
    _take_template(conversion)
    on_inputs = conversion.take("train_on_inputs")
    sharding = conversion.take("fsdp_config")
    if sharding and not conversion.get("fsdp"):
        conversion.put("fsdp", True, "fsdp_config", note="FSDP2 shards by itself", trains=False)
    elif "fsdp_config" in conversion.file.fields:
        conversion.unneeded("fsdp_config", why="FSDP2 shards by itself where fsdp: true" if sharding else "no value")
    entries = conversion.get("datasets")
    kinds = [entry.get("type") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if on_inputs and any(str(kind).startswith("chat_template") for kind in kinds):
        note = "the messages of all roles, and not what the chat template writes around them"
        conversion.put("roles_to_train", list(EVERY_ROLE), "train_on_inputs", note=note)
    elif on_inputs is not None:
        conversion.put("train_on", "all" if on_inputs else "assistant", "train_on_inputs")
    _take_batch(conversion)
    take_warmup(conversion)
    _take_least_rate(conversion)
    trackers = {"wandb_project": "wandb", "use_wandb": "wandb", "use_mlflow": "mlflow", "mlflow_tracking_uri": "mlflow"}
    take_trackers(conversion, {**trackers, "use_tensorboard": "tensorboard", "use_trackio": "trackio"})
    take_datasets(conversion)
    report_empty_thoughts(conversion)


def _take_configuration(conversion: Conversion, name: str) -> None:
    """Convert the changes of the model's configuration, of which two are keys here."""
    changes = conversion.take(name)
    for key, value in changes.items() if isinstance(changes, dict) else ():
        if key == "rope_scaling":
            conversion.convert(key, rope_scaling, value, name, key)
        elif key == "rope_theta":
            conversion.put(key, float(value) if isinstance(value, int) else value, name, key)
        else:
            conversion.lose(name, key, why="a change of the model's configuration")
    if not changes and name in conversion.file.fields:
        conversion.unneeded(name, why="no value")
    elif changes and not isinstance(changes, dict):
        conversion.lose(name, why="a table was expected")


def _take_least_rate(conversion: Conversion) -> None:
    """Convert ``cosine_min_lr_ratio``, which axolotl reads with the schedule ``cosine`` alone."""
    name = "cosine_min_lr_ratio"
    ratio = conversion.take(name)
    if name not in conversion.file.fields:
        return
    if ratio in (None, 0, ""):
        conversion.unneeded(name, why="off, as here")
    elif conversion.get("lr_scheduler", "cosine") != "cosine":
        conversion.unneeded(name, why="read with lr_scheduler: cosine only")
    elif conversion.get("cosine_constant_lr_ratio"):
        conversion.lose(name, why="with cosine_constant_lr_ratio it is a schedule of its own")
    elif conversion.put("lr_scheduler_kwargs", {"min_lr_rate": ratio}, name):
        conversion.take("lr_scheduler")
        given = "lr_scheduler" if "lr_scheduler" in conversion.file.fields else name
        conversion.put("lr_scheduler_type", "cosine_with_min_lr", given)


def _take_batch(conversion: Conversion) -> None:
    """Convert ``batch_size``, the rows of a step over all ranks, which is not what the other trainers call so."""
    total = conversion.take("batch_size")
    if total and conversion.get("gradient_accumulation_steps"):
        conversion.unneeded("batch_size", why="gradient_accumulation_steps says it")
    elif total:
        conversion.put("train_batch_size", total, "batch_size", note="rows of a step over all ranks")
    elif "batch_size" in conversion.file.fields:
        conversion.unneeded("batch_size", why="no value")


def _take_adapter(conversion: Conversion) -> None:
    adapter, four, eight = (conversion.take(name) for name in ("adapter", "load_in_4bit", "load_in_8bit"))
    given = conversion.file.fields
    if adapter in ("lora", "qlora"):
        quantised = adapter == "qlora" or four or eight
        conversion.put("finetuning_type", "qlora" if quantised else "lora", "adapter")
    elif adapter:
        conversion.lose("adapter", why="finetuning_type takes full, lora, qlora")
    elif "adapter" in given:
        conversion.put("finetuning_type", "full", "adapter")
    for name, value, bits in (("load_in_4bit", four, "nf4"), ("load_in_8bit", eight, "int8")):
        if name in given and value:
            conversion.put("quantization", bits, name)
        elif name in given:
            conversion.unneeded(name, why="off, as here")
    linear, modules = conversion.take("lora_target_linear"), conversion.take("lora_target_modules")
    if "lora_target_linear" in given:
        if linear:
            conversion.put("lora_target", "all-linear", "lora_target_linear")
        else:
            conversion.unneeded("lora_target_linear", why="off")
    if "lora_target_modules" in given:
        if linear or not modules:
            conversion.unneeded("lora_target_modules", why="all linear layers have adapters" if linear else "no value")
        elif isinstance(modules, str) and re.search(r"[\\^$*()|]", modules):
            conversion.lose("lora_target_modules", why="a pattern; list the ends of the modules' names")
        else:
            conversion.convert("lora_target", split_names, modules, "lora_target_modules")


def _take_precision(conversion: Conversion) -> None:
    """Convert the dtype of the weights: axolotl loads them in the precision that it computes in."""
    pure, whole = conversion.take("bfloat16"), conversion.take("float32")
    given = conversion.file.fields
    for name, value, dtype in (("bfloat16", pure, "bfloat16"), ("float32", whole, "float32")):
        if name in given and value:
            conversion.put("dtype", dtype, name)
        elif name in given:
            conversion.unneeded(name, why="off, as here")


def _take_template(conversion: Conversion) -> None:
    template, jinja = conversion.take("chat_template"), conversion.take("chat_template_jinja")
    given = conversion.file.fields
    if "chat_template_jinja" in given:
        if jinja:
            conversion.put("chat_template", jinja, "chat_template_jinja")
        else:
            conversion.unneeded("chat_template_jinja", why="no value")
    if "chat_template" not in given:
        return
    if template in (None, "", "tokenizer_default", "jinja"):
        conversion.unneeded("chat_template", why="the tokenizer's own template is the default")
    elif template == "chatml" and not jinja:
        conversion.put("chat_template", "chatml", "chat_template")
    elif str(template).startswith("tokenizer_default_fallback_"):
        conversion.unneeded("chat_template", why="the tokenizer's own template; without one a run stops")
    else:
        why = "the tokenizer's own template is used; where it differs, write chat_template: FILE.jinja"
        conversion.lose("chat_template", why=why)


def _defaults(conversion: Conversion) -> None:
    if conversion.objective == "sft" and conversion.ours.get("overlength") == "truncate":
        conversion.default("truncate_side", "right")
    if conversion.ours.get("overlength") == "split":
        conversion.default("split_at", "token")
    adapters = conversion.ours.get("finetuning_type") in ("lora", "qlora")
    if conversion.objective != "grpo":
        conversion.default("max_length", 512)
        conversion.default("overlength", "drop")
    if "warmup_steps" not in conversion.ours and conversion.get("lr_scheduler") != "constant":
        conversion.default("warmup_ratio", 0.03, "at most 100 steps there")
    if conversion.get("bf16", "auto") in ("auto", True) and "dtype" not in conversion.ours:
        conversion.default("bf16", True, "where the device has it")
        conversion.default("dtype", "bfloat16", "weights are loaded in the precision of the computation")
    if adapters and "lora_target" not in conversion.ours:
        conversion.missing("lora_target_modules", "unset, peft takes the attention's modules; here it is all-linear")


SIGNS = (
    "base_model sequence_len micro_batch_size num_epochs adapter sample_packing lora_target_linear val_set_size "
    "dataset_prepared_path train_on_inputs rl pad_to_sequence_len special_tokens wandb_project lr_scheduler "
    "flash_attention lora_model_dir saves_per_epoch evals_per_epoch chat_template_jinja"
)
"""Fields that no other trainer has."""

AXOLOTL = PeerTrainer(
    name="axolotl",
    title="axolotl",
    fields=FIELDS,
    signs=frozenset(SIGNS.split()),
    objective=_objective,
    special=_special,
    defaults=_defaults,
    other_defaults=frozenset(
        ["max_length", "overlength", "truncate_side", "split_at", "warmup_ratio", "bf16", "dtype"]
    ),
)
