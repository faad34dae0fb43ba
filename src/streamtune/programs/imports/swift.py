"""Convert recipes of ms-swift: a command ``swift sft``, ``swift pt`` or ``swift rlhf``, or a file of its arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .conversion import Conversion, PeerTrainer
from .field_rules import (
    FieldRule,
    convert_adapter_initialisation,
    convert_additional_special_tokens,
    convert_module_list,
    convert_module_names,
    convert_rope_scaling,
    dft_if_on,
    field_table,
    key_rule,
    lookup_converter,
    no_counterpart,
    none_if_empty,
    same_name_rules,
)
from .rows_and_templates import convert_swift_template, first_local_row, rows_have_images
from .swift_datasets import convert_datasets
from .trained_parameters import convert_frozen_parameters, convert_tower
from .trainer_arguments import (
    CHECKPOINTING,
    KERNELS,
    TRAINER_FIELDS,
    convert_nll_of_simpo,
    convert_thinking,
    convert_trackers,
    convert_warmup,
    report_nll_differences,
    write_default_truncation,
)
from .trl import SERVER, SHARED_FIELDS, convert_weights_dtype

OBJECTIVES: dict[str, tuple[str, str]] = {
    "dpo": ("dpo", "sigmoid"),
    "orpo": ("dpo", "orpo"),
    "simpo": ("dpo", "simpo"),
    "kto": ("dpo", "kto"),
    "cpo": ("dpo", "cpo"),
    "grpo": ("grpo", "grpo"),
}
"""{ms-swift's ``rlhf_type``: StreamTune's objective and default loss}."""

NEAREST = {"accuracy": "numeric_answer", "format": "format_tags"}
"""{reward function of ms-swift: most similar reward function of StreamTune}."""

ROWS_PER_STEP = 16
"""Number of rows in an optimizer step if ``gradient_accumulation_steps`` is not given; of completions for grpo."""

TUNER = ("tuner_type", "train_type", "sft_type")
"""Names of one field of ms-swift, from the newest release to the oldest."""


KINDS = ("vera", "ia3")
"""Tuners of ms-swift that are values of StreamTune's ``adapter_type``."""


def _convert_reward_functions(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    return [NEAREST.get(name, f"REWARDS.py:{name}") if isinstance(name, str) else name for name in names]


FIELDS: dict[str, FieldRule] = field_table(
    {
        **TRAINER_FIELDS,
        **SHARED_FIELDS,
        **same_name_rules("""lora_rank chat_template"""),
        **same_name_rules("sequence_parallel_size", changes_training=False),
        "max_pixels": key_rule(
            "max_pixels", why="ms-swift scales with bilinear interpolation, StreamTune with bicubic"
        ),
        "target_modules": key_rule("lora_target", convert_module_names),
        "truncation_strategy": key_rule(
            "overlength",
            lookup_converter(
                {"delete": "drop", "right": "truncate", "split": "split"}, "StreamTune truncates longer rows at the end"
            ),
        ),
        "loss_scale": key_rule(
            "train_on",
            lookup_converter(
                {"default": "assistant", "last_round": "last", "all": "all"},
                "StreamTune has no token weights; train_on is assistant, completion, last or all",
            ),
        ),
        "rpo_alpha": key_rule("rpo_alpha", none_if_empty),
        "loss_type": key_rule(
            "loss_type", lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value
        ),
        "reward_funcs": key_rule("reward_funcs", _convert_reward_functions),
        "scale_rewards": key_rule(
            "scale_rewards",
            lookup_converter({True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}),
        ),
        "new_special_tokens": key_rule("special_tokens", convert_additional_special_tokens),
        "rope_scaling": key_rule("rope_scaling", convert_rope_scaling),
        "modules_to_save": key_rule("modules_to_save", convert_module_list),
        "init_weights": key_rule("adapter_type", convert_adapter_initialisation),
        "init_lora_weights": key_rule("adapter_type", convert_adapter_initialisation),
        "enable_dft_loss": key_rule("loss_type", dft_if_on),
        "is_binary_loss_scale": no_counterpart("StreamTune weights tokens in the loss by 1 or 0", off=(True,)),
        "add_non_thinking_prefix": no_counterpart(
            "StreamTune keeps text that the chat template adds before an answer", off=(True,)
        ),
        "advantage_reweight": no_counterpart("an unsupported advantage estimator", off=("none",)),
        "kl_in_reward": no_counterpart("an unsupported advantage estimator", off=("none",)),
        "advantage_estimator": no_counterpart("for RLOO advantages, write loss_type: rloo", off=("grpo",)),
        "model_revision": no_counterpart("download the model revision and give its folder", off=("master", "main")),
        "use_chat_template": no_counterpart("StreamTune renders rows of messages with the chat template", off=(True,)),
        "deepspeed_autotp_size": no_counterpart(
            "StreamTune has no tensor parallelism", changes_training=False, off=(1,)
        ),
    },
    renamed={
        "finetuning_type": "tuner_type train_type sft_type",
        "freeze_vision_tower": "freeze_vit",
        "freeze_projector": "freeze_aligner",
        "freeze": "freeze_parameters freeze_parameters_regex freeze_parameters_ratio",
        "train": "trainable_parameters trainable_parameters_regex additional_trainable_parameters",
        "model_name_or_path": "model model_id_or_path",
        "quantization": "quant_bits quant_method",
        "datasets": "dataset columns interleave_prob",
        "eval_datasets": "val_dataset",
        "chat_template_kwargs": "enable_thinking preserve_thinking",
        "train_on": "template_backend",
        "val_size": "split_dataset_ratio",
        "ref_model_name_or_path": "ref_model",
        "mask_truncated_completions": "overlong_filter",
        "early_stopping_patience": "early_stop_interval",
        "default_system": "system",
        "shuffle": "train_dataloader_shuffle",
    },
    not_needed={
        "StreamTune's objective (sft, dpo or grpo) sets this": "rlhf_type",
        "StreamTune looks up names on the Hugging Face hub": "use_hf",
        "StreamTune runs vLLM in the training process": """vllm_data_parallel_size vllm_pipeline_parallel_size
            vllm_disable_cascade_attn vllm_engine_kwargs vllm_enable_expert_parallel vllm_enable_lora vllm_max_lora_rank
            vllm_mm_processor_cache_gb vllm_quantization vllm_reasoning_parser vllm_speculative_config
            vllm_use_async_engine enable_flattened_weight_sync local_rollout_forward_batch_size offload_teacher_model
            vllm_enforce_eager vllm_enable_prefix_caching vllm_max_num_seqs vllm_limit_mm_per_prompt
            vllm_disable_custom_all_reduce sleep_level offload_model offload_optimizer move_model_batches async_generate
            gc_collect_after_offload""",
        "StreamTune reads this from the model's configuration": """ref_model_type reward_model_type teacher_model_type
            model_type task_type local_repo_path load_args""",
        "models are placed automatically": """enable_npu_model_patch ds3_gather_for_generation device_map max_memory
            ignore_args_error check_model create_checkpoint_symlink""",
        "used only in evaluation": """eval_metric generation_config generation_max_length generation_num_beams
            num_generations_eval max_new_tokens num_beams stream stop_words logprobs top_logprobs eval_use_evalscope
            eval_dataset eval_dataset_args eval_limit eval_generation_config extra_eval_args response_prefix""",
        "StreamTune shuffles rows by 'seed'; packing: true avoids padding": "sortish_sampler",
        "StreamTune packs as many rows as fit into each sequence": "packing_strategy",
        "checkpoints are sharded safetensors": "max_shard_size safe_serialization use_flash_ckpt",
        "metrics.jsonl has every step": """log_rollout_offpolicy_metrics wandb_log_unique_prompts acc_strategy
            logging_dir""",
        "ms-swift reads this field only with another tuner": """adalora_beta1 adalora_beta2 adalora_deltaT
            adalora_orth_reg_weight adalora_tfinal adalora_tinit boft_block_num boft_dropout boft_n_butterfly_factor
            fourier_scaling galore_cos_threshold galore_gamma_proj galore_optim_per_parameter galore_proj_bits
            galore_proj_group_size galore_proj_quant galore_quantization galore_queue_size galore_with_embedding
            reft_args reft_intervention_type reft_layer_key reft_layers vera_d_initial vera_dropout
            vera_projection_prng_key lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale
            lora_ga_stable_gamma galore_rank galore_target_modules galore_update_proj_gap galore_scale galore_proj_type
            lisa_step_interval adalora_target_r adalora_init_r llamapro_num_new_blocks llamapro_num_groups reft_rank
            boft_block_size vera_rank fourier_n_frequency adapter_act adapter_length""",
        "used only by PPO": """cliprange cliprange_value gamma kl_coef lam num_mini_batches num_ppo_epochs
            num_sample_generations response_length vf_coef whiten_rewards missing_eos_penalty""",
        "only reward models use this field": "center_rewards_coefficient mrl_dims",
        "used only with ms-swift's rlhf_type: gkd": """gkd_logits_topk lmbda seq_kd sft_alpha teacher_adapters
            teacher_deepspeed teacher_kl_coef teacher_model_revision teacher_model_server teacher_tag_key
            teacher_model""",
        "ms-swift reads this field only with another loss": """discopop_tau real_tau tau_neg tau_pos fipo_clip_high_only
            fipo_clip_range fipo_decay_rate fipo_safety_threshold rlsd_lambda rlsd_lambda_decay_steps
            rlsd_lambda_warmup_steps rlsd_negative_only rlsd_reweight_clip_range sdar_gate_beta""",
        "only ms-swift's reward functions use this field": """cosine_max_len cosine_max_len_value_correct
            cosine_max_len_value_wrong cosine_min_len_value_correct cosine_min_len_value_wrong repetition_max_penalty
            repetition_n_grams""",
        "used only with sync_ref_model": "ref_model_mixup_alpha ref_model_sync_steps",
        "used only with chord_mu_peak": """chord_enable_phi_function chord_mu_decay_steps chord_mu_valley
            chord_mu_warmup_steps chord_sft_per_device_train_batch_size""",
        "used only with max_turns": "completion_length_limit_scope",
        "ms-swift reads this field only in decision tasks": """decision_drop_instructions decision_shuffle_fields
            decision_state_as_text decision_subsample_options""",
        "ms-swift reads this field only with report_to: swanlab": """swanlab_email_language swanlab_exp_name
            swanlab_secret swanlab_notification_method swanlab_receiver_email swanlab_sender_email swanlab_smtp_port
            swanlab_smtp_server swanlab_webhook_url swanlab_workspace""",
        "StreamTune renames only the columns that the recipe names": "disable_auto_column_mapping",
        KERNELS: "attn_impl use_liger use_flash_attn use_logits_to_keep experts_impl",
        CHECKPOINTING: "vit_gradient_checkpointing",
        "StreamTune leaves padding out of the loss": "padding_free padding_side packing_length packing_num_proc",
        "StreamTune prepares rows when the run starts": """load_from_cache_file lazy_tokenize streaming
            shuffle_buffer_size download_mode cached_dataset val_dataset_shuffle strict preprocess_num_proc
            load_data_args""",
        "StreamTune adds no version folder to output_dir": "add_version",
        "StreamTune quantises to 4 bits by bitsandbytes, to 8 by torchao": """bnb_4bit_compute_dtype
            bnb_4bit_use_double_quant bnb_4bit_quant_storage""",
        "StreamTune trains peft's adapters in fp32": "tuner_backend lora_dtype",
        "StreamTune takes code of models and datasets from the hub": "model_kwargs",
        "used only with swift/self-cognition": "model_author model_name",
        "boxes in texts stay as they are": "norm_bbox",
        "the part has the learning rate of the language model, or is frozen": "vit_lr aligner_lr",
        "completions.jsonl records them": "log_entropy",
        "use `streamtune export` to write the model": "merge_lora hub_model_id",
        "used only with rollout_importance_sampling_mode": "rollout_importance_sampling_threshold",
        "StreamTune's epoch has as many rows as all datasets, whatever their weights": "stopping_strategy",
        "see shuffle": "dataset_shuffle",
        "StreamTune always trains on empty think blocks": "disable_ignore_empty_think",
    },
    lost={
        "StreamTune uses the tokenizer's own template: compare both templates": "template",
        "StreamTune renders tools with the chat template": "agent_template tools_prompt",
        "StreamTune reads no rows that another program prepared": "cached_val_dataset",
        "StreamTune's GRPO has no multi-turn rollouts, tools or filters": """gym_env use_gym_env multi_turn_scheduler
            max_turns dynamic_sample max_resample_times soft_max_length soft_cache_length""",
        "StreamTune adds no SFT loss to GRPO": "chord_mu_peak chord_sft_dataset sdar_loss_coef",
        "StreamTune has no mask on off-policy tokens": "off_policy_sequence_mask_delta",
        "StreamTune takes log-probabilities from the trained model, not vLLM": "rollout_importance_sampling_mode",
        "StreamTune does not support structured outputs": "structured_outputs_regex",
        "download the model revision and give its folder": "ref_model_revision reward_model_revision",
        "a reward model": "reward_template reward_model reward_adapters reward_model_plugin",
        "swift's own adapters": "use_swift_lora",
        "the importer converts no trained adapters: merge the adapter first with `streamtune export`": "adapters",
        "StreamTune loads no adapters for the reference model: merge them first": "ref_adapters",
        "StreamTune takes no length for rope_scaling: write its factor": "max_model_len",
        "StreamTune offers no initial values for weights that the checkpoint lacks": "init_strategy",
        "StreamTune runs no code that registers models and datasets": "custom_register_path",
        "StreamTune reads no datasets that are registered in code": "custom_dataset_info",
        "give the functions of this code in reward_funcs: FILE.py:NAME": "external_plugins",
        "write num_train_epochs": "max_epochs",
        "write the ends of module names, or patterns of ends, in lora_target": "target_regex",
        "StreamTune adapts only linear layers, not other parameters": "target_parameters",
        "trained biases": "lora_bias lora_bias_trainable",
        "for LoRA+, write lr_groups: [{match: lora_B, learning_rate: ...}]": "lorap_lr_ratio",
        "LoRA+": "lora_lr_ratio",
        "an unsupported optimizer": "optimizer",
        "write optim: galore": "use_galore",
        "write optim: muon": "use_muon",
        "LISA": "lisa_activated_layers",
        "StreamTune trains the language model of a vision-language model": "freeze_llm",
        "StreamTune trains no classifiers or embedding models": "num_labels problem_type",
    },
    lost_without_effect={
        SERVER: "vllm_server_group_port vllm_server_pass_dataset",
        "give your own code in the recipe key callbacks": "callbacks",
        "a loss per channel": "enable_channel_loss",
        "StreamTune quantises with bitsandbytes or torchao": "hqq_axis",
        "write a DeepSpeed configuration file and give its path": "zero_hpz_partition_size",
        "StreamTune resumes a run exactly where it stopped": "resume_only_model",
        "StreamTune ends a run at max_steps or after its epochs": "stop_strategy",
        "Ray is not supported": "use_ray ray_exp_name device_groups",
        "StreamTune does not support this tracker": "swanlab_project swanlab_token swanlab_mode",
    },
)


def _choose_objective(conversion: Conversion) -> str:
    kind = str(conversion.get("rlhf_type", ""))
    if not kind:
        return "dpo" if conversion.file.command == "rlhf" else "sft"
    if kind not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise conversion.import_error(
            "rlhf_type", what=f"StreamTune has no objective for 'rlhf_type: {kind}'", fix=f"supported: {known}"
        )
    return OBJECTIVES[kind][0]


def _convert_dependent_fields(conversion: Conversion) -> None:
    kind = conversion.pop_field("rlhf_type")
    if kind == "":
        conversion.report_unneeded("rlhf_type", why="no value")
    elif str(kind) in OBJECTIVES and "loss_type" not in conversion.file.fields:
        conversion.write_key("loss_type", OBJECTIVES[str(kind)][1], "rlhf_type")
    elif str(kind) in OBJECTIVES:
        conversion.report_unneeded("rlhf_type", why=f"objective: {conversion.objective}")
    elif kind is not None:
        conversion.report_lost("rlhf_type", why=f"not an objective of StreamTune; {conversion.objective} was given")
    if kind == "simpo" or (kind == "cpo" and conversion.get("loss_type") == "simpo"):
        convert_nll_of_simpo(conversion)
    use_hf = conversion.get("use_hf")
    conversion.mark_unneeded("use_hf", why="StreamTune looks up names on the Hugging Face hub")
    for name in ("model", "model_id_or_path"):
        value = conversion.pop_field(name)
        if value is not None:
            local = use_hf or Path(str(value)).expanduser().exists()
            note = "" if local else "ms-swift loads this name from ModelScope, StreamTune from the Hugging Face hub"
            conversion.write_key("model_name_or_path", value, name, note=note)
    _convert_length_limit(conversion)
    _convert_quantization(conversion)
    _convert_tuner_type(conversion)
    convert_weights_dtype(conversion, "torch_dtype", "dtype", computes_in_it=not conversion.get("bf16"))
    # swift pt has no chat template unless it is asked for
    texts = conversion.file.command == "pt" and not conversion.get("use_chat_template")
    convert_swift_template(conversion, texts=texts)
    if conversion.objective != "grpo":
        conversion.mark_unneeded("enable_thinking", why="ms-swift reads this field for generation, not for training")
    convert_thinking(conversion)
    convert_warmup(conversion)
    convert_trackers(conversion, {})
    convert_datasets(conversion, use_hf)
    if texts:
        _report_rows_without_text(conversion)
    for name, (value, line) in conversion.file.environment.items():
        if name in ("NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES", "MASTER_PORT", "NNODES"):
            ranks = name == "NPROC_PER_NODE"
            why = f"use StreamTune's `--nproc {value}`" if ranks else "set it for StreamTune's command too"
            conversion.report_other_file(f"{name}={value}", f"{conversion.file.path}:{line}", why, None)
        elif name in IMAGE_LIMITS:
            _convert_image_limit(conversion, name, value, f"{conversion.file.path}:{line}")
        elif name.startswith(("VIDEO_", "FPS")):
            where = f"{conversion.file.path}:{line}"
            conversion.report_other_file(f"{name}={value}", where, "StreamTune trains on no videos", None)
    if rows_have_images(conversion) and re.search(r"qwen3.*vl", str(conversion.ours.get("model_name_or_path")).lower()):
        conversion.report_lost_setting(
            "images of fewer than 65,536 pixels",
            "ms-swift does not enlarge them; the processor of Qwen3-VL, which StreamTune uses, does",
        )


IMAGE_LIMITS = {
    "MAX_PIXELS": "max_pixels",
    "MIN_PIXELS": "min_pixels",
    "IMAGE_MAX_TOKEN_NUM": "max_pixels",
    "IMAGE_MIN_TOKEN_NUM": "min_pixels",
}
"""{environment variable that ms-swift and qwen_vl_utils read: StreamTune's key}."""


def _convert_image_limit(conversion: Conversion, name: str, value: str, where: str) -> None:
    """Write ``max_pixels`` or ``min_pixels`` for a variable that limits the pixels or the tokens of an image."""
    model, key = str(conversion.ours.get("model_name_or_path", "")).lower(), IMAGE_LIMITS[name]
    side = 32 if "qwen3" in model else 28 if "qwen2" in model else None  # of a token
    in_tokens, other = name.startswith("IMAGE_"), f"IMAGE_{name[:3]}_TOKEN_NUM"
    if not in_tokens and other in conversion.file.environment:
        conversion.report_other_file(f"{name}={value}", where, f"ms-swift reads {other}", None)
        return
    if side is None or not value.isdigit():
        unit = ": pixels of a token times this number" if in_tokens else ""
        why = "not a number" if side else f"only Qwen's models read it: if yours does, write {key}{unit}"
        conversion.report_other_file(f"{name}={value}", where, why, True)
        return
    pixels = int(value) * side**2 if in_tokens else int(value)
    conversion.write_other_file(key, pixels, f"{name}={value}", where)
    why = "StreamTune scales an image before the processor, so some images have a few tokens more or less"
    conversion.report_other_file(name, where, why, True)


def _convert_length_limit(conversion: Conversion) -> None:
    """Convert ``max_length``, and ``truncation_strategy: left``, which cuts long rows at their start."""
    length = conversion.file.fields.get("max_length")
    if length is None:
        conversion.mark_unneeded("max_length", why="no value")
    elif conversion.objective == "grpo":
        conversion.write_key("max_prompt_length", length, "max_length", note="ms-swift's GRPO limits the prompt")
    else:
        conversion.write_key("max_length", length, "max_length")
    if conversion.get("truncation_strategy") == "left" and conversion.objective != "dpo":
        conversion.write_if_on("truncation_strategy", "overlength", "truncate")
        if conversion.objective == "sft":
            conversion.write_key("truncate_side", "left", "truncation_strategy")


def _report_rows_without_text(conversion: Conversion) -> None:
    """Report rows without a column ``text``, which ``swift pt`` trains without the chat template."""
    for index, spec in enumerate(conversion.ours.get("datasets", [])):
        row = first_local_row(conversion, str(spec["path"]))
        if row is None or "text" not in row:
            where = "cannot be read" if row is None else "have no column 'text'"
            why = f"swift pt trains texts without a chat template, and the rows {where}: write them as {{text: ...}}"
            conversion.report_lost_setting(f"datasets[{index}]", why)


def _convert_quantization(conversion: Conversion) -> None:
    method, bits = conversion.file.fields.get("quant_method"), conversion.get("quant_bits")
    if method not in (None, "bnb"):
        conversion.report_lost("quant_method", why="StreamTune quantises with bitsandbytes or torchao")
    conversion.mark_unneeded("quant_method", why="see quantization")
    if bits and bits not in (4, 8):
        conversion.report_lost("quant_bits", why="StreamTune quantises to 4 bits (nf4) or 8 bits (int8)")
    conversion.write_if_on("quant_bits", "quantization", "nf4" if bits == 4 else "int8")


def _convert_tuner_type(conversion: Conversion) -> None:
    """Convert ``tuner_type`` to ``finetuning_type``, and to ``adapter_type`` for VeRA and IA3."""
    name = next((name for name in TUNER if conversion.get(name)), TUNER[0])
    given = name in conversion.left
    tuner = conversion.pop_field(name) or "lora"
    conversion.mark_unneeded(*TUNER, why=f"set by '{name}'")
    if tuner in KINDS:
        conversion.write_key("adapter_type", tuner, name)
        conversion.ours["finetuning_type"] = "lora"
        if tuner == "vera" and (rank := conversion.pop_field("vera_rank")) is not None:
            conversion.write_key("lora_r", rank, "vera_rank")
    elif tuner in ("lora", "full"):
        quantised = tuner == "lora" and conversion.get("quant_bits") in (4, 8)
        if given:
            conversion.write_key("finetuning_type", "qlora" if quantised else tuner, name)
        elif quantised:
            conversion.ours["finetuning_type"] = "qlora"
    else:
        conversion.report_lost(name, why="StreamTune's finetuning_type is full, lora or qlora; lora is written")
    convert_frozen_parameters(conversion)
    rate = conversion.get("learning_rate")
    for name, part in (("vit_lr", "freeze_vit"), ("aligner_lr", "freeze_aligner")):
        if conversion.get(part) is False and conversion.get(name, rate) != rate:
            conversion.report_lost(name, why="in StreamTune the parts for images have learning_rate")
    convert_tower(
        conversion, {"freeze_vit": "freeze_vision_tower", "freeze_aligner": "freeze_projector"}, "target_modules"
    )


def _write_trainer_defaults(conversion: Conversion) -> None:
    ours, objective = conversion.ours, conversion.objective
    conversion.write_default("finetuning_type", "lora")
    adapters = ours.get("finetuning_type") != "full"
    if adapters:
        conversion.write_default("lora_r", 8)
        conversion.write_default("lora_alpha", 32.0)
        conversion.write_default("lora_dropout", 0.05)
    conversion.write_default("learning_rate", 1e-4 if adapters else 1e-5)
    conversion.write_default("weight_decay", 0.1)
    conversion.write_default("adam_beta2", 0.95)
    conversion.write_default("num_train_epochs", 3.0)
    if objective == "grpo":
        conversion.write_default("per_device_train_batch_size", 1)
    if "gradient_accumulation_steps" not in ours:
        at_once = ours.get("per_device_train_batch_size", 1)
        rows = at_once * -(-ROWS_PER_STEP // at_once)
        conversion.write_default("train_batch_size", rows, "rows of a step, over all ranks")
    if objective != "grpo":
        if "max_length" in ours:
            conversion.write_default("overlength", "drop")
        elif ours.get("overlength") == "drop":
            del ours["overlength"]  # it would drop rows longer than the default of 2048 tokens
        write_default_truncation(conversion)
        if "max_length" not in ours:
            why = (
                "ms-swift's default is the model's maximum; StreamTune refuses rows above 2048 tokens: write max_length"
            )
            conversion.report_lost_setting("max_length", why, changes_training=False)
    else:
        conversion.write_default("beta", 0.04)
        for key, value in (("temperature", 0.9), ("top_p", 0.9), ("top_k", 50)):
            conversion.write_default(key, value)
    if objective == "dpo" and ours.get("loss_type") == "simpo":
        conversion.write_default("beta", 2.0)
        conversion.write_default("simpo_gamma", 1.0)
    if conversion.file.command == "pt":
        conversion.write_default("train_on", "all", "swift pt")
    dtypes = [conversion.get(name) for name in ("torch_dtype", "dtype")]
    if conversion.get("fp16") is None and conversion.get("bf16") is None and "float16" in dtypes:
        conversion.write_default("fp16", True, "ms-swift computes in torch_dtype")
    if conversion.get("bf16") is None and ours.get("dtype") == "bfloat16":
        conversion.write_default("bf16", True)
    unknown = [name for name in ours.get("reward_funcs", []) if name.startswith("REWARDS.py:")]
    if {"numeric_answer", "format_tags"} & set(ours.get("reward_funcs", [])) or unknown:
        why = "the most similar reward of StreamTune is written; compare `docs/rewards.md`"
        conversion.report_lost_setting(
            "reward_funcs", why + (f"; write a file with {', '.join(unknown)}" if unknown else "")
        )
    report_nll_differences(conversion)


SWIFT = PeerTrainer(
    name="swift",
    title="ms-swift",
    fields=FIELDS,
    signs="""model train_type tuner_type sft_type rlhf_type split_dataset_ratio truncation_strategy loss_scale attn_impl
        quant_bits quant_method external_plugins target_modules use_hf model_id_or_path model_author
        custom_register_path load_from_cache_file lazy_tokenize""",
    objective=_choose_objective,
    special=_convert_dependent_fields,
    defaults=_write_trainer_defaults,
)
