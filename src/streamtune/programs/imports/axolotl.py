"""Convert recipes of the trainer axolotl."""

from __future__ import annotations

import re
from typing import Any

from .axolotl_datasets import ENTRY_FIELDS, SETS, convert_datasets, dataset_types
from .conversion import Conversion, PeerTrainer
from .field_rules import (
    FieldRule,
    UnconvertedError,
    convert_adapter_initialisation,
    convert_module_list,
    convert_module_names,
    convert_optimizer_name,
    convert_rope_scaling,
    convert_special_tokens,
    field_table,
    key_rule,
    negate_switch,
    no_counterpart,
    same_name_rules,
    switch_rules,
)
from .rows_and_templates import NAME_OR_FILE, convert_trained_tower, report_untrained_think_blocks, write_named_template
from .trained_parameters import convert_unfrozen_parameters
from .trainer_arguments import (
    CHECKPOINTING,
    KERNELS,
    TRAINER_FIELDS,
    convert_nll_of_simpo,
    convert_quantization_bits,
    convert_trackers,
    convert_warmup,
    report_default_targets,
    report_nll_differences,
    single_loss_name,
    write_default_truncation,
)
from .trl import GRPO_FIELDS, SERVER

OBJECTIVES: dict[str, tuple[str, str]] = {
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "orpo": ("dpo", "orpo"),
    "simpo": ("dpo", "simpo"),
    "kto": ("dpo", "kto"),
    "grpo": ("grpo", ""),
}
"""{value of axolotl's ``rl``: StreamTune's objective and loss}."""

EVERY_ROLE = ("system", "developer", "user", "assistant", "tool")


def _convert_precision(value: Any) -> Any:
    return True if value == "auto" else value


def _convert_reward_functions(value: Any) -> Any:
    """Rewrite axolotl's ``module.function`` as ``module:function``."""
    if not isinstance(value, list):
        raise UnconvertedError("reward functions must be a list of names")
    return [re.sub(r"\.(\w+)$", r":\1", name) if isinstance(name, str) else name for name in value]


FIELDS: dict[str, FieldRule] = field_table(
    {
        **TRAINER_FIELDS,
        **{f"trl.{name}": rule for name, rule in GRPO_FIELDS.items()},
        "trl.use_bias_correction_kl": key_rule("use_bias_correction_kl"),
        **{f"{group}.{name}": rule for group in SETS for name, rule in ENTRY_FIELDS.items()},
        **same_name_rules("""
            base_model sequence_len micro_batch_size num_epochs lora_r lora_alpha lora_dropout sample_packing
            val_set_size rl_beta rpo_alpha simpo_gamma cpo_alpha dpo_label_smoothing kto_desirable_weight
            kto_undesirable_weight trl.top_k trl.loss_type trl.scale_rewards trl.mask_truncated_completions
            lora_alpha_pattern lora_rank_pattern early_stopping_patience chat_template_kwargs
            default_system_message"""),
        **same_name_rules(
            "eval_batch_size context_parallel_size precompute_ref_log_probs trl.num_completions_to_print",
            changes_training=False,
        ),
        **switch_rules("peft_use_dora peft_use_rslora"),
        "optimizer": key_rule("optim", convert_optimizer_name),
        "sequence_parallel_degree": key_rule("sequence_parallel_size", changes_training=False),
        "orpo_alpha": key_rule("beta", why="StreamTune's beta is ORPO's weight of the odds ratio"),
        "tokenizer_config": key_rule("tokenizer", lambda name: {"path": name}),
        "bf16": key_rule("bf16", _convert_precision),
        "trl.reward_funcs": key_rule(
            "reward_funcs", _convert_reward_functions, why="your own code: StreamTune needs allow_code: true"
        ),
        "vllm.gpu_memory_utilization": key_rule("vllm_gpu_memory_utilization", changes_training=False),
        "special_tokens": key_rule("special_tokens", convert_special_tokens),
        "rope_scaling": key_rule("rope_scaling", convert_rope_scaling),
        "lora_modules_to_save": key_rule("modules_to_save", convert_module_list),
        "peft_init_lora_weights": key_rule("adapter_type", convert_adapter_initialisation),
        "curriculum_sampling": key_rule("shuffle", negate_switch),
        "trl.multi_objective_aggregation": no_counterpart("rewards are summed", off=("sum_then_normalize",)),
        **dict.fromkeys(
            ("tensor_parallel_size", "dp_replicate_size", "expert_parallel_size"),
            no_counterpart("StreamTune has no tensor parallelism", changes_training=False, off=(1,)),
        ),
        "model_revision": no_counterpart("download the model revision and give its folder", off=("main",)),
        "peft_autocast_adapter_dtype": no_counterpart(
            "StreamTune trains adapters in fp32", changes_training=False, off=(True,)
        ),
    },
    renamed={
        "special_tokens": """special_tokens.bos_token special_tokens.eos_token special_tokens.pad_token
            special_tokens.unk_token special_tokens.additional_special_tokens""",
        "fsdp": "fsdp_config",
        "loss_type": "dpo_loss_type",
        "finetuning_type": "adapter",
        "quantization": "load_in_4bit load_in_8bit",
        "lora_target": "lora_target_linear lora_target_modules",
        "dtype": "bfloat16 float32",
        "chat_template": "chat_template chat_template_jinja",
        "train_on": "train_on_inputs",
        "train_batch_size": "batch_size",
        "lr_scheduler_kwargs": "cosine_min_lr_ratio",
        "report_to": "use_wandb wandb_project use_mlflow mlflow_tracking_uri use_tensorboard use_trackio",
        "datasets": "datasets pretraining_dataset",
        "eval_datasets": "test_datasets",
        "overlength": "excess_length_strategy",
        "rope_scaling": "model_config overrides_of_model_config",
        "lr_scheduler_type": "lr_scheduler",
        "length_normalization": "dpo_norm_loss",
        "max_prompt_length": "max_prompt_len",
        "beta": "dpo_beta",
        "added_tokens": "tokens",
        "train": "unfrozen_parameters",
    },
    not_needed={
        "completions.jsonl records them": "trl.log_multimodal",
        "StreamTune runs vLLM in the training process and sets this value itself": """trl.vllm_device trl.vllm_dtype
            trl.vllm_max_model_len trl.vllm_enable_prefix_caching trl.vllm_enable_sleep_mode trl.vllm_lora_sync
            trl.vllm_sync_interval vllm.device vllm.tensor_parallel_size vllm.data_parallel_size vllm.dtype
            vllm.enforce_eager vllm.max_model_len vllm.enable_prefix_caching vllm.enable_reasoning
            vllm.reasoning_parser""",
        "StreamTune does not update the reference model": "trl.ref_model_mixup_alpha trl.ref_model_sync_steps",
        "used only with entropy_coef": """trl.entropy_coef_delta trl.entropy_coef_max trl.entropy_coef_min
            trl.entropy_target""",
        "StreamTune takes log-probabilities from the trained model, not vLLM": """
            trl.vllm_importance_sampling_cap trl.vllm_importance_sampling_clip_max trl.vllm_importance_sampling_clip_min
            trl.vllm_importance_sampling_correction trl.vllm_importance_sampling_mode""",
        "StreamTune replaces batches without a gradient; see skip_limit": "trl.skip_zero_advantage_batches",
        "StreamTune generates completions before each batch": """trl.async_prefetch trl.prefetch_depth
            trl.use_data_producer trl.streaming_min_groups trl.streaming_partial_batch""",
        "used only with replay_buffer_size": "trl.replay_recompute_logps",
        "StreamTune samples groups without advantages again": "trl.reroll_max_groups trl.reroll_start_fraction",
        "StreamTune computes rewards in one process": "trl.reward_num_workers",
        "StreamTune computes the loss of the LM head in chunks": """trl.use_liger_loss liger_rope liger_rms_norm
            liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy
            chunked_cross_entropy liger_kernel_impl liger_rms_norm_gated liger_swiglu liger_use_token_scaling
            dpo_use_liger_kernel chunked_cross_entropy_num_chunks""",
        KERNELS: """flash_attention sdp_attention xformers_attention flex_attention eager_attention
            flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum
            unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope
            lora_mlp_kernel lora_qkv_kernel lora_o_kernel llama4_linearized_experts use_kernels heads_k_stride
            flash_attn_d512 sage_attention sdpa_varlen flex_attn_compile_kwargs fused_attn_kernel
            gemma4_hybrid_attn_impl large_head_attention ring_attn_func experts_implementation expert_backend
            use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels dsv4_fp8_lora_kernel
            dsv4_shared_mlp_lora_kernel moe_bnb_fast moe_dequant_chunk_size moe_grouped_backend lora_embedding_kernel
            torch_compile_options deepcompile""",
        CHECKPOINTING: """layer_offloading tiled_mlp tiled_mlp_num_shards dpo_use_logits_to_keep selective_checkpointing
            tiled_mlp_use_original_mlp""",
        "StreamTune prepares rows when the run starts": """dataset_prepared_path dataset_processes dataset_num_proc
            dataset_keep_in_memory skip_prepare_dataset is_preprocess preprocess_iterable streaming axolotl_config_path
            num_dataset_shards_to_save sample_packing_mp_start_method streaming_multipack_buffer_size""",
        "StreamTune packs as many rows as fit into each sequence": """sample_packing_group_size sample_packing_bin_size
            sample_packing_sequentially eval_sample_packing sample_packing_eff_est pad_to_sequence_len
            multipack_real_batches batch_flattening pretrain_multipack_buffer_size pretrain_multipack_attn""",
        "StreamTune's packed rows never attend to each other": "pretraining_sample_concatenation micro_batch_packing",
        "StreamTune reads this from the model's configuration": """model_type tokenizer_type processor_type
            cls_model_config base_model_config is_falcon_derived_model is_llama_derived_model is_mistral_derived_model
            is_qwen_derived_model type_of_model""",
        "models are placed automatically": """device device_map max_memory gpu_memory_limit ddp low_cpu_mem_usage
            lora_on_cpu qlora_sharded_model_loading experimental_skip_move_to_device gc_steps world_size ple_cpu_offload
            fsdp_version gc_collect_steps dp_shard_size""",
        "StreamTune uses the tokenizer unchanged": "tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files",
        "checkpoints are resumed automatically": "auto_resume_from_checkpoints fsdp_final_state_dict_type",
        "StreamTune always refuses unknown keys of a recipe": "strict",
        "StreamTune counts tokens when it prepares the rows": "total_num_tokens total_supervised_tokens",
        "put the token of the Hugging Face hub into HF_TOKEN": "hf_use_auth_token",
        "`streamtune export` merges": "merge_lora merge_method",
        "chunks need no padding": "pad_to_multiple_of dpo_padding_free",
        "metrics.jsonl has every step": "include_tkps",
        "StreamTune takes the end-of-turn token from the chat template": "eot_tokens",
        "only reward models use this field": "center_rewards_coefficient",
        "only optimizers that StreamTune lacks use this field": """dion_lr dion_momentum dion_rank_fraction
            dion_rank_multiple_of qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_rank
            qgalore_proj_group_size qgalore_proj_quant qgalore_proj_type qgalore_queue_size qgalore_scale
            qgalore_update_proj_gap""",
        "used only with use_eaft": "eaft_alpha eaft_k",
        "used only with kd_trainer": """kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_online_server
            kd_online_server_base_url kd_online_timeout kd_online_topk kd_temperature kd_temperature_min""",
        "used only with generate_samples": """num_generation_samples generation_do_sample generation_top_k
            generation_max_new_tokens generation_prompt_ratio generation_temperature generation_top_p""",
        "used only with use_swanlab": """swanlab_api_host swanlab_api_key swanlab_completion_log_interval
            swanlab_completion_max_buffer swanlab_description swanlab_lark_secret swanlab_experiment_name
            swanlab_lark_webhook_url swanlab_log_completions swanlab_log_model swanlab_mode swanlab_web_host
            swanlab_workspace""",
        "used only with use_comet": "comet_experiment_config comet_experiment_key comet_mode comet_online",
        "used only with use_otel_metrics": "otel_metrics_host otel_metrics_port",
        "set in preprocessor_config.json of the model": "processor_kwargs",
        "StreamTune freezes them, unless freeze_vision_tower or freeze_projector is false": "freeze_mm_modules",
        "used only with axolotl's plugin lm_eval": "lm_eval_batch_size lm_eval_model lm_eval_post_train lm_eval_tasks",
        "used only with axolotl's plugin expert_parallel": """expert_parallel_backend expert_parallel_token_capacity
            expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes""",
        "StreamTune quantises experts together with the linear layers": "quantize_moe_experts",
        "StreamTune's objective (sft, dpo or grpo) sets this": "rl reward_model process_reward_model",
        "used only with axolotl's plugin nemo_gym": """nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths
            nemo_gym_datasets nemo_gym_dir nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn
            nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_verify_timeout""",
        "used only with spectrum_top_fraction": "spectrum_model_name",
        "used only with nvfp4_merge_aware": "nvfp4_merge_aware_start_step",
        "used only with scaling_softmax": "scaling_softmax_bias scaling_softmax_factor",
        "used only with fp32_norms": "fp32_norm_classes",
        "axolotl reads this field only with peft_init_lora_weights: loftq": "peft.loftq_config",
        "used only with loraplus_lr_ratio": "loraplus_lr_embedding",
        "used only with relora": "relora_prune_ratio relora_prune_method relora_cpu_offload",
        "StreamTune shuffles the rows in each epoch anyway": "shuffle_merged_datasets",
    },
    lost={
        "WPO weighting of pairs": "dpo_use_weighting",
        "an entropy bonus": "trl.entropy_coef trl.use_adaptive_entropy",
        "other generation settings": "trl.generation_kwargs trl.vllm_guided_decoding_regex",
        "code that generates completions": "trl.rollout_func",
        "StreamTune has no mask on off-policy tokens": "trl.off_policy_mask_threshold",
        "completions of earlier steps": "trl.replay_buffer_size",
        "code of axolotl's plugins": "trainer_cls dense_mixer mora",
        "an unsupported objective": "diffusion ebft hatchery nemo_gym_enabled kd_trainer",
        "list the layers that Spectrum chooses in train": "spectrum_top_fraction",
        "StreamTune has no Grokfast filter of gradients": "grokfast_alpha grokfast_lamb",
        "compression during training": "llmcompressor qat use_onebitllms nvfp4_merge_aware",
        "StreamTune quantises only to nf4 and int8": """dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_nonexpert_mode
            gemma4_fp8_nonexpert gemma4_nf4_nonexpert nonexpert_quantization model_kwargs fp8_config
            model_quantization_config model_quantization_config_kwargs""",
        "StreamTune does not change the model's attention": "scaling_softmax",
        "norms alone in fp32 are not supported; write dtype: float32 for all weights": "fp32_norms",
        "the EAFT loss": "use_eaft",
        "a sum of several losses is not supported; StreamTune takes one loss_type": "dpo_loss_weights",
        "noise on embeddings": "noisy_embedding_alpha",
        "StreamTune masks turns by the chat template, not by role boundaries": "role_boundaries",
        "tokens cannot be renamed": "added_tokens_overrides",
        "StreamTune uses the tokenizer unchanged": "tokenizer_use_mistral_common",
        "embeddings are not resized": "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings",
        "embeddings are not reinitialised": "fix_untrained_tokens reinit_weights",
        "training in fp8": "fp8 fp8_enable_fsdp_float8_all_gather",
        "StreamTune needs fp16: true, which scales the loss, to compute in float16": "float16",
        "download the model revision and give its folder": "revision_of_model",
        "StreamTune does not change the model's configuration": "overrides_of_model_kwargs",
        "weights quantised by GPTQ": "gptq",
        "settings of bitsandbytes": "bnb_config_kwargs",
        "the importer converts no trained adapters: merge the adapter first with `streamtune export`": "lora_model_dir",
        "StreamTune adapts only linear layers, not other parameters": "lora_target_parameters",
        "transposed weights": "lora_fan_in_fan_out",
        "adapters on some layers": "peft_layers_to_transform peft_layers_pattern peft_layer_replication",
        "token embeddings trained beside the adapters": "peft_trainable_token_indices peft_ensure_weight_tying",
        "for LoRA+, write lr_groups: [{match: lora_B, learning_rate: ...}]": "loraplus_lr_ratio",
        "ReLoRA": """relora relora_steps relora_warmup_steps relora_anneal_steps jagged_restart_steps
            jagged_restart_anneal_steps jagged_restart_warmup_steps""",
        "LISA": "lisa_n_layers lisa_step_interval lisa_layers_attribute",
        "for learning rates of parameter groups, write lr_groups": "embedding_lr embedding_lr_scale lr_groups",
        "an unsupported schedule": "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor",
        "only optimizers that StreamTune lacks take this argument": "adam_epsilon2 adam_beta3 torchdistx_path",
        "StreamTune trains no classifiers or reward models": "num_labels",
        "skipped positions (PoSE)": "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks",
        "StreamTune does not support sparse attention": "s2_attention",
        "duplicate rows are trained": "dataset_exact_deduplication",
        "StreamTune trains short rows too": "min_sample_len",
        "rows are not sharded": "dataset_shard_num dataset_shard_idx",
        "images are scaled by the model's processor; see max_pixels": "image_size image_resize_algorithm",
    },
    lost_without_effect={
        SERVER: "vllm.host vllm.port vllm.serve_module vllm.worker_extension_cls",
        "StreamTune keeps embeddings in the precision of the weights": "embeddings_skip_upcast",
        "axolotl has removed this field": "max_packed_sequence_len",
        "to quantise the trained model, use `streamtune export --gguf`": "quantization",
        "StreamTune evaluates at the training length": "eval_sequence_len",
        "StreamTune saves a checkpoint of an interrupted run": "dynamic_checkpoint save_first_step",
        "write sample: {prompt: ...}": "generate_samples dpo_generate_during_eval eval_table_size eval_max_new_tokens",
        "StreamTune does not support this tracker": """use_otel_metrics use_comet comet_project_name comet_workspace
            comet_api_key use_swanlab swanlab_project""",
        "set this with the tracker's environment variables": """mlflow_run_name trackio_project_name trackio_run_name
            wandb_entity wandb_name wandb_run_id wandb_watch wandb_mode wandb_log_model wandb_silent
            mlflow_experiment_name hf_mlflow_log_artifacts""",
        "`streamtune bench` measures": "profiler_steps_start profiler_steps",
        "use `streamtune generate` to try a model": """gradio_max_new_tokens gradio_server_port gradio_temperature
            gradio_title gradio_share gradio_server_name""",
        "StreamTune shuffles the rows of all datasets together": "shuffle_before_merging_datasets",
        "code of axolotl's plugins": "plugins",
        "on_nan: stop ends a run whose loss is not finite": "loss_watchdog_threshold loss_watchdog_patience",
        "write save_steps: N": "saves_per_epoch",
        "write eval_steps: N": "evals_per_epoch",
        "evaluation computes losses only": """do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset
            bench_split""",
        "a run uploads nothing": "push_dataset_to_hub",
        "Ray is not supported": "use_ray ray_run_name ray_num_workers resources_per_worker",
    },
)


def _choose_objective(conversion: Conversion) -> str:
    for name in ("reward_model", "process_reward_model"):
        if conversion.get(name):
            raise conversion.import_error(name, what=f"'{name}' trains a reward model, which StreamTune cannot")
    rl = str(conversion.get("rl", ""))
    if not rl:
        return "sft"
    if rl not in OBJECTIVES:
        raise conversion.import_error(
            "rl", what=f"StreamTune has no objective for 'rl: {rl}'", fix=f"known are {', '.join(OBJECTIVES)}"
        )
    return OBJECTIVES[rl][0]


def _convert_dependent_fields(conversion: Conversion) -> None:
    for name in ("rl", "reward_model", "process_reward_model"):
        if loss := OBJECTIVES.get(str(conversion.get(name)), ("", ""))[1]:
            conversion.write_key("loss_type", loss, name)
        conversion.mark_unneeded(name, why="see objective")
    if conversion.ours.get("loss_type") == "simpo":
        convert_nll_of_simpo(conversion)
    if conversion.get("rl_beta") is not None:
        conversion.mark_unneeded("orpo_alpha", why="axolotl reads this field only without rl_beta")
    policy = conversion.get("trl")
    if isinstance(policy, dict) and "use_bias_correction_kl" in policy and not policy.get("beta"):
        conversion.left["trl"] = {key: value for key, value in policy.items() if key != "use_bias_correction_kl"}
        conversion.report_unneeded("trl", "use_bias_correction_kl", why="used only with trl.beta")
    if "dpo_loss_type" in conversion.left:
        loss = conversion.pop_field("dpo_loss_type")
        conversion.convert_key("loss_type", single_loss_name, loss, "dpo_loss_type", replaces=True)
    for name in ("overrides_of_model_config", "model_config"):
        _convert_model_overrides(conversion, name)
    _convert_adapter(conversion)
    convert_unfrozen_parameters(conversion)
    if conversion.get("fp16") and conversion.get("bf16") == "auto":
        conversion.mark_unneeded("bf16", why="set by fp16")
    # axolotl loads the weights in the precision that it computes in
    conversion.write_if_on("bfloat16", "dtype", "bfloat16")
    conversion.write_if_on("float32", "dtype", "float32")
    _convert_chat_template(conversion)
    on_inputs = conversion.pop_field("train_on_inputs")
    sharding = conversion.get("fsdp_config")
    if sharding and not conversion.get("fsdp"):
        conversion.write_key("fsdp", True, "fsdp_config", note="FSDP2 shards automatically", changes_training=False)
    conversion.mark_unneeded(
        "fsdp_config", why="StreamTune's fsdp: true shards automatically with FSDP2" if sharding else "no value"
    )
    if on_inputs and any(str(kind).startswith("chat_template") for kind in dataset_types(conversion)):
        note = "StreamTune trains on messages of all roles, but not on the chat template's text around messages"
        conversion.write_key("roles_to_train", list(EVERY_ROLE), "train_on_inputs", note=note)
    elif on_inputs is not None:
        conversion.write_key("train_on", "all" if on_inputs else "assistant", "train_on_inputs")
    _convert_batch_size(conversion)
    convert_warmup(conversion)
    _convert_min_learning_rate(conversion)
    trackers = {"wandb_project": "wandb", "use_wandb": "wandb", "use_mlflow": "mlflow", "mlflow_tracking_uri": "mlflow"}
    convert_trackers(conversion, {**trackers, "use_tensorboard": "tensorboard", "use_trackio": "trackio"})
    convert_datasets(conversion)
    convert_trained_tower(conversion, "lora_target_linear")
    report_untrained_think_blocks(conversion, dataset_types(conversion))
    if not on_inputs:
        _report_trained_prompts(conversion)


ROLE_BOUNDARIES = [
    "qwen2_vl",
    "qwen3_5",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "llama3_2_vision",
    "pixtral",
    "mistral_v7_tekken",
]
"""Values of ``chat_template`` with which axolotl 0.19 finds the answers in rows with images."""


def _report_trained_prompts(conversion: Conversion) -> None:
    """Report a recipe with images for whose chat template axolotl trains every token."""
    given = conversion.file.fields
    template = given.get("chat_template") or "tokenizer_default"
    if given.get("processor_type") and template not in ROLE_BOUNDARIES and not given.get("role_boundaries"):
        conversion.report_lost_setting(
            f"chat_template: {template}",
            "with images, axolotl trains prompts too for this template, except with GLM-4V, InternVL and SmolVLM; "
            "StreamTune trains the answers",
        )


def _convert_model_overrides(conversion: Conversion, name: str) -> None:
    """Convert the RoPE settings among overrides of the model's configuration; report all others as not converted."""
    changes = conversion.pop_field(name)
    for key, value in changes.items() if isinstance(changes, dict) else ():
        if key == "rope_scaling":
            conversion.convert_key(key, convert_rope_scaling, value, name, key)
        elif key == "rope_theta":
            conversion.write_key(key, float(value) if isinstance(value, int) else value, name, key)
        else:
            conversion.report_lost(name, key, why="StreamTune does not change this value of the model's configuration")
    if not changes and name in conversion.file.fields:
        conversion.report_unneeded(name, why="no value")
    elif changes and not isinstance(changes, dict):
        conversion.report_lost(name, why="expected a mapping")


def _convert_min_learning_rate(conversion: Conversion) -> None:
    """Convert ``cosine_min_lr_ratio``, which axolotl uses only with the schedule ``cosine``."""
    name = "cosine_min_lr_ratio"
    if name not in conversion.left:
        return
    ratio = conversion.pop_field(name)
    if ratio in (None, 0, ""):
        conversion.report_unneeded(name, why="off, as in StreamTune")
    elif conversion.get("lr_scheduler", "cosine") != "cosine":
        conversion.report_unneeded(name, why="axolotl reads this field only with lr_scheduler: cosine")
    elif conversion.get("cosine_constant_lr_ratio"):
        conversion.report_lost(name, why="StreamTune has no cosine schedule with cosine_constant_lr_ratio")
    elif conversion.write_key("lr_scheduler_kwargs", {"min_lr_rate": ratio}, name):
        given = "lr_scheduler" if "lr_scheduler" in conversion.left else name
        conversion.pop_field("lr_scheduler")
        conversion.write_key("lr_scheduler_type", "cosine_with_min_lr", given)


def _convert_batch_size(conversion: Conversion) -> None:
    """Convert axolotl's ``batch_size``: the number of rows in an optimizer step, over all ranks."""
    total = conversion.get("batch_size")
    if total and not conversion.get("gradient_accumulation_steps"):
        conversion.write_key(
            "train_batch_size", total, "batch_size", note="axolotl's batch_size is the total of all ranks"
        )
    conversion.mark_unneeded("batch_size", why="set by gradient_accumulation_steps" if total else "no value")


def _convert_adapter(conversion: Conversion) -> None:
    quantised = conversion.get("load_in_4bit") or conversion.get("load_in_8bit")
    if "adapter" in conversion.left:
        adapter = conversion.pop_field("adapter")
        if adapter and adapter not in ("lora", "qlora"):
            conversion.report_lost("adapter", why="finetuning_type is full, lora or qlora")
        else:
            kind = "qlora" if quantised and adapter else adapter or "full"
            conversion.write_key("finetuning_type", kind, "adapter")
    convert_quantization_bits(conversion)
    linear = conversion.get("lora_target_linear")
    conversion.write_if_on("lora_target_linear", "lora_target", "all-linear", why="off")
    if "lora_target_modules" in conversion.left:
        modules = conversion.pop_field("lora_target_modules")
        if linear or not modules:
            conversion.report_unneeded(
                "lora_target_modules", why="lora_target_linear adapts all linear layers" if linear else "no value"
            )
        elif isinstance(modules, str) and re.search(r"[\\^$*()|]", modules):
            conversion.report_lost(
                "lora_target_modules",
                why="write the ends of module names, such as q_proj, or patterns of ends",
            )
        else:
            conversion.convert_key("lora_target", convert_module_names, modules, "lora_target_modules")


def _convert_chat_template(conversion: Conversion) -> None:
    template, jinja = conversion.get("chat_template"), conversion.get("chat_template_jinja")
    conversion.write_if_on("chat_template_jinja", "chat_template", jinja, why="no value")
    if template in (None, "tokenizer_default", "jinja"):
        conversion.mark_unneeded("chat_template", why="StreamTune uses the tokenizer's own template by default")
    elif str(template).startswith("tokenizer_default_fallback_"):
        conversion.mark_unneeded(
            "chat_template", why="StreamTune uses the tokenizer's own template; without one, the run stops"
        )
    elif jinja or not write_named_template(conversion, template, "chat_template"):
        why = f"StreamTune uses the tokenizer's own template; if it differs, {NAME_OR_FILE}"
        conversion.report_lost("chat_template", why=why)


def _write_trainer_defaults(conversion: Conversion) -> None:
    write_default_truncation(conversion)
    if conversion.objective == "grpo":
        conversion.write_default("per_device_train_batch_size", 1)
    else:
        conversion.write_default("max_length", 512)
        conversion.write_default("overlength", "drop")
    if "warmup_steps" not in conversion.ours and conversion.get("lr_scheduler") != "constant":
        conversion.write_default("warmup_ratio", 0.03, "axolotl limits warm-up to 100 steps")
    if conversion.ours.get("fp16") and "dtype" not in conversion.ours:
        adapters = conversion.ours.get("finetuning_type", "full") != "full"
        note = "axolotl loads weights in the compute dtype" if adapters else "float16 weights cannot be trained"
        conversion.write_default("dtype", "float16" if adapters else "float32", note)
    elif conversion.get("bf16", "auto") in ("auto", True) and "dtype" not in conversion.ours:
        conversion.write_default("bf16", True, "axolotl uses bf16 if the device supports it")
        conversion.write_default("dtype", "bfloat16", "axolotl loads weights in the compute dtype")
    report_default_targets(conversion)
    report_nll_differences(conversion)


AXOLOTL = PeerTrainer(
    name="axolotl",
    title="axolotl",
    fields=FIELDS,
    signs="""base_model sequence_len micro_batch_size num_epochs adapter sample_packing lora_target_linear val_set_size
        dataset_prepared_path train_on_inputs rl pad_to_sequence_len special_tokens wandb_project lr_scheduler
        flash_attention lora_model_dir saves_per_epoch evals_per_epoch chat_template_jinja""",
    objective=_choose_objective,
    special=_convert_dependent_fields,
    defaults=_write_trainer_defaults,
)
