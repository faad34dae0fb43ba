"""Recipes of ms-swift: a command of ``swift sft``, ``swift pt`` or ``swift rlhf``, or its arguments in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .conversion import Conversion, PeerTrainer
from .datasets import seen_columns
from .field_rules import (
    FieldRule,
    by_itself,
    first_values,
    more_special_tokens,
    no_counterpart,
    one_of,
    rope_scaling,
    same,
    split_names,
    switches,
    to,
    together,
    whole_modules,
    without,
)
from .swift_datasets import take_datasets
from .templates import take_swift_template
from .trainer_arguments import CHECKPOINTING, KERNELS, TRAINER_FIELDS, take_thinking, take_trackers, take_warmup
from .trl import take_weights_dtype

OBJECTIVES: dict[str, tuple[str, str]] = {
    "dpo": ("dpo", "sigmoid"),
    "orpo": ("dpo", "orpo"),
    "simpo": ("dpo", "simpo"),
    "kto": ("dpo", "kto"),
    "cpo": ("dpo", "cpo"),
    "grpo": ("grpo", "grpo"),
}
"""``rlhf_type`` -> our objective and the default of its loss."""

NEAREST = {"accuracy": "numeric_answer", "format": "format_tags"}
"""Reward functions of swift -> those of ours that come nearest."""

ROWS_PER_STEP = 16
"""Rows of a step where ``gradient_accumulation_steps`` is not given."""

PREPARED = "rows are prepared when the run starts"
PLACED = "models are placed by themselves"
IMAGES = "images, sounds and boxes are not trained on"
OTHER_TUNERS = "read by another tuner only"
VLLM = "vLLM runs in the process of the training"
SERVER = "a server of vLLM is not asked: use_vllm runs vLLM in the process of the training"
TUNER = ("tuner_type", "train_type", "sft_type")
"""Names of the field that says what is trained, in releases from now back."""


def _rewards(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    return [NEAREST.get(name, f"REWARDS.py:{name}") if isinstance(name, str) else name for name in names]


FIELDS: dict[str, FieldRule] = {
    **TRAINER_FIELDS,
    **same("lora_rank", "lora_alpha", "lora_dropout", "packing", "sequence_parallel_size", "router_aux_loss_coef"),
    "sequence_parallel_size": to("sequence_parallel_size", trains=False),
    "target_modules": to("lora_target", split_names),
    "split_dataset_ratio": to("val_size"),
    "truncation_strategy": to(
        "overlength",
        one_of({"delete": "drop", "right": "truncate", "split": "split"}, "a row that is too long is cut at its end"),
    ),
    "loss_scale": to(
        "train_on",
        one_of(
            {"default": "assistant", "last_round": "last", "all": "all"},
            "weights of tokens: train_on takes assistant, completion, last, all",
        ),
    ),
    # rlhf
    **same("beta", "label_smoothing", "simpo_gamma", "cpo_alpha", "desirable_weight", "undesirable_weight"),
    "rpo_alpha": to("rpo_alpha", lambda value: value or None),
    "ref_model": to("ref_model_name_or_path"),
    "loss_type": to("loss_type", lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value),
    "reward_funcs": to("reward_funcs", _rewards),
    **same("reward_weights", "num_generations", "max_completion_length", "temperature", "top_p", "repetition_penalty"),
    **same("steps_per_generation", "generation_batch_size", "importance_sampling_level", "epsilon", "epsilon_high"),
    **same("delta", "num_iterations"),
    "top_k": to("top_k", lambda value: max(value, 0) if isinstance(value, int) else value),
    "scale_rewards": to(
        "scale_rewards", one_of({True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"})
    ),
    "overlong_filter": to("mask_truncated_completions"),
    **same("use_vllm", "vllm_gpu_memory_utilization", trains=False),
    "chat_template": to("chat_template"),
    **same("min_p chat_template_kwargs"),
    "early_stop_interval": to("early_stopping_patience"),
    # taken together
    **together(*TUNER, "freeze_parameters_ratio", ours="finetuning_type"),
    **together("rlhf_type", why="the objective of the recipe"),
    **together("use_hf", why="names are looked up on the Hugging Face hub"),
    **together("model model_id_or_path", ours="model_name_or_path"),
    **together("max_length", ours="max_length"),
    **together("quant_bits quant_method", ours="quantization"),
    **together("torch_dtype dtype", ours="dtype"),
    **without("the tokenizer's own template is used: compare it", "template"),
    **together("warmup_steps", ours="warmup_steps"),
    **together("warmup_ratio", ours="warmup_ratio"),
    **together("dataset columns interleave_prob", ours="datasets"),
    **together("val_dataset", ours="eval_datasets"),
    **together("enable_thinking preserve_thinking", ours="chat_template_kwargs"),
    # what StreamTune does by itself
    **by_itself(
        VLLM, "vllm_data_parallel_size vllm_pipeline_parallel_size vllm_disable_cascade_attn vllm_engine_kwargs"
    ),
    **by_itself(VLLM, "vllm_enable_expert_parallel vllm_enable_lora vllm_max_lora_rank vllm_mm_processor_cache_gb"),
    **by_itself(VLLM, "vllm_quantization vllm_reasoning_parser vllm_speculative_config vllm_use_async_engine"),
    **by_itself(VLLM, "enable_flattened_weight_sync local_rollout_forward_batch_size offload_teacher_model"),
    **by_itself("the model's configuration says it", "ref_model_type reward_model_type teacher_model_type"),
    **by_itself("models are placed by themselves", "enable_npu_model_patch ds3_gather_for_generation"),
    **by_itself("read in evaluation only", "eval_metric generation_config generation_max_length"),
    **by_itself("read in evaluation only", "generation_num_beams num_generations_eval"),
    **by_itself("rows are drawn by 'seed'; packing: true saves the padding", "sortish_sampler"),
    **by_itself("packing fills every sequence as far as rows fit", "packing_strategy"),
    **by_itself("checkpoints are safetensors in pieces", "max_shard_size safe_serialization use_flash_ckpt"),
    **by_itself("metrics.jsonl has every step", "log_rollout_offpolicy_metrics wandb_log_unique_prompts"),
    **by_itself(OTHER_TUNERS, "adalora_beta1 adalora_beta2 adalora_deltaT adalora_orth_reg_weight adalora_tfinal"),
    **by_itself(OTHER_TUNERS, "adalora_tinit boft_block_num boft_dropout boft_n_butterfly_factor fourier_scaling"),
    **by_itself(OTHER_TUNERS, "galore_cos_threshold galore_gamma_proj galore_optim_per_parameter galore_proj_bits"),
    **by_itself(OTHER_TUNERS, "galore_proj_group_size galore_proj_quant galore_quantization galore_queue_size"),
    **by_itself(OTHER_TUNERS, "galore_with_embedding reft_args reft_intervention_type reft_layer_key reft_layers"),
    **by_itself(OTHER_TUNERS, "vera_d_initial vera_dropout vera_projection_prng_key"),
    **by_itself(OTHER_TUNERS, "lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale"),
    **by_itself(OTHER_TUNERS, "lora_ga_stable_gamma"),
    **by_itself("read by PPO only", "cliprange cliprange_value gamma kl_coef lam num_mini_batches num_ppo_epochs"),
    **by_itself(
        "read by PPO only", "num_sample_generations response_length vf_coef whiten_rewards missing_eos_penalty"
    ),
    **by_itself("read by reward models only", "center_rewards_coefficient mrl_dims"),
    **by_itself("read by rlhf_type: gkd only", "gkd_logits_topk lmbda seq_kd sft_alpha teacher_adapters"),
    **by_itself("read by rlhf_type: gkd only", "teacher_deepspeed teacher_kl_coef teacher_model_revision"),
    **by_itself("read by rlhf_type: gkd only", "teacher_model_server teacher_tag_key teacher_model"),
    **by_itself("read with another loss only", "discopop_tau real_tau tau_neg tau_pos fipo_clip_high_only"),
    **by_itself("read with another loss only", "fipo_clip_range fipo_decay_rate fipo_safety_threshold rlsd_lambda"),
    **by_itself("read with another loss only", "rlsd_lambda_decay_steps rlsd_lambda_warmup_steps rlsd_negative_only"),
    **by_itself("read with another loss only", "rlsd_reweight_clip_range sdar_gate_beta"),
    **by_itself("read by its reward function only", "cosine_max_len cosine_max_len_value_correct"),
    **by_itself("read by its reward function only", "cosine_max_len_value_wrong cosine_min_len_value_correct"),
    **by_itself("read by its reward function only", "cosine_min_len_value_wrong repetition_max_penalty"),
    **by_itself("read by its reward function only", "repetition_n_grams"),
    **by_itself("read with sync_ref_model only", "ref_model_mixup_alpha ref_model_sync_steps"),
    **by_itself("read with chord_mu_peak only", "chord_enable_phi_function chord_mu_decay_steps chord_mu_valley"),
    **by_itself("read with chord_mu_peak only", "chord_mu_warmup_steps chord_sft_per_device_train_batch_size"),
    **by_itself("read with max_turns only", "completion_length_limit_scope"),
    **by_itself("read by tasks of decisions only", "decision_drop_instructions decision_shuffle_fields"),
    **by_itself("read by tasks of decisions only", "decision_state_as_text decision_subsample_options"),
    **by_itself("read with report_to: swanlab only", "swanlab_email_language swanlab_exp_name swanlab_secret"),
    **by_itself("read with report_to: swanlab only", "swanlab_notification_method swanlab_receiver_email"),
    **by_itself("read with report_to: swanlab only", "swanlab_sender_email swanlab_smtp_port swanlab_smtp_server"),
    **by_itself("read with report_to: swanlab only", "swanlab_webhook_url swanlab_workspace"),
    **by_itself("rows of the columns that a recipe names are renamed", "disable_auto_column_mapping"),
    **by_itself(KERNELS, "attn_impl", "use_liger", "use_flash_attn", "use_logits_to_keep", "experts_impl"),
    **by_itself(CHECKPOINTING, "vit_gradient_checkpointing"),
    **by_itself(
        "padding takes no part in the loss", "padding_free", "padding_side", "packing_length", "packing_num_proc"
    ),
    **by_itself(PREPARED, "load_from_cache_file", "lazy_tokenize", "streaming", "shuffle_buffer_size", "download_mode"),
    **by_itself(PREPARED, "cached_dataset", "val_dataset_shuffle", "strict", "preprocess_num_proc", "load_data_args"),
    **by_itself("the model's configuration says it", "model_type", "task_type", "local_repo_path", "load_args"),
    **by_itself(PLACED, "device_map", "max_memory", "ignore_args_error", "check_model", "create_checkpoint_symlink"),
    **by_itself("output_dir is the folder itself", "add_version"),
    **by_itself(
        "4 bits by bitsandbytes, 8 by torchao",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_use_double_quant",
        "bnb_4bit_quant_storage",
    ),
    **by_itself("adapters are trained by peft, in fp32", "tuner_backend", "lora_dtype"),
    **by_itself("metrics.jsonl has every step", "acc_strategy", "logging_dir"),
    **by_itself("the code of models and datasets comes from the hub", "model_kwargs"),
    **by_itself(
        "read in evaluation only", "max_new_tokens", "num_beams", "stream", "stop_words", "logprobs", "top_logprobs"
    ),
    **by_itself("read in evaluation only", "eval_use_evalscope", "eval_dataset", "eval_dataset_args", "eval_limit"),
    **by_itself("read in evaluation only", "eval_generation_config", "extra_eval_args", "response_prefix"),
    **together("model_author model_name", why="read with swift/self-cognition only"),
    **by_itself(IMAGES, "max_pixels", "norm_bbox", "freeze_vit", "freeze_aligner", "vit_lr", "aligner_lr"),
    **by_itself(VLLM, "vllm_tensor_parallel_size"),
    **without(SERVER, "vllm_mode", trains=False, off=("colocate",)),
    **without(SERVER, "vllm_server_host vllm_server_port vllm_server_timeout vllm_server_group_port", trains=False),
    **without(SERVER, "vllm_server_base_url vllm_server_pass_dataset", trains=False),
    **by_itself(VLLM, "vllm_max_model_len", "vllm_enforce_eager", "vllm_enable_prefix_caching", "vllm_max_num_seqs"),
    **by_itself(VLLM, "vllm_limit_mm_per_prompt", "vllm_disable_custom_all_reduce", "sleep_level"),
    **by_itself(
        VLLM, "offload_model", "offload_optimizer", "move_model_batches", "async_generate", "gc_collect_after_offload"
    ),
    **by_itself("completions.jsonl has them", "log_completions", "log_entropy"),
    **by_itself("`streamtune export` writes the model", "merge_lora", "hub_model_id"),
    **by_itself(OTHER_TUNERS, "galore_rank", "galore_target_modules", "galore_update_proj_gap", "galore_scale"),
    **by_itself(OTHER_TUNERS, "galore_proj_type", "lisa_step_interval", "adalora_target_r", "adalora_init_r"),
    **by_itself(OTHER_TUNERS, "llamapro_num_new_blocks", "llamapro_num_groups", "reft_rank", "boft_block_size"),
    **by_itself(OTHER_TUNERS, "vera_rank", "fourier_n_frequency", "adapter_act", "adapter_length"),
    **without("tools are rendered by the chat template", "agent_template", "tools_prompt"),
    **together("template_backend", ours="train_on"),
    # lost
    **without("the trained tokens' weights are 1 or 0", "is_binary_loss_scale", off=(True,)),
    "add_non_thinking_prefix": no_counterpart("what the chat template renders before an answer is kept", off=(True,)),
    "disable_ignore_empty_think": no_counterpart("empty thoughts of the template are not trained"),
    **without("rows that are prepared elsewhere", "cached_val_dataset"),
    **without("code of your own: name it in callbacks of the recipe", "callbacks", trains=False),
    **without("GRPO with several turns, tools or filters", "gym_env use_gym_env"),
    **without("another estimate of advantages", "advantage_reweight kl_in_reward", off=("none",)),
    "advantage_estimator": no_counterpart("write loss_type: rloo for rloo", off=("grpo",)),
    **without("a loss of rows beside the rewards", "chord_mu_peak chord_sft_dataset sdar_loss_coef"),
    **without("a loss on the tokens of highest entropy only", "top_entropy_quantile", off=(1.0, 1)),
    **without("a mask on tokens far from the policy that wrote them", "off_policy_sequence_mask_delta"),
    "rollout_importance_sampling_mode": no_counterpart("the log-probabilities of the trained model are taken"),
    **by_itself("read with rollout_importance_sampling_mode only", "rollout_importance_sampling_threshold"),
    **without("completions have no grammar", "structured_outputs_regex"),
    **without("a revision of a model: download it and name its folder", "ref_model_revision reward_model_revision"),
    **without("a reward model", "reward_template"),
    **without("adapters of swift's own", "use_swift_lora"),
    "model_revision": no_counterpart(
        "a revision of the model: download it and name its folder", off=("master", "main")
    ),
    "adapters": no_counterpart("a trained adapter to begin with: merge it first with `streamtune export`"),
    "ref_adapters": no_counterpart("adapters of the reference: merge them first"),
    "new_special_tokens": to("special_tokens", more_special_tokens),
    "rope_scaling": to("rope_scaling", rope_scaling),
    "max_model_len": no_counterpart("the length that rope_scaling reaches: write its factor"),
    "system": to("default_system"),
    "use_chat_template": no_counterpart("rows of messages are rendered by the chat template", off=(True,)),
    "init_strategy": no_counterpart("first values of weights that the checkpoint has not"),
    "custom_register_path": no_counterpart("code that registers models and datasets"),
    "custom_dataset_info": no_counterpart("datasets that are registered elsewhere"),
    "external_plugins": no_counterpart("code: name its functions in reward_funcs: FILE.py:NAME"),
    **by_itself("an epoch of weighted datasets is as long as all rows", "stopping_strategy"),
    **by_itself("see shuffle", "dataset_shuffle"),
    "train_dataloader_shuffle": to("shuffle"),
    "max_epochs": no_counterpart("write num_train_epochs"),
    "modules_to_save": to("modules_to_save", whole_modules),
    "target_regex": no_counterpart("a pattern; list the ends of the modules' names in lora_target"),
    "target_parameters": no_counterpart("adapters on parameters that are no linear layers"),
    "init_weights": to("adapter_type", first_values),
    "init_lora_weights": to("adapter_type", first_values),
    "lora_bias": no_counterpart("trained biases"),
    "lora_bias_trainable": no_counterpart("trained biases"),
    "lorap_lr_ratio": no_counterpart("LoRA+: write lr_groups: [{match: lora_B, learning_rate: ...}]"),
    "lora_lr_ratio": no_counterpart("LoRA+"),
    **switches("use_rslora", "use_dora"),
    "optimizer": no_counterpart("an optimizer that is not here"),
    "use_galore": no_counterpart("write optim: galore"),
    "use_muon": no_counterpart("write optim: muon"),
    "lisa_activated_layers": no_counterpart("LISA"),
    **without("frozen weights", "freeze_llm", "freeze_parameters", "freeze_parameters_regex"),
    **without(
        "frozen weights", "trainable_parameters", "trainable_parameters_regex", "additional_trainable_parameters"
    ),
    "enable_dft_loss": FieldRule("loss_type", lambda value: "dft" if value else "nll"),
    "enable_channel_loss": no_counterpart("a loss by channel", trains=False),
    "hqq_axis": no_counterpart("bitsandbytes or torchao quantise", trains=False),
    "bnb_4bit_quant_type": no_counterpart("4 bits are nf4", off=("nf4",)),
    "zero_hpz_partition_size": no_counterpart("write a DeepSpeed configuration and name it", trains=False),
    "deepspeed_autotp_size": no_counterpart("tensors are not shared", trains=False, off=(1,)),
    "resume_only_model": no_counterpart("a resumed run goes on where it was", trains=False),
    **without("a classifier or an embedding model", "num_labels", "problem_type"),
    "ld_alpha": no_counterpart("LD-DPO"),
    "f_divergence_type": no_counterpart("reverse KL is the divergence", off=("reverse_kl",)),
    "loss_weights": no_counterpart("a sum of several losses"),
    **without("a reward model", "reward_model", "reward_adapters", "reward_model_plugin"),
    **without("GRPO with several turns, tools or filters", "multi_turn_scheduler", "max_turns", "dynamic_sample"),
    **without(
        "GRPO with several turns, tools or filters", "max_resample_times", "soft_max_length", "soft_cache_length"
    ),
    "sync_ref_model": no_counterpart("the reference stays as it is"),
    "stop_strategy": no_counterpart("a run stops at max_steps or after its epochs", trains=False),
    **without("Ray does not start runs", "use_ray", "ray_exp_name", "device_groups", trains=False),
    **without("this tracker is not here", "swanlab_project", "swanlab_token", "swanlab_mode", trains=False),
}


def _objective(conversion: Conversion) -> str:
    kind = str(conversion.get("rlhf_type", ""))
    if not kind:
        return "dpo" if conversion.file.command == "rlhf" else "sft"
    if kind not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise conversion.refuse("rlhf_type", what=f"'rlhf_type: {kind}' has no counterpart", mend=f"known are {known}")
    return OBJECTIVES[kind][0]


def _special(conversion: Conversion) -> None:
    given = conversion.file.fields
    kind = conversion.take("rlhf_type")
    if kind == "":
        conversion.unneeded("rlhf_type", why="no value")
    elif kind is not None:
        loss = OBJECTIVES[kind][1]
        if "loss_type" not in given:
            conversion.put("loss_type", loss, "rlhf_type")
        else:
            conversion.unneeded("rlhf_type", why=f"objective: {conversion.objective}")
    use_hf = conversion.take("use_hf")
    if "use_hf" in given:
        conversion.unneeded("use_hf", why="names are looked up on the Hugging Face hub")
    _take_model(conversion, use_hf)
    _take_length(conversion)
    _take_left(conversion)
    _take_quantization(conversion)
    _take_tuner(conversion)
    take_weights_dtype(conversion, ("torch_dtype", "dtype"))
    take_swift_template(conversion, texts=_trains_texts(conversion))
    if conversion.objective != "grpo" and "enable_thinking" in conversion.left:
        conversion.take("enable_thinking")
        conversion.unneeded("enable_thinking", why="read when it generates; rows are rendered the same either way")
    take_thinking(conversion)
    take_warmup(conversion)
    take_trackers(conversion, {})
    take_datasets(conversion, use_hf)
    if _trains_texts(conversion):
        _take_texts(conversion)
    for name, (value, line) in conversion.file.environment.items():
        if name in ("NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES", "MASTER_PORT", "NNODES"):
            why = (
                f"`--nproc {value}` of the command"
                if name == "NPROC_PER_NODE"
                else "set it in front of the command here too"
            )
            conversion.report(f"{name}={value}", f"{conversion.file.path}:{line}", why, None)


def _trains_texts(conversion: Conversion) -> bool:
    """Return True for ``swift pt``, which has no chat template unless it is asked for."""
    return conversion.file.command == "pt" and not conversion.get("use_chat_template")


def _take_model(conversion: Conversion, use_hf: Any) -> None:
    for name in ("model", "model_id_or_path"):
        value = conversion.take(name)
        if value is not None:
            local = use_hf or Path(str(value)).expanduser().exists()
            conversion.put(
                "model_name_or_path", value, name, note="" if local else "from ModelScope there, here from the hub"
            )


def _take_length(conversion: Conversion) -> None:
    length = conversion.take("max_length")
    if length is None:
        if "max_length" in conversion.file.fields:
            conversion.unneeded("max_length", why="no value")
    elif conversion.objective == "grpo":
        conversion.put("max_prompt_length", length, "max_length", note="in GRPO it is that of the prompt")
    else:
        conversion.put("max_length", length, "max_length")


def _take_left(conversion: Conversion) -> None:
    """Convert a cut at the beginning of rows; prompts of GRPO lose their beginning in any case."""
    name = "truncation_strategy"
    if conversion.get(name) == "left" and conversion.objective != "dpo":
        conversion.take(name)
        conversion.put("overlength", "truncate", name)
        if conversion.objective == "sft":
            conversion.put("truncate_side", "left", name)


def _take_texts(conversion: Conversion) -> None:
    """Report rows of messages that ``swift pt`` trains: their text alone, without the chat template."""
    for index, spec in enumerate(conversion.ours.get("datasets", [])):
        row = seen_columns(conversion, str(spec["path"]))
        if row is None or "text" not in row:
            where = "are not here" if row is None else "have no column 'text'"
            why = f"swift pt trains texts without a chat template, and the rows {where}: write them as {{text: ...}}"
            conversion.missing(f"datasets[{index}]", why)


def _take_quantization(conversion: Conversion) -> None:
    method, bits = conversion.take("quant_method"), conversion.take("quant_bits")
    given = conversion.file.fields
    if method not in (None, "bnb"):
        conversion.lose("quant_method", why="bitsandbytes or torchao quantise")
    elif "quant_method" in given:
        conversion.unneeded("quant_method", why="see quantization")
    if bits in (4, 8):
        conversion.put("quantization", {4: "nf4", 8: "int8"}[bits], "quant_bits")
    elif bits:
        conversion.lose("quant_bits", why="4 bits (nf4) or 8 (int8)")
    elif "quant_bits" in given:
        conversion.unneeded("quant_bits", why="off, as here")


def _take_tuner(conversion: Conversion) -> None:
    """Convert what is trained: adapters that are another kind here, all weights, or a part of them."""
    name = next((name for name in TUNER if conversion.get(name)), TUNER[0])
    given = name in conversion.file.fields
    for other in TUNER:
        if other in conversion.file.fields and other != name:
            conversion.take(other)
            conversion.unneeded(other, why=f"'{name}' says it")
    tuner = conversion.take(name) or "lora"
    ratio = conversion.take("freeze_parameters_ratio")
    if ratio and tuner == "full":
        conversion.lose("freeze_parameters_ratio", why="frozen weights: here all weights are trained")
    elif "freeze_parameters_ratio" in conversion.file.fields:
        conversion.unneeded("freeze_parameters_ratio", why="off" if not ratio else "read with full only")
    if tuner in KINDS:
        conversion.put("adapter_type", tuner, name)
        conversion.ours["finetuning_type"] = "lora"
        if tuner == "vera" and (rank := conversion.take("vera_rank")) is not None:
            conversion.put("lora_r", rank, "vera_rank")
    elif tuner in ("lora", "full"):
        quantised = tuner == "lora" and conversion.get("quant_bits") in (4, 8)
        if given:
            conversion.put("finetuning_type", "qlora" if quantised else tuner, name)
        elif quantised:
            conversion.ours["finetuning_type"] = "qlora"
    else:
        conversion.lose(name, why="we have full, lora and qlora; here it is lora")


KINDS = ("vera", "ia3")
"""Tuners that are kinds of adapters here."""


def _defaults(conversion: Conversion) -> None:
    ours, objective = conversion.ours, conversion.objective
    conversion.default("finetuning_type", "lora")
    adapters = ours.get("finetuning_type") != "full"
    if adapters:
        conversion.default("lora_r", 8)
        conversion.default("lora_alpha", 32.0)
        conversion.default("lora_dropout", 0.05)
    conversion.default("learning_rate", 1e-4 if adapters else 1e-5)
    conversion.default("weight_decay", 0.1)
    conversion.default("adam_beta2", 0.95)
    conversion.default("num_train_epochs", 3.0)
    if objective != "grpo":
        if "gradient_accumulation_steps" not in ours:
            conversion.default("train_batch_size", ROWS_PER_STEP, "over all ranks, where gradients are accumulated")
        if "max_length" in ours:
            conversion.default("overlength", "drop")
        elif ours.get("overlength") == "drop":
            del ours["overlength"]  # of rows over the 2048 tokens that nobody chose
        if objective == "sft" and ours.get("overlength") == "truncate":
            conversion.default("truncate_side", "right")
        elif objective == "sft" and ours.get("overlength") == "split":
            conversion.default("split_at", "token")
        if "max_length" not in ours:
            why = "unset it is the longest row that the model takes; here longer rows than 2048 are an error: write it"
            conversion.missing("max_length", why, trains=False)
    else:
        conversion.default("per_device_train_batch_size", 1)
        conversion.default("beta", 0.04)
        for key, value in (("temperature", 0.9), ("top_p", 0.9), ("top_k", 50)):
            conversion.default(key, value)
    if objective == "dpo" and ours.get("loss_type") == "simpo":
        conversion.default("beta", 2.0)
        conversion.default("simpo_gamma", 1.0)
    if conversion.file.command == "pt":
        conversion.default("train_on", "all", "swift pt")
    if conversion.get("bf16") is None and ours.get("dtype") == "bfloat16":
        conversion.default("bf16", True)
    unknown = [name for name in ours.get("reward_funcs", []) if name.startswith("REWARDS.py:")]
    if {"numeric_answer", "format_tags"} & set(ours.get("reward_funcs", [])) or unknown:
        why = "of our own rewards the nearest is written; compare `docs/rewards.md`"
        conversion.missing("reward_funcs", why + (f"; write a file with {', '.join(unknown)}" if unknown else ""))


SIGNS = (
    "model train_type tuner_type sft_type rlhf_type split_dataset_ratio truncation_strategy loss_scale attn_impl "
    "quant_bits quant_method external_plugins target_modules use_hf model_id_or_path model_author custom_register_path "
    "load_from_cache_file lazy_tokenize"
)
"""Fields that no other trainer has."""

SWIFT = PeerTrainer(
    name="swift",
    title="ms-swift",
    fields=FIELDS,
    signs=frozenset(SIGNS.split()),
    objective=_objective,
    special=_special,
    defaults=_defaults,
    other_defaults=frozenset(
        [
            *("finetuning_type", "lora_r", "lora_alpha", "lora_dropout", "learning_rate", "weight_decay", "adam_beta2"),
            *("num_train_epochs", "train_batch_size", "overlength", "truncate_side", "split_at", "train_on", "bf16"),
            "reasoning",
            *("per_device_train_batch_size", "beta", "temperature", "top_p", "top_k", "simpo_gamma"),
        ]
    ),
)
