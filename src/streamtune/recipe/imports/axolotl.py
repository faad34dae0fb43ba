"""Recipes of axolotl."""

from __future__ import annotations

import re
from typing import Any

from .axolotl_datasets import take_datasets
from .conversion import Conversion, PeerTrainer
from .rules import (
    FieldRule,
    UnconvertedError,
    adapter_kind,
    by_itself,
    no_counterpart,
    one_of,
    optimizer,
    same,
    special_tokens,
    split_names,
    to,
    whole_modules,
    without,
)
from .trainer_arguments import CHECKPOINTING, KERNELS, TRAINER_FIELDS, take_trackers, take_warmup

__all__ = ["AXOLOTL"]

OBJECTIVES: dict[str, tuple[str, str]] = {
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "orpo": ("dpo", "orpo"),
    "simpo": ("dpo", "simpo"),
    "kto": ("dpo", "kto"),
    "grpo": ("grpo", ""),
}
"""Value of ``rl`` -> our objective and loss."""

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
    "excess_length_strategy": to("overlength", one_of({"drop": "drop", "truncate": "truncate", "raise": "error"})),
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
    **{f"trl.{name}": to(name, trains=False) for name in ("use_vllm", "vllm_gpu_memory_utilization")},
    "trl.log_completions": FieldRule(why="completions.jsonl has them", needed=False),
    **by_itself("vLLM runs in the process of the training", "trl.vllm_device", "trl.vllm_dtype", "trl.vllm_mode"),
    **by_itself("vLLM runs in the process of the training", "trl.vllm_max_model_len", "trl.vllm_enable_prefix_caching"),
    **by_itself("vLLM runs in the process of the training", "trl.vllm_server_host", "trl.vllm_server_port", "vllm"),
    **by_itself("vLLM runs in the process of the training", "trl.vllm_server_timeout"),
    **without("the reference stays as it is", "trl.sync_ref_model"),
    **by_itself("the reference stays as it is", "trl.ref_model_mixup_alpha", "trl.ref_model_sync_steps"),
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
    # lost
    "special_tokens": to("special_tokens", special_tokens),
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
    "overrides_of_model_config": no_counterpart(
        "changes of the model's configuration, of which rope_scaling and rope_theta are keys here"
    ),
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
    "peft.loftq_config": no_counterpart("write adapter_type: loftq with finetuning_type: qlora"),
    "peft_use_dora": adapter_kind("dora"),
    "peft_use_rslora": adapter_kind("rslora"),
    "peft_init_lora_weights": no_counterpart("first values of the adapters", off=(True, "default")),
    **without("adapters on some layers", "peft_layers_to_transform", "peft_layers_pattern", "peft_layer_replication"),
    **without("trained tokens beside the adapters", "peft_trainable_token_indices", "peft_ensure_weight_tying"),
    **without("LoRA+: write lr_groups: [{match: lora_B, learning_rate: ...}]", "loraplus_lr_ratio"),
    **by_itself("read with loraplus_lr_ratio only", "loraplus_lr_embedding"),
    "peft_autocast_adapter_dtype": no_counterpart("", trains=False, off=(True,)),
    **without("ReLoRA", "relora", "relora_steps", "relora_warmup_steps", "relora_anneal_steps", "jagged_restart_steps"),
    **by_itself("read with relora only", "relora_prune_ratio", "relora_prune_method", "relora_cpu_offload"),
    **without("LISA", "lisa_n_layers", "lisa_step_interval", "lisa_layers_attribute"),
    **without("learning rates of groups: write lr_groups", "embedding_lr", "embedding_lr_scale", "lr_groups"),
    **without(
        "a schedule of its own",
        "lr_quadratic_warmup",
        "cosine_min_lr_ratio",
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
    "shuffle_merged_datasets": to("shuffle"),
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
    _take_adapter(conversion)
    _take_precision(conversion)
    _take_template(conversion)
    on_inputs = conversion.take("train_on_inputs")
    if on_inputs is not None:
        conversion.put("train_on", "all" if on_inputs else "assistant", "train_on_inputs")
    strategy, fields = conversion.take("load_best_model_at_end"), conversion.file.fields
    if strategy:
        conversion.lose("load_best_model_at_end", why="metric_for_best_model keeps the best checkpoint", trains=False)
    elif "load_best_model_at_end" in fields:
        conversion.unneeded("load_best_model_at_end", why="off, as here")
    _take_batch(conversion)
    take_warmup(conversion)
    trackers = {"wandb_project": "wandb", "use_wandb": "wandb", "use_mlflow": "mlflow", "mlflow_tracking_uri": "mlflow"}
    take_trackers(conversion, {**trackers, "use_tensorboard": "tensorboard", "use_trackio": "trackio"})
    take_datasets(conversion)


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
    elif str(template).startswith("tokenizer_default_fallback_"):
        conversion.unneeded("chat_template", why="the tokenizer's own template; without one a run stops")
    else:
        why = "the tokenizer's own template is used; where it differs, write chat_template: FILE.jinja"
        conversion.lose("chat_template", why=why)


def _defaults(conversion: Conversion) -> None:
    if conversion.objective == "sft" and conversion.ours.get("overlength") == "truncate":
        conversion.default("truncate_side", "right")
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
)
